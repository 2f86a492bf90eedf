"""Code written for the published package of the same import name."""

import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib
import warnings

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import published
from braintrace.published import first
from formulas import close

ROOT = pathlib.Path(__file__).parents[2]
T, B, INPUTS, H, OUTPUTS = 6, 2, 3, 4, 2


def script(name):
    """A file of the folder `published`, as a module."""
    place = importlib.util.spec_from_file_location(name, ROOT / 'published' / name)
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


class Net(brainstate.nn.Module):
    def __init__(self, cell='GRUCell', **options):
        super().__init__()
        brainstate.random.seed(0)
        self.rnn = getattr(braintrace.nn, cell)(in_size=INPUTS, out_size=H, **options)
        self.out = braintrace.nn.Linear(H, OUTPUTS)

    def update(self, x):
        return self.out(self.rnn(x))


XS, YS = (
    jnp.asarray(np.random.default_rng(k).normal(size=(T, B, n)), jnp.float32)
    for k, n in ((0, INPUTS), (1, OUTPUTS))
)


def compiled(rule='d_rtrl', model=None, **options):
    model = Net() if model is None else model
    return braintrace.compile(model, rule, XS[0], batch_size=B, **options)


def step_of(learner):
    return lambda x, y: jnp.mean((learner(x) - y) ** 2)


def window_of(learner):
    """The losses of the steps of a window."""
    run = lambda x: learner(braintrace.MultiStepData(x))
    return lambda x, y: jnp.mean((run(x) - y) ** 2, axis=(1, 2))


def bptt(model, xs=XS, ys=YS, weights=None):
    """Σ over steps, weighted, of the loss by reverse mode through all of them."""
    weights = jnp.ones(len(xs)) / len(xs) if weights is None else weights
    brainstate.nn.init_all_states(model, batch_size=B)

    def loss():
        losses = [jnp.mean((model(x) - y) ** 2) for x, y in zip(xs, ys, strict=True)]
        return jnp.sum(jnp.stack(losses) * weights)

    states = model.states(brainstate.ParamState)
    return dict(brainstate.transform.grad(loss, states)())


# ---------------------------------------------------------------- layers


def test_layers_compute_what_the_published_ones_do():
    """Names, shapes, outputs and gradients, by numbers that the published package gave."""
    wanted = np.load(ROOT / 'tests' / 'data' / 'published.npz')
    found = script('layers.py').results(braintrace.nn)
    assert found.keys() == set(wanted)
    for name, value in found.items():
        np.testing.assert_allclose(
            value, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


CELLS = {
    'CFNCell': 'in_size out_size w_init b_init state_init activation name',
    'GRUCell': 'in_size out_size w_init b_init state_init activation name',
    'LRUCell': 'd_model d_hidden r_min r_max max_phase',
    'LSTMCell': 'in_size out_size w_init b_init state_init activation name',
    'LeakyRateReadout': 'in_size out_size tau w_init r_init name',
    'MiniGRU': 'in_size out_size w_init b_init state_init name',
    'MinimalRNNCell': 'in_size out_size w_init b_init state_init phi name',
    'URLSTMCell': 'in_size out_size w_init state_init activation name',
    'ValinaRNNCell': 'in_size out_size state_init w_init b_init activation name',
    'GroupedLinear': 'num_groups in_features out_features w_init b_init name',
}


@pytest.mark.parametrize('name', CELLS)
def test_layers_take_the_same_arguments_in_the_same_order(name):
    _, *names = inspect.signature(getattr(braintrace.nn, name).__init__).parameters
    wanted = CELLS[name].split()
    assert names[: len(wanted)] == wanted


def test_operations_take_transforms_of_every_weight():
    x, w, b = XS[0], jnp.ones((INPUTS, H)) / 2, jnp.ones(H)
    close(braintrace.einsum('bi,io->bo', x, w, weight_fn=jnp.sin), x @ jnp.sin(w))
    rows = braintrace.embedding(jnp.array([0, 2]), w, weight_fn=jnp.sin)
    close(rows, jnp.sin(w)[jnp.array([0, 2])])
    left, right = jnp.ones((INPUTS, 2)), jnp.ones((2, H)) / 3
    found = braintrace.lora_matmul(
        x, left, right, bias=b, b_fn=jnp.sin, a_fn=jnp.cos, bias_fn=jnp.tanh
    )
    close(found, x @ jnp.sin(left) @ jnp.cos(right) + jnp.tanh(b))


# ---------------------------------------------------------------- compile


def test_vmap_takes_examples_of_a_batch_and_of_one_sample():
    learners = [
        braintrace.compile(Net(), 'd_rtrl', example, batch_size=B, vmap=True)
        for example in (XS[0], XS[0, 0])
    ]
    gradients = [
        learner.etrace_grad(XS, YS, step_fn=step_of(learner)) for learner in learners
    ]
    learner = compiled()
    wanted = learner.etrace_grad(XS, YS, step_fn=step_of(learner))
    for gradient in gradients:
        close(gradient, wanted)
    assert learners[0].module.graph is learners[0].graph
    assert isinstance(learners[0], braintrace.ETraceVmap)
    assert not isinstance(learner, braintrace.ETraceVmap)
    with pytest.raises(AttributeError, match='maps nothing'):
        _ = learner.module


def test_vmap_of_one_sample_with_as_many_features_as_the_batch_has_samples():
    model = lambda: brainstate.nn.GRUCell(B, H)
    example = jnp.ones(B)
    learner = braintrace.compile(model(), 'd_rtrl', example, batch_size=B, vmap=True)
    assert learner(jnp.ones((B, B))).shape == (B, H)
    wrong = jnp.ones((B, B + 1))
    with pytest.raises(braintrace.CompilationError, match='Fix: '):
        braintrace.compile(model(), 'd_rtrl', wrong, batch_size=B, vmap=True)


class Broadcasting(brainstate.nn.Module):
    """A model that takes inputs with and without a batch axis."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((INPUTS, H)))

    def init_state(self, batch_size=None):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, H)))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + jnp.tanh(x @ self.w.value)
        return self.h.value


def test_a_batch_of_one_takes_an_example_without_a_batch():
    learner = braintrace.compile(Broadcasting(), 'd_rtrl', XS[0, 0], batch_size=1)
    assert learner(XS[0, 0]).shape == (1, H)
    with pytest.raises(ValueError, match='share one input'):
        braintrace.compile(Broadcasting(), 'd_rtrl', XS[0, 0], batch_size=2)


def test_compile_by_the_name_algorithm():
    learner = braintrace.compile(Net(), XS[0], algorithm='pp_prop', batch_size=B)
    assert isinstance(learner, braintrace.pp_prop)


def test_constructors_take_name_and_vjp_method_by_position():
    learner = braintrace.D_RTRL(Net(), 'trainer', 'multi-step')
    assert (learner.name, learner.vjp_method) == ('trainer', 'multi-step')
    learner = braintrace.pp_prop(Net(), 0.8, 'factors')
    assert (learner.name, learner.decay) == ('factors', 0.8)
    learner = braintrace.ThreeFactor(Net(), None, 'single-step', 0.5)
    assert learner.modulator == 0.5
    with pytest.raises(TypeError, match='multiple values'):
        braintrace.D_RTRL(Net(), 'trainer', name='other')
    with pytest.warns(UserWarning, match='fast_solve'):
        learner = braintrace.D_RTRL(Net(), 'trainer', 'single-step', True, 'bfloat16')
    assert learner.trace_dtype == 'bfloat16'
    with pytest.raises(TypeError, match='by position'):
        braintrace.D_RTRL(Net(), 'trainer', 'multi-step', *[None] * 8)


def test_the_influence_of_snap_has_the_type_of_the_states():
    with pytest.warns(UserWarning, match='trace_dtype.*SnAp'):
        learner = compiled('snap', trace_dtype=jnp.bfloat16)
    assert learner.trace_dtype is None


def test_states_without_the_batch_axis_of_the_example_are_given_it():
    class Leaky(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((INPUTS, H)) / 3)

        def init_state(self, batch_size=None):
            batch = () if batch_size is None else (batch_size,)
            self.h = brainstate.HiddenState(jnp.zeros((*batch, H)))

        def update(self, x):
            self.h.value = jnp.tanh(0.9 * self.h.value + x @ self.w.value)
            return self.h.value

    gradients = []
    for options in ({'batch_size': B}, {}):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            learner = braintrace.compile(Leaky(), 'd_rtrl', XS[0], **options)
        found = [w for w in said if 'had no batch axis' in str(w.message)]
        assert len(found) == (not options)
        step = lambda x, learner=learner: jnp.mean(learner(x) ** 2)
        gradients.append(learner.etrace_grad(XS, step_fn=step)['w',])
    np.testing.assert_array_equal(*gradients)
    model = Leaky()
    with pytest.raises(braintrace.CompilationError, match='turns state h'):
        braintrace.compile(model, 'd_rtrl', jnp.ones((B, 1, INPUTS)), batch_size=B)


@pytest.mark.parametrize(
    'switch',
    ['fast_solve', 'chunked_trace', 'control_flow', 'snap_max_jacobian_elements'],
)
def test_switches_of_the_engine_are_accepted(switch):
    value = braintrace.ControlFlowPolicy() if switch == 'control_flow' else True
    with pytest.warns(UserWarning, match=f'{switch}=.* automatic'):
        braintrace.D_RTRL(Net(), **{switch: value})
    with pytest.warns(UserWarning, match='automatic'):
        compiled(**{switch: value})


def test_defaults_are_those_of_the_published_rules():
    assert compiled('snap').n == 2
    assert compiled('ostl_feedforward').decay == 1e-6
    assert compiled('uoro').vjp_method == compiled('dni').vjp_method == 'multi-step'
    assert compiled('d_rtrl').vjp_method == 'single-step'
    assert braintrace.UORO(Net(), projection_key=7).rule.trace.seed == 7


def test_families_of_learners():
    families = {
        braintrace.ParamDimVjpAlgorithm: (
            'D_RTRL',
            'EProp',
            'SnAp',
            'DNI',
            'ThreeFactor',
        ),
        braintrace.IODimVjpAlgorithm: ('pp_prop', 'ES_D_RTRL', 'OSTLFeedforward'),
        braintrace.RandomProjectionVjpAlgorithm: ('UORO',),
    }
    for family, names in families.items():
        for name in names:
            assert issubclass(getattr(braintrace, name), family)
        assert issubclass(family, braintrace.ETraceVjpAlgorithm)
        assert issubclass(family, braintrace.SequenceDriverMixin)
        assert isinstance(family(Net()), braintrace.SequenceDriverMixin)
    assert not issubclass(braintrace.UORO, braintrace.ParamDimVjpAlgorithm)


# ---------------------------------------------------------------- sequences


def test_what_is_returned_of_the_losses():
    learner, mask = compiled(), jnp.array([0, 0, 1, 1, 0, 0.5])
    given = {'step_fn': step_of(learner), 'mask': mask, 'return_value': True}
    values = {}
    for output in ('per_step', 'masked', 'scalar', 'reduced'):
        learner.reset_state()
        values[output] = learner.etrace_grad(XS, YS, loss_output=output, **given)[1]
    close(values['masked'], values['per_step'] * mask)
    close(values['scalar'], jnp.sum(values['masked']) / 2.5)
    assert values['scalar'] == values['reduced']


def test_a_window_returns_the_losses_of_its_steps():
    learner, mask = compiled(vjp_method='multi-step'), jnp.array([0, 1, 1, 0, 0, 0.5])
    options = {'chunk_size': T, 'mask': mask, 'return_value': True}
    gradient, losses = learner.etrace_grad(
        XS, YS, step_fn=window_of(learner), **options
    )
    assert losses.shape == (T,)
    # One window from the start is reverse mode through all of it.
    close(gradient, bptt(Net(), weights=mask / 2.5))
    scalar = lambda x, y: jnp.mean(window_of(learner)(x, y))
    learner.reset_state()
    with pytest.raises(ValueError, match='for each window'):
        learner.etrace_grad(XS, YS, step_fn=scalar, chunk_size=3, mask=mask)
    with pytest.raises(ValueError, match='for each step'):
        learner.etrace_grad(
            XS, YS, step_fn=window_of(learner), chunk_size=3, mask=jnp.ones(2)
        )


def test_a_masked_step_of_a_window_may_be_nan():
    mask = jnp.array([1, 1, 1, 1, 1, 0])
    learner = compiled()
    bad = YS.at[-1].set(jnp.nan)
    options = {'step_fn': window_of(learner), 'mask': mask, 'chunk_size': 3}
    found = learner.etrace_grad(XS, bad, fresh=True, **options)
    close(found, learner.etrace_grad(XS, YS, fresh=True, **options))


def test_chunks_of_one_step_are_none():
    learner = compiled()
    options = {'step_fn': step_of(learner), 'fresh': True}
    plain = learner.etrace_grad(XS, YS, **options)
    close(learner.etrace_grad(XS, YS, chunk_size=1, **options), plain)


def test_evolving_in_windows():
    learner, whole = compiled(), compiled()
    outputs = learner.etrace_evolve(XS, chunk_size=3, return_outputs=True)
    assert outputs.shape == (2, 3, B, OUTPUTS)
    close(outputs.reshape(T, B, OUTPUTS), whole.etrace_evolve(XS, return_outputs=True))
    after = [one.etrace_grad(XS, YS, step_fn=step_of(one)) for one in (learner, whole)]
    close(*after)
    assert learner.etrace_evolve(XS, chunk_size=3) is None


def test_weights_by_states():
    net = Net()
    learner = compiled(model=net)
    options = {'step_fn': step_of(learner), 'fresh': True}
    every = learner.etrace_grad(XS, YS, **options)
    state, path = net.rnn.Wh.weight, ('rnn', 'Wh', 'weight')
    by_states = learner.etrace_grad(XS, YS, weights=learner.param_states, **options)
    close(by_states, every)
    named = learner.etrace_grad(XS, YS, weights={'hidden': state}, **options)
    close(named, {'hidden': every[path]})
    for chosen in (state, [state], [path]):
        found = learner.etrace_grad(XS, YS, weights=chosen, **options)
        close(found, {path: every[path]})


@pytest.mark.parametrize(
    ('rule', 'options'),
    [('uoro', {}), ('snap', {'n': 1}), ('rtrl', {}), ('d_rtrl', {})],
    ids=str,
)
def test_a_window_from_the_start_is_bptt(rule, options):
    learner = compiled(rule, vjp_method='multi-step', **options)
    gradient = learner.etrace_grad(XS, YS, step_fn=window_of(learner), chunk_size=T)
    close(gradient, bptt(Net()))


def test_windows_of_an_influence_are_exact_inside_and_carry_it_across():
    """RTRL is BPTT however it is cut; SnAp is not, and less so in longer windows."""
    exact = bptt(Net())
    rtrl = compiled('rtrl', vjp_method='multi-step')
    options = {'step_fn': window_of(rtrl), 'chunk_size': 2}
    close(rtrl.etrace_grad(XS, YS, **options), exact, atol=1e-5)

    def error(size):
        snap = compiled('snap', n=1, vjp_method='multi-step')
        found = snap.etrace_grad(XS, YS, step_fn=window_of(snap), chunk_size=size)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        return sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)

    assert error(2) > 1e-8
    assert error(T) < error(2)


@pytest.mark.parametrize(
    ('rule', 'options'),
    [
        ('eprop', {'kappa_filter_decay': 0.8}),
        ('eprop', {'feedback': 'random'}),
        ('ostl_feedforward', {'decay_or_rank': 0.9}),
        ('three_factor', {'modulator': 0.5}),
    ],
    ids=str,
)
def test_rules_with_a_signal_of_their_own_take_a_window_step_by_step(rule, options):
    multi = compiled(rule, vjp_method='multi-step', **options)
    assert multi.vjp_method == 'multi-step'
    window = multi.etrace_grad(
        XS, YS, step_fn=window_of(multi), chunk_size=3, reduction='sum'
    )
    single = compiled(rule, **options)
    steps = single.etrace_grad(XS, YS, step_fn=step_of(single), reduction='sum')
    close(window, steps)


# ---------------------------------------------------------------- members


def test_members_of_a_learner():
    net = Net()
    learner = braintrace.D_RTRL(net)
    assert not learner.is_compiled
    with pytest.raises(ValueError, match='compile_graph'):
        learner.init_etrace_state()
    brainstate.nn.init_all_states(net, batch_size=B)
    with pytest.raises(ValueError, match='compile_graph'):
        learner(XS[0])
    learner.compile_graph(XS[0])
    assert learner.is_compiled
    assert learner.graph_executor is learner.executor
    assert learner.model4compile is net
    assert ('rnn', 'h') in learner.path_to_states
    assert learner.state_id_to_path[id(net.rnn.h)] == ('rnn', 'h')
    assert learner.config == braintrace.ETraceConfig()
    assert learner.modulator is None
    assert learner.fast_solve
    assert learner.chunked_trace
    learner(XS[0])
    kept = learner.etrace_bwg.values()
    assert all(isinstance(trace, braintrace.EligibilityTrace) for trace in kept)
    assert kept
    for name in ('decay', 'regime', 'n', 'nothing'):
        with pytest.raises(AttributeError, match=name):
            getattr(learner, name)
    assert compiled('ostl_recurrent').regime == 'with-H'


def test_the_count_of_calls():
    learner = compiled(vjp_method='multi-step')
    count = lambda: int(learner.running_index.value)
    assert count() == 0
    learner(XS[0])
    assert count() == 1
    learner(braintrace.MultiStepData(XS))
    assert count() == 2
    learner.reset_state()
    learner.etrace_grad(XS, YS, step_fn=step_of(learner))
    learner.etrace_evolve(XS)
    assert count() == 2 * T
    jitted = brainstate.transform.jit(lambda x: learner(x))
    jitted(XS[0])
    jitted(XS[0])
    assert count() == 2 * T + 2
    learner.reset_state()
    assert count() == 0


def test_traces_start_again():
    learner = compiled()
    learner(XS[0])
    size = lambda: sum(
        float(jnp.sum(jnp.abs(x)))
        for x in jax.tree.leaves(learner.get_etrace_of(('rnn', 'Wh', 'weight')))
    )
    before, h = size(), learner.hidden_states[('rnn', 'h')].value
    learner.init_etrace_state()
    assert before > 0
    assert size() == 0
    close(learner.hidden_states[('rnn', 'h')].value, h)
    with pytest.raises(ValueError, match='no such parameter'):
        learner.get_etrace_of('nothing')


def test_the_modulator_can_be_set():
    learner = compiled('three_factor')
    found = []
    for value in (1.0, 2.0):
        learner.modulator = value
        found.append(learner.etrace_grad(XS, YS, step_fn=step_of(learner), fresh=True))
    path = ('rnn', 'Wh', 'weight')
    close(found[1][path], jax.tree.map(lambda x: 2 * x, found[0][path]))
    with pytest.raises(ValueError, match='modulator for D_RTRL'):
        compiled().modulator = 1.0


# ---------------------------------------------------------------- configurations


CONFIGURATIONS = {
    'd_rtrl': {},
    'pp_prop': {'trace_factorization': 'io_factorized', 'decay': 0.9},
    'snap': {'recurrence_scope': 'sparse_n', 'sparse_n': 2},
    'uoro': {'trace_factorization': 'random_projection', 'recurrence_scope': 'coupled'},
    'three_factor': {'learning_signal': 'modulatory'},
    'dni': {'learning_signal': 'bootstrapped'},
    'rflo': {'temporal_recursion': 'scalar_leak', 'decay': 0.9},
    'ottt': {
        'trace_factorization': 'io_factorized',
        'temporal_recursion': ('scalar_leak', 'none'),
        'decay': 0.9,
    },
    'rtrl': {'recurrence_scope': 'coupled'},
    'tbptt': {
        'trace_factorization': 'none',
        'update_schedule': 'window',
        'window_size': 20,
    },
    'bptt': {'trace_factorization': 'none', 'update_schedule': 'sequence_end'},
}


@pytest.mark.parametrize('rule', CONFIGURATIONS)
def test_the_configuration_of_a_rule(rule):
    config = braintrace.ETraceConfig(**CONFIGURATIONS[rule])
    learner = (
        braintrace.learner.by_rule.RULES[rule.replace('_', '')]
        if (rule.replace('_', '') in braintrace.learner.by_rule.RULES)
        else braintrace.learner.by_rule.RULES[rule]
    )
    assert learner(Net()).config == config
    own, of_rule = config.rule, learner.preset.default
    assert (own.trace, own.recursion, own.signal, own.filter) == (
        of_rule.trace, of_rule.recursion, of_rule.signal, of_rule.filter,
    )  # fmt: skip


def test_one_spelling_of_a_configuration():
    make = braintrace.ETraceConfig
    factors = {'trace_factorization': 'io_factorized'}
    same = [
        (make(trace_filter='kappa', kappa=0.0), make()),
        (
            make(temporal_recursion='scalar_leak', decay=0.0),
            make(temporal_recursion='none'),
        ),
        (make(**factors, decay=0.9), make(**factors, decay=(0.9, 0.9))),
        (make(**factors, decay=0.0), make(**factors, temporal_recursion='none')),
        (
            make(
                **factors, temporal_recursion=('scalar_leak', 'none'), decay=(0.9, None)
            ),
            make(**factors, temporal_recursion='none', decay=0.9),
        ),
    ]
    for a, b in same:
        assert a == b
        assert hash(a) == hash(b)
    pair = make(**factors, decay=(0.9, 0.5))
    assert (pair.recursion_x, pair.recursion_f) == ('scalar_leak', 'jacobian')
    assert (pair.decay_x, pair.decay_f) == (0.9, 0.5)
    assert pair.is_factorized
    assert not pair.include_recurrent_mixing
    assert pair.replace(decay=0.5).decay == (0.5, 0.5)
    assert make().describe() == "trace_factorization='per_param'"
    assert 'decay=(0.9, 0.5)' in pair.describe()
    with pytest.raises(AttributeError, match='one side'):
        _ = make().decay_x
    for wrong in (
        {'temporal_recursion': ('scalar_leak', 'jacobian'), 'decay': 0.9},
        {**factors, 'temporal_recursion': ('jacobian', 'none'), 'decay': 0.9},
        {**factors, 'temporal_recursion': ('scalar_leak', 'jacobian')},
        {**factors},
    ):
        with pytest.raises(ValueError, match='Fix: '):
            make(**wrong)


def test_a_learner_class_takes_a_configuration_of_its_kind():
    forgets = braintrace.ETraceConfig(temporal_recursion='none')
    learner = compiled('d_rtrl', config=forgets)
    assert learner.config == forgets
    other = compiled(forgets)
    close(*(one.etrace_grad(XS, YS, step_fn=step_of(one)) for one in (learner, other)))
    factors = braintrace.ETraceConfig(trace_factorization='io_factorized', decay=0.9)
    with pytest.raises(ValueError, match='other traces'):
        compiled('d_rtrl', config=factors)
    # The published constructor needs a decay; that of the configuration holds.
    assert braintrace.pp_prop(Net(), 0.5, config=factors).config == factors


def test_refused_arguments_have_the_published_types():
    for wrong in (0, 1.0, -0.1):
        with pytest.raises(AssertionError, match='Why'):
            braintrace.pp_prop(Net(), wrong)
    with pytest.raises(AssertionError, match='Why'):
        braintrace.D_RTRL(Net(), vjp_method='both')
    for rule in (None, int, braintrace.D_RTRL(Net())):
        with pytest.raises(TypeError, match='Why'):
            braintrace.compile(Net(), rule, XS[0])
    with pytest.raises(ValueError, match='Why'):
        braintrace.compile(Net(), 'd_rtrl')
    executor = braintrace.ETraceGraphExecutor(Net())
    with pytest.raises(TypeError, match='needs a rule'):
        braintrace.ETraceAlgorithm(Net(), executor)
    with pytest.raises(AttributeError, match='two decays'):
        _ = braintrace.pp_prop(Net(), (0.9, 0.8)).decay


# ---------------------------------------------------------------- names


def test_every_name_is_there():
    for name in braintrace.__all__:
        assert getattr(braintrace, name) is not None
    assert set(published.NAMES) <= set(braintrace.__all__)
    assert braintrace.__version_info__ > (0, 2, 6)
    assert '.'.join(map(str, braintrace.__version_info__)) == braintrace.__version__
    with pytest.raises(AttributeError, match='no attribute'):
        _ = braintrace.nothing


def test_names_of_the_published_package_are_loaded_when_they_are_used():
    code = (
        'import sys, braintrace; braintrace.D_RTRL; '
        "sys.exit(any(m.startswith('braintrace.published') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_names_of_version_0_1():
    x, w, b = XS[0], jnp.ones((INPUTS, H)) / 2, jnp.ones(H)
    for name in published.FIRST:
        with pytest.warns(DeprecationWarning, match=re.escape(first.INSTEAD[name])):
            getattr(braintrace, name)
    weight = {'weight': w, 'bias': b}
    param = first.ETraceParam(weight, first.MatMulOp())
    assert isinstance(param, brainstate.ParamState)
    close(param.execute(x), x @ w + b)
    mask = jnp.eye(INPUTS, H)
    masked = first.MatMulOp(mask, lambda v: v + 1)
    close(masked(x, {'weight': w}), x @ (w * mask + 1))
    close(first.ElemWiseParam(b, jnp.sin).execute(), jnp.sin(b))
    lora = {'B': jnp.ones((INPUTS, 2)), 'A': jnp.ones((2, H))}
    close(first.LoraOp(4.0)(x, lora), 4 * x @ lora['B'] @ lora['A'])
    close(first.NonTempParam(w, jnp.matmul).execute(x), x @ w)
    close(first.FakeETraceParam(w, jnp.matmul).execute(x), x @ w)
    with pytest.raises(TypeError, match='dict'):
        first.MatMulOp()(x, w)


def test_parts_with_states_and_parts_of_rules_share_their_names():
    state = braintrace.KappaFilter(jnp.zeros(3), 0.5)
    close(state.update(jnp.ones(3)), jnp.full(3, 0.5))
    assert isinstance(state, braintrace.KappaFilter)
    part = braintrace.KappaFilter(0.5)
    assert isinstance(part, braintrace.KappaFilter)
    assert braintrace.EProp(Net(), kappa_filter_decay=part).kappa_filter_decay == 0.5
    key = jax.random.PRNGKey(0)
    feedback = braintrace.FixedRandomFeedback(2, 4, key)
    close(feedback.project(jnp.ones(2)), feedback.B.sum(0))
    assert braintrace.FixedRandomFeedback(3, 0.5).scale == 0.5
    mean = braintrace.GradExpon({'w': jnp.zeros(2)}, 0.5)
    for _ in range(2):
        mean.update({'w': jnp.ones(2)})
    close(mean.gradients.value, {'w': jnp.full(2, 1.5)})
    assert braintrace.GradExpon(0.5).decay == 0.5


def test_a_synthesiser_learns_the_credit_of_the_future():
    learner = compiled('dni')
    shapes = learner.group_signal_shapes()
    assert shapes == {0: (B, H, 1)}
    synthesizer = braintrace.SyntheticGradient(shapes)
    assert isinstance(synthesizer, braintrace.SyntheticGradient)
    learner.attach_synthesizer(synthesizer)
    assert learner.synthesizer is synthesizer
    plain = compiled('tbptt', k=3)
    options = {'step_fn': step_of(plain), 'reduction': 'sum'}
    window = {'step_fn': window_of(learner), 'reduction': 'sum', 'chunk_size': 3}
    # It starts by predicting nothing.
    close(learner.etrace_grad(XS, YS, **window), plain.etrace_grad(XS, YS, **options))
    errors = braintrace.train_synthetic_gradient(
        learner, XS, chunk_size=3, epochs=30, lr=0.1
    )
    assert len(errors) == 30
    assert errors[-1] < errors[0]
    assert float(jnp.abs(synthesizer.param_values()['w'][0]).sum()) > 0
    with pytest.raises(ValueError, match='no predictor'):
        braintrace.train_synthetic_gradient(compiled(), XS)
    with pytest.raises(TypeError, match='braintools'):
        braintrace.train_synthetic_gradient(learner, XS, optimizer='sgd')


def test_a_synthesiser_is_given_to_a_learner_and_used_in_its_windows():
    shapes = compiled('dni').group_signal_shapes()
    synthesizer = braintrace.SyntheticGradient(shapes, scale=0.5, seed=1)
    learner = compiled('dni', synthesizer=synthesizer)
    assert learner.synthesizer is synthesizer
    before = synthesizer.param_values()
    whole = learner.etrace_grad(XS, YS, step_fn=step_of(learner), reduction='sum')
    plain = compiled('dni', synthesizer=braintrace.SyntheticGradient(shapes))
    zero = plain.etrace_grad(XS, YS, step_fn=step_of(plain), reduction='sum')
    path = ('rnn', 'Wh', 'weight')
    assert float(jnp.abs(whole[path]['weight'] - zero[path]['weight']).max()) > 1e-3
    # It is trained by train_synthetic_gradient alone.
    close(synthesizer.param_values(), before)


def test_optimisers_of_a_synthesiser():
    def trained(**options):
        learner = compiled('dni')
        synthesizer = braintrace.SyntheticGradient(learner.group_signal_shapes())
        learner.attach_synthesizer(synthesizer)
        errors = braintrace.train_synthetic_gradient(
            learner, XS, chunk_size=3, epochs=4, **options
        )
        return errors, synthesizer.param_values()

    plain = trained(lr=0.1)
    assert float(jnp.abs(plain[1]['w'][0]).sum()) > 0
    close(trained(optimizer=braintools.optim.SGD(0.1)), plain)
    close(trained(optimizer=optax.sgd(0.1)), plain)
    by_optax = trained(optimizer=optax.adam(0.1))
    close(trained(optimizer=braintools.optim.Adam(0.1)), by_optax)


def test_an_operation_by_a_function_is_traced():
    from braintrace import _op

    doubled = braintrace.register_primitive(
        'doubled', lambda x, w: 2 * (x @ w), gradient_enabled=True, batched=True
    )
    with pytest.warns(DeprecationWarning, match='follow from'):
        doubled.register_etp_rules(dt_to_t=lambda *a: a)
    with pytest.raises(TypeError, match='no such rules'):
        doubled.register_etp_rules(bogus=None)
    assert doubled in _op.ETP_PRIMITIVES
    assert doubled in _op.BATCHED_PRIMITIVES
    assert doubled in _op.ETP_RULES_DT_TO_T
    assert doubled not in _op.ETP_RULES_XY_TO_DW

    class Doubled(Broadcasting):
        def update(self, x):
            drive = doubled.bind(x, self.w.value)
            self.h.value = 0.5 * self.h.value + jnp.tanh(drive)
            return self.h.value

    gradient = {}
    for kind, trace in ((Doubled, 'marked'), (Doubled, 'auto')):
        model = kind()
        learner = braintrace.compile(model, 'd_rtrl', XS[0], batch_size=B, trace=trace)
        step = lambda x, learner=learner: jnp.mean(learner(x) ** 2)
        gradient[trace] = learner.etrace_grad(XS, step_fn=step)
    close(gradient['marked'], gradient['auto'])
    with pytest.raises(NotImplementedError, match='def_impl'):
        braintrace.ETPPrimitive('empty').bind(1.0)


def test_overridden_hooks_are_refused():
    with pytest.raises(TypeError, match='_compute_learning_signal'):

        class Own(braintrace.D_RTRL):
            def _compute_learning_signal(self, *args):
                return args

    class Named(braintrace.D_RTRL):
        """One that overrides nothing of the kind."""

    assert isinstance(Named(Net()), braintrace.D_RTRL)


def test_learners_mapped_by_hand():
    net = Net()
    learner = braintrace.D_RTRL(net)

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=B)
    def init(x):
        brainstate.nn.init_all_states(net)
        learner.compile_graph(x)

    init(XS[0])
    mapped = braintrace.ETraceVmap(learner, vmap_states='new')
    found, losses = mapped.etrace_grad(
        XS, YS, step_fn=step_of(mapped), return_value=True
    )
    other = compiled()
    wanted = other.etrace_grad(XS, YS, step_fn=step_of(other), return_value=True)
    close((found, losses), wanted)
    assert mapped.etrace_evolve(XS, return_outputs=True).shape == (T, B, OUTPUTS)
    with pytest.raises(TypeError, match='maps a learner'):
        braintrace.ETraceVmap(net)


def test_executors():
    net = Net()
    brainstate.nn.init_all_states(net, batch_size=B)
    executor = braintrace.ETraceVjpGraphExecutor(net, 'multi-step')
    executor.compile_graph(XS[0])
    assert executor.is_multi_step_vjp
    assert not executor.is_single_step_vjp
    assert executor.solve_h2w_h2h_jacobian(XS[0])[0].shape == (B, OUTPUTS)
    with pytest.raises(ValueError, match='Fix: '):
        braintrace.ETraceVjpGraphExecutor(net, 'two-step')


# ---------------------------------------------------------------- the distribution


def test_the_distribution_has_a_name_of_its_own():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    assert project['name'] == 'braintrace-online'
    extras = project['optional-dependencies']
    assert {'published', 'cpu', 'cuda12', 'cuda13', 'tpu'} <= extras.keys()
    for requirement in (r for extra in extras.values() for r in extra):
        assert not requirement.startswith('braintrace['), requirement
    for file in (ROOT / 'src').rglob('*.py'):
        assert "pip install 'braintrace[" not in file.read_text(), file


def test_importing_says_so_if_both_packages_are_installed(monkeypatch):
    monkeypatch.setattr(braintrace._metadata, 'version', lambda name: '0.2.6')
    with pytest.warns(UserWarning, match='0.2.6'):
        braintrace._warn_of_another_package()

    def missing(name):
        raise braintrace._metadata.PackageNotFoundError

    monkeypatch.setattr(braintrace._metadata, 'version', missing)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        braintrace._warn_of_another_package()


# ---------------------------------------------------------------- scripts


def test_a_script_runs_and_is_measured(monkeypatch):
    worker = script('worker.py')
    monkeypatch.syspath_prepend(str(worker.SCRIPTS))
    found = worker.run('batched')
    assert found['losses'][-1] < found['losses'][0]
    assert 0 < found['error to BPTT'] < 1
    assert 'error' in worker.run('no_such_script')


def test_the_table_of_scripts():
    run = script('run.py')
    here = {'losses': [1.0, 0.5], 'error to BPTT': 0.1}
    there = {'losses': [1.0, 0.7], 'error to BPTT': 0.4}
    assert run.compared(here, here) == 'equal'
    assert run.compared(here, there) == 'equal at first, then 0.5 : 0.7'
    assert run.row('x', here, there).endswith('| 0.1 : 0.4 | ours |')
    assert 'ValueError' in run.row('x', {'error': 'ValueError: no'}, there)
    every = {p.stem for p in (ROOT / 'published' / 'scripts').glob('*.py')} - {'common'}
    lines = (ROOT / 'published' / 'results.md').read_text().splitlines()
    table = [line for line in lines if line.startswith('|')][2:]
    assert {line.split('|')[1].strip() for line in table} == every
    assert all(line.split('|')[2].strip() == 'yes' for line in table)


# ---------------------------------------------------------------- modules and errors

PLACES = {
    '_algorithm._common': 'FixedRandomFeedback KappaFilter',
    '_algorithm.axes': 'ETraceConfig',
    '_algorithm.base': 'ETraceAlgorithm',
    '_algorithm.d_rtrl': 'D_RTRL',
    '_algorithm.dni': 'DNI SyntheticGradient train_synthetic_gradient',
    '_algorithm.e_prop': 'EProp',
    '_algorithm.graph_executor': 'ETraceGraphExecutor',
    '_algorithm.io_dim_vjp': 'IODimVjpAlgorithm',
    '_algorithm.ostl': 'OSTLFeedforward',
    '_algorithm.param_dim_vjp': 'ParamDimVjpAlgorithm',
    '_algorithm.random_projection_vjp': 'RandomProjectionVjpAlgorithm',
    '_algorithm.sequence': 'ETraceVmap SequenceDriverMixin',
    '_algorithm.snap_n': 'SnAp',
    '_algorithm.three_factor': 'ThreeFactor',
    '_algorithm.uoro': 'UORO',
    '_algorithm.vjp_base': 'ETraceVjpAlgorithm',
    '_algorithm.vjp_graph_executor': 'ETraceVjpGraphExecutor',
    '_compile': 'compile',
    '_compiler.canonicalize': 'ControlFlowPolicy',
    '_compiler.diagnostics': 'CompilationRecord DiagnosticKind DiagnosticLevel',
    '_compiler.graph': 'ETraceGraph compile_etrace_graph',
    '_compiler.hid_param_op': 'HiddenParamOpRelation',
    '_compiler.hidden_group': 'HiddenGroup find_hidden_groups_from_module',
    '_compiler.hidden_pertubation': 'HiddenPerturbation',
    '_compiler.module_info': 'ModuleInfo extract_module_info',
    '_compiler.report': 'CompilationReport',
    '_grad_exponential': 'GradExpon',
    '_op._primitive': 'ETPPrimitive register_primitive',
    '_op.conv': 'conv',
    '_op.dense': 'matmul',
    '_op.einsum': 'einsum',
    '_op.elemwise': 'element_wise',
    '_op.embedding': 'embedding',
    '_op.grouped': 'grouped_matmul',
    '_op.lora': 'lora_matmul',
    '_op.sparse': 'sparse_matmul',
    'nn._conv': 'Conv1d Conv2d Conv3d',
    'nn._embedding': 'Embedding',
    'nn._linear': 'GroupedLinear Linear LoRA ScaledWSLinear SparseLinear',
    'nn._readout': 'LeakyRateReadout',
    'nn._rnn': 'CFNCell GRUCell LRUCell LSTMCell MGUCell ValinaRNNCell',
}
"""Modules of the published package and public names that their `__module__` puts there."""


def test_public_names_are_found_in_the_published_modules():
    for place, names in PLACES.items():
        module = importlib.import_module(f'braintrace.{place}')
        whole = braintrace.nn if place.startswith('nn.') else braintrace
        for name in names.split():
            assert getattr(module, name) is getattr(whole, name), (place, name)
    assert braintrace._compiler.graph is importlib.import_module(
        'braintrace._compiler.graph'
    )
    assert braintrace._op.ETP_PRIMITIVES is published.file('primitives').REGISTERED


def test_private_names_of_the_published_modules_are_not_found():
    with pytest.raises(ImportError, match='cannot import name'):
        exec('from braintrace._compiler.graph import private')
    with pytest.raises(AttributeError, match='public names'):
        _ = braintrace._compiler.graph.private
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module('braintrace._compiler.nothing')
    with pytest.raises(AttributeError, match='no attribute'):
        _ = braintrace._nothing


def test_errors_can_be_caught_by_the_published_types():
    learner = braintrace.D_RTRL(Net())
    for use in (lambda: learner.report, lambda: learner.get_etrace_of(('out',))):
        with pytest.raises(RuntimeError, match='before compiling'):
            use()
    learner = compiled()
    for unknown in (('nothing',), None):
        with pytest.raises(KeyError, match='no such parameter'):
            learner.get_etrace_of(unknown)
    step = step_of(learner)
    for options in ({'chunk_size': 2.0}, {'chunk_size': 'a'}, {'weights': 3}):
        with pytest.raises(TypeError, match='Fix: '):
            learner.etrace_grad(XS, YS, step_fn=step, **options)
    with pytest.raises(ValueError, match='one real number'):
        learner.etrace_grad(XS, YS, step_fn=lambda x, y: learner(x)[:, 0])
    with pytest.raises(TypeError, match='Fix: '):
        learner(jnp.ones((B, INPUTS + 1)))
    for options in ({'config': 3}, {'trace_dtype': 3}):
        with pytest.raises(TypeError, match='Fix: '):
            braintrace.D_RTRL(Net(), **options)
    for size in (0, 'a', 2.0):
        with pytest.raises(TypeError, match='Fix: '):
            braintrace.compile(Net(), 'd_rtrl', XS[0], batch_size=size)
    with pytest.raises(TypeError, match='Fix: '):
        braintrace.ETraceConfig(sparse_n=1.5)
    with pytest.raises(AssertionError, match='Fix: '):
        braintrace.nn.GRUCell(2, 3, activation=3)


def test_members_of_mapped_and_projecting_learners():
    learner = braintrace.compile(Net(), 'd_rtrl', XS[0], batch_size=B, vmap=True)
    assert (learner.in_axes, learner.out_axes) == (0, 0)
    assert (learner.axis_size, learner.axis_name) == (B, None)
    projecting = braintrace.UORO(Net(), projection_key=7)
    assert (projecting.projection_key, projecting.projection_eps) == (7, 1e-12)
    for name in ('axis_size', 'projection_key'):
        with pytest.raises(AttributeError):
            getattr(compiled(), name)


def test_factors_of_traces():
    learner = compiled('pp_prop', decay_or_rank=0.9)
    learner(XS[0])
    (inputs, *_) = learner.etrace_xs.values()
    assert isinstance(inputs, braintrace.EligibilityTrace)
    name = ('rnn', 'Wh', 'weight')
    inputs, factors = learner.get_etrace_of(name)
    (x,), (f,) = inputs.values(), factors.values()
    assert x.shape == (B, INPUTS + H)
    assert f.shape == (B, H, 1)
    for key, x in inputs.items():
        np.testing.assert_array_equal(learner.etrace_xs[key].value, x)
    for key, f in factors.items():
        np.testing.assert_array_equal(learner.etrace_dfs[key].value, f)
    assert not hasattr(compiled(), 'etrace_xs')
    for members in ('etrace_bwg', 'etrace_xs', 'etrace_dfs'):
        assert not hasattr(braintrace.D_RTRL(Net()), members)


def test_a_rule_by_any_spelling_of_its_name():
    for name in ('esd_rtrl', 'ES_D_RTRL', 'es-d-rtrl'):
        assert isinstance(compiled(name, decay_or_rank=0.9), braintrace.ES_D_RTRL)
    for name in ('e_prop', 'eprop', 'EProp'):
        assert isinstance(compiled(name), braintrace.EProp)


def test_eprop_of_a_cell_alone():
    """A filter works without a read-out; random feedback has nothing to replace."""
    cell = braintrace.nn.MiniGRU(INPUTS, H)
    with pytest.raises(braintrace.CompilationError, match='without a read-out'):
        compiled('eprop', cell, feedback='random')
    learner = compiled('eprop', cell, kappa_filter_decay=0.8)
    step = lambda x: jnp.mean(learner(x) ** 2)
    found = learner.etrace_grad(XS, step_fn=step)
    plain = compiled('d_rtrl', cell)
    step = lambda x: jnp.mean(plain(x) ** 2)
    wanted = plain.etrace_grad(XS, step_fn=step)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.isfinite(a).all()
        assert not np.allclose(a, b, rtol=1e-3)


def test_operations_of_the_first_version_have_their_weight_gradient():
    x, y = jnp.arange(3.0), jnp.ones(4)
    op = first.MatMulOp()
    found = op.xy_to_dw(x, y, {'weight': jnp.ones((3, 4)), 'bias': jnp.zeros(4)})
    close(found, {'weight': jnp.outer(x, y), 'bias': y})
    with pytest.raises(NotImplementedError, match='get_etrace_of'):
        op.dt_to_t(y, None)
