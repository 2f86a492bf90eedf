"""Checks are functions ``check_...`` without arguments; ``each`` makes one for each case."""

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import nn

CHECKS = {}
ones = jnp.ones
B, I, H = 2, 3, 4  # noqa: E741 - samples, inputs, units
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, I)), 'float32')
XS = jnp.asarray(np.random.default_rng(1).normal(size=(5, B, I)), 'float32')
YS = jnp.asarray(np.random.default_rng(2).normal(size=(5, B, 2)), 'float32')


def in_time_steps(function, *args):
    """Call a function with a time step that ends with the call."""
    with brainstate.environ.context(dt=0.1 * u.ms):
        return function(*args)


CELLS = [
    'ValinaRNNCell',
    'GRUCell',
    'MGUCell',
    'LSTMCell',
    'URLSTMCell',
    'MinimalRNNCell',
    'MiniGRU',
    'MiniLSTM',
    'CFNCell',
]
RULES = {
    'D_RTRL': {},
    'pp_prop': {'decay_or_rank': 0.9},
    'ES_D_RTRL': {'decay_or_rank': 5},
    'OSTLRecurrent': {},
    'OSTLFeedforward': {},
    'EProp': {},
    'SnAp': {},
    'UORO': {},
    'ThreeFactor': {'modulator': 1.0},
    'DNI': {},
    'ParamDimVjpAlgorithm': {},
    'IODimVjpAlgorithm': {'decay_or_rank': 0.9},
    'RandomProjectionVjpAlgorithm': {},
}
PER_PARAMETER = ('D_RTRL', 'OSTLRecurrent', 'EProp', 'ThreeFactor')
FACTORISED = ('pp_prop', 'ES_D_RTRL', 'OSTLFeedforward', 'IODimVjpAlgorithm')


def check(function):
    """Register a check."""
    CHECKS[function.__name__.removeprefix('check_')] = function
    return function


def each(*cases):
    """Register a check for each case; a case is one argument, or a tuple of some."""

    def register(function):
        for case in cases:
            args = case if isinstance(case, tuple) else (case,)
            shown = '-'.join(str(a)[:40] for a in args)
            name = f'{function.__name__.removeprefix("check_")}[{shown}]'
            CHECKS[name] = lambda args=args: function(*args)
        return function

    return register


def raises(kinds, call, *args, **options):
    """The error of a call that must fail with one of some kinds."""
    try:
        call(*args, **options)
    except kinds as error:
        return error
    raise AssertionError(f'{kinds} not raised')


class Net(brainstate.nn.Module):
    """A cell and a read-out."""

    def __init__(self, cell='GRUCell', out=2):
        super().__init__()
        self.rnn = getattr(nn, cell)(I, H)
        self.out = nn.Linear(H, out)

    def update(self, x):
        return self.out(self.rnn(x))


class Op(brainstate.nn.Module):
    """A leaky tanh unit driven by a function of its parameters and the input."""

    def __init__(self, drive, shape=(H,), **params):
        super().__init__()
        self.drive, self.shape = drive, shape
        for name, value in params.items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size=None, **kwargs):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, *self.shape)))

    def update(self, x):
        self.h.value = jnp.tanh(0.9 * self.h.value + self.drive(self, x))
        return self.h.value


def ready(model, batch=B):
    """A model with states."""
    brainstate.nn.init_all_states(model, batch_size=batch)
    return model


def learner_of(rule, cell='GRUCell', batch=B, **options):
    """A compiled learner of a cell and a read-out."""
    net = ready(Net(cell), batch)
    learner = getattr(braintrace, rule)(net, **{**RULES[rule], **options})
    learner.compile_graph(X if batch else X[0])
    if rule == 'DNI':
        shapes = learner.group_signal_shapes()
        learner.attach_synthesizer(braintrace.SyntheticGradient(shapes))
    return net, learner


def graph_of(model, *inputs, batch=B):
    """The graph of a model."""
    return braintrace.compile_etrace_graph(ready(model, batch), *inputs)


def shapes(tree):
    """Shapes of arrays."""
    return jax.tree.map(jnp.shape, tree)
