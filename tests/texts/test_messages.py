"""The whole text of errors, warnings and reports, in ``messages.txt``.

Every entry of the file is what a short piece of code says. `make messages` writes the file; a change of a text is read
as the difference of the file. A new entry is a function with `@says(class, key word)`: it raises, warns, or returns
what is shown. Its name is the heading.
"""

import functools
import os
import re
import warnings
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace.errors import RecompilationWarning
from texts.test_errors import BAD, UNTRAINED

FILE = Path(__file__).parent / 'messages.txt'
PROVOCATIONS = {}
"""By name: class of what is said (None: a text that is shown), a key word, the function."""
X, XS, OTHER = jnp.ones((4, 3)), jnp.ones((5, 4, 3)), jnp.ones((5, 2, 3))


def says(kind, word, name=None):
    """Register a function that says something."""

    def register(function):
        title = name or function.__name__.replace('_', ' ').strip()
        assert title not in PROVOCATIONS
        PROVOCATIONS[title] = (kind, word, function)
        return function

    return register


class Leak(brainstate.nn.Module):
    """Units that decay, with a read-out."""

    kind = brainstate.HiddenState

    def __init__(self, inputs=3, units=6, outputs=2):
        super().__init__()
        self.units = units
        self.feed = brainstate.ParamState(0.1 * jnp.ones((inputs, units)))
        self.out = brainstate.ParamState(0.1 * jnp.ones((units, outputs)))

    def init_state(self, batch_size=None, **kwargs):
        shape = (self.units,) if batch_size is None else (batch_size, self.units)
        self.h = self.kind(jnp.zeros(shape))

    def update(self, x):
        self.h.value = jnp.tanh(0.9 * self.h.value + x @ self.feed.value)
        return self.h.value @ self.out.value


class Slow(Leak):
    """Outputs that are added up in a leaky read-out."""

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.y = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        self.y.value = 0.95 * self.y.value + super().update(x)
        return self.y.value


@functools.cache
def learner():
    return bt.compile(Leak(), 'd_rtrl', X, batch_size=4)


def loss(x):
    return jnp.mean(learner()(x) ** 2)


def compiled(model, *given, **options):
    return bt.compile(model, 'd_rtrl', *given, **options)


# ---------------------------------------------------------------- models


def compile_bad(make, args):
    bt.compile_etrace_graph(make(), *args)


for title, (make, args, word) in BAD.items():
    run = functools.partial(compile_bad, make, args)
    says(bt.CompilationError, word, f'a model: {title}')(run)
for title, (make, args, word) in UNTRAINED.items():
    run = lambda make=make, args=args: bt.D_RTRL(make()).compile_graph(*args)
    says(bt.CompilationError, word, f'a model: {title}')(run)


@says(TypeError, 'model')
def a_number_as_a_model():
    bt.compile_etrace_graph(3, X)


@says(TypeError, 'class')
def a_class_as_a_model():
    compiled(Leak, X, batch_size=4)


@says(ValueError, 'learner')
def a_learner_as_the_model():
    compiled(learner(), X, batch_size=4)


@says(ValueError, 'learner')
def a_learner_as_the_rule():
    bt.compile(Leak(), learner(), X, batch_size=4)


@says(ValueError, 'rule')
def a_rule_that_is_not_there():
    bt.compile(Leak(), 'd_rtr', X, batch_size=4)


@says(ValueError, 'second')
def an_example_as_the_rule():
    bt.compile(Leak(), X, batch_size=4)


@says(ValueError, 'second')
def no_rule():
    bt.compile(Leak(), batch_size=4)


@says(bt.CompilationError, 'xs')
def a_sequence_as_the_example():
    compiled(Leak(), XS, batch_size=4)


@says(bt.CompilationError, 'zeros')
def a_shape_as_the_example():
    compiled(Leak(), (4, 3), batch_size=4)


@says(bt.CompilationError, 'asarray')
def a_list_as_the_example():
    compiled(Leak(), np.ones((4, 3)).tolist(), batch_size=4)


@says(TypeError, 'batch_size')
def a_misspelled_option():
    compiled(Leak(), X, batchsize=4)


@says(bt.CompilationError, 'batch_size')
def no_batch_size():
    compiled(bt.nn.GRUCell(3, 6), X)


@says(bt.CompilationError, 'HiddenState')
def a_recurrent_state_of_another_kind():
    model = type('Short', (Leak,), {'kind': brainstate.ShortTermState})()
    compiled(model, X, batch_size=4)


@says(bt.CompilationError, 'dt')
def a_model_that_needs_a_time_step():
    class Timed(Leak):
        def update(self, x):
            return super().update(x * brainstate.environ.get('dt'))

    compiled(Timed(), X, batch_size=4)


def leak_of(params, h, x):
    h = jnp.tanh(0.9 * h + x @ params)
    return h, h


FUNCTIONS = {
    'the state of one sample': (leak_of, jnp.zeros(6), X, 'batch'),
    'a list': (leak_of, jnp.zeros((4, 6)), np.ones((4, 3)).tolist(), 'asarray'),
    'float': (lambda p, h, x: (h, float(x.sum())), jnp.zeros((4, 6)), X, 'float'),
    'one result': (lambda p, h, x: h, jnp.zeros((4, 6)), X, 'out'),
}
for title, (step, h, x, word) in FUNCTIONS.items():
    run = functools.partial(compiled, step, jnp.ones((3, 6)), h, x)
    says(bt.CompilationError, word, f'a function: {title}')(run)


# ---------------------------------------------------------------- calls


@says(ValueError, 'compile_graph')
def a_call_before_compiling():
    bt.D_RTRL(Leak())(X)


@says(bt.CompilationError, 'batch')
def another_batch():
    learner()(OTHER[0])


@says(bt.CompilationError, 'batch')
def a_batch_in_front_of_time():
    learner().etrace_grad(XS.swapaxes(0, 1), step_fn=loss)


@says(ValueError, 'batch')
def a_batch_for_a_learner_of_one_sample():
    compiled(Leak(), X[0]).reset_state(batch_size=2)


WRONG_INPUTS = {
    'channels': (lambda m: m.evaluate(jnp.ones((5, 4, 7))), 'shape'),
    'of a step': (lambda m: m(jnp.ones((4, 7))), 'shape'),
    'targets': (lambda m: m.evaluate(XS, XS), 'targets'),
    'none': (lambda m: m(), 'no input'),
    'a tuple': (lambda m: m((1.0, 2.0)), 'asarray'),
    'of a stream': (lambda m: m.stream(loss).predict(X, X), 'targets'),
}
for title, (call, word) in WRONG_INPUTS.items():
    run = lambda call=call: call(learner())
    says(bt.CompilationError, word, f'inputs: {title}')(run)


LOSSES = {
    'float': (lambda y: float(jnp.mean(y)), 'float'),
    'item': (lambda y: jnp.mean(y).item(), 'item'),
    'numpy': (lambda y: jnp.mean(np.asarray(y)), 'numpy'),
    'if': (lambda y: y.sum() if y.sum() > 0 else 0.0, 'where'),
    'index': (lambda y: [y.sum(), y.sum()][jnp.argmax(y[0])], 'take'),
    'a pair': (lambda y: (jnp.sum(y), y), 'has_aux'),
}
for title, (of, word) in LOSSES.items():
    step_fn = lambda x, of=of: of(learner()(x))
    run = lambda step_fn=step_fn: learner().etrace_grad(XS, step_fn=step_fn)
    says(bt.CompilationError, word, f'a loss: {title}')(run)


@says(ValueError, 'broadcast_to')
def targets_without_time():
    step_fn = lambda x, y: jnp.mean((learner()(x) - y) ** 2)
    learner().etrace_grad(XS, jnp.ones((4, 2)), step_fn=step_fn)


@says(bt.CompilationError, 'targets')
def targets_of_another_batch():
    step_fn = lambda x, y: jnp.mean((learner()(x) - y) ** 2)
    learner().etrace_grad(XS, jnp.ones((5, 3, 2)), step_fn=step_fn)


@says(ValueError, 'stack')
def a_list_of_steps():
    learner().etrace_grad([*XS], step_fn=loss)


@says(ValueError, 'memory_plan')
def a_plan_for_an_array():
    learner().memory_plan(np.ones((50, 4, 3)))


@says(TypeError, 'adam')
def a_class_of_optimizers():
    learner().apply(learner().weights(), optax.adam)


@says(ValueError, 'gradients')
def gradients_and_losses_together():
    found = learner().etrace_grad(XS, step_fn=loss, return_value=True, fresh=True)
    learner().apply(found, optax.adam(1e-3))


@says(ValueError, 'weights')
def gradients_of_a_name_that_is_not_there():
    learner().etrace_grad(XS, step_fn=loss, weights=['nothing'])


@says(TypeError, 'dictionary')
def weights_in_a_list():
    learner().set_weights([1, 2])


@says(ValueError, 'feed')
def weights_of_another_name():
    learner().set_weights({'fed': np.zeros((3, 6))})


@says(ValueError, 'notice')
def a_level_that_reports_do_not_have():
    learner().report.show('loud')


@says(ValueError, 'optimizer')
def a_stream_that_cannot_update():
    learner().stream(loss)(X)


@says(TypeError, 'fit')
def a_model_in_place_of_the_learner_in_fit():
    bt.fit(Leak(), [(XS,)], step_fn=loss, optimizer=1, updates=1)


@says(TypeError, 'copying')
def a_task_by_its_name():
    bt.Supervised(learner(), 'copying', 4)


# ---------------------------------------------------------------- warnings and reports


@says(bt.CreditWarning, 'readout')
def a_slow_read_out():
    compiled(Slow(), X, batch_size=4)


@says(bt.CreditWarning, 'path')
def a_parameter_behind_a_stopped_gradient():
    class Blocked(Leak):
        def __init__(self):
            super().__init__()
            self.blocked = brainstate.ParamState(jnp.ones((6, 2)))

        def update(self, x):
            y = super().update(x)
            return y + jax.lax.stop_gradient(self.h.value @ self.blocked.value)

    compiled(Blocked(), X, batch_size=4)


@says(bt.CreditWarning, 'surrogate')
def a_spike_without_a_surrogate():
    class Spiking(Leak):
        def update(self, x):
            self.h.value = 0.9 * self.h.value + x @ self.feed.value
            return (self.h.value > 0.5).astype('float32') @ self.out.value

    compiled(Spiking(), X, batch_size=4)


@says(RecompilationWarning, 'object')
def a_step_function_for_every_call():
    mine = compiled(Leak(), X, batch_size=4)
    for _ in range(4):
        mine.evaluate(XS, step_fn=lambda x: jnp.mean(mine(x) ** 2))


@says(None, 'D_RTRL')
def a_learner_is_shown():
    return repr(learner())


@says(None, 'traces')
def a_memory_plan_is_shown():
    return re.sub(r'[\d.]+ (?:[KMG]i)?B', 'N B', str(learner().memory_plan(20)))


@says(None, 'feed')
def a_report_is_shown():
    return learner().report.to_str('info')


# ---------------------------------------------------------------- the file


def said(function):
    """Class and text of what a function says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            shown = function()
        except Exception as error:
            return type(error), str(error)
    own = [w for w in caught if w.category.__module__.startswith('braintrace')]
    if own:
        return own[0].category, '\n'.join(str(w.message) for w in own)
    return None, str(shown)


def normal(text):
    """Without folders, numbers of lines and addresses."""
    text = re.sub(r'[^\s(\'"]*?([\w<>]+\.py):\d+', r'\1:N', text)
    return re.sub(r'0x[0-9a-f]+', '0x...', text)


@functools.cache
def said_by(name):
    return said(PROVOCATIONS[name][2])


def entry(name):
    """The entry of the file."""
    kind, text = said_by(name)
    text = normal(text if kind is None else f'{kind.__name__}: {text}')
    return '\n'.join([name, *(f'    {line}'.rstrip() for line in text.splitlines())])


@pytest.mark.parametrize('name', PROVOCATIONS)
def test_class_and_key_word(name):
    kind, word, _ = PROVOCATIONS[name]
    found, text = said_by(name)
    assert found is kind or issubclass(found, kind), text
    assert word in text


def test_texts():
    head = f'What errors, warnings and reports say; `make messages` writes it. jax {jax.__version__}'
    found = '\n\n'.join([head, *map(entry, sorted(PROVOCATIONS))]) + '\n'
    if os.environ.get('MESSAGES') == 'write':
        FILE.write_text(found)
    recorded = FILE.read_text()
    if recorded.split('\n', 1)[0] != head:
        pytest.skip('texts of JAX are part of these, and this is another version of it')
    assert found == recorded, '`make messages`, and read the difference'
