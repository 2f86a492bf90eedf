"""What a learner carries, how much of it, and the ways to choose."""

import os

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.learner.transaction import Transaction

B, INPUTS, H, T = 2, 3, 4, 5


class Net(brainstate.nn.Module):
    """A recurrent cell and a read-out."""

    def __init__(self, cell=brainstate.nn.GRUCell, linear=brainstate.nn.Linear):
        super().__init__()
        self.cell = cell(INPUTS, H)
        self.readout = linear(H, 2)

    def update(self, x):
        return self.readout(self.cell(x))


class SparseNet(brainstate.nn.Module):
    """Leaky units driven by a sparse matrix with one weight for each synapse."""

    def __init__(self):
        super().__init__()
        import brainevent

        self.matrix = brainevent.CSR(
            (jnp.ones(6), np.array([0, 2, 1, 3, 0, 3]), np.array([0, 2, 4, 6])),
            shape=(INPUTS, H),
        )
        self.w = brainstate.ParamState(jnp.linspace(0.1, 0.6, 6))

    def init_state(self, batch_size=None):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        self.V.value = 0.9 * self.V.value + jnp.tanh(
            x @ self.matrix.with_data(self.w.value)
        )
        return self.V.value


@pytest.fixture(scope='module')
def xs():
    return jnp.asarray(
        np.random.default_rng(0).normal(size=(T, B, INPUTS)), jnp.float32
    )


def squares(learner):
    return lambda x: jnp.sum(learner(x) ** 2)


def assert_close(a, b, rtol=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b
    )


def compiled(xs, rule='d_rtrl', model=None, **options):
    return braintrace.compile(
        model or Net(), rule, xs[0], batch_size=B, seed=0, **options
    )


def test_memory_plan_is_what_is_allocated(xs):
    learner = compiled(xs)
    plan = learner.memory_plan(T)
    held = {
        key: sum(x.nbytes for x in jax.tree.leaves(t.value))
        for key, t in learner.traces.items()
    }
    assert held == plan.traces
    gates = sum(
        n for key, n in plan.traces.items() if 'cell.Wrz.weight.weight' in key[0]
    )
    assert (
        gates == B * H * (INPUTS + H) * 4
    )  # the reset gate's half reaches no state by position
    short, long = learner.memory_plan(100), learner.memory_plan(1000)
    assert long.one_pass - short.one_pass < 900 * 16  # the losses themselves
    assert long.bptt > 8 * short.bptt
    assert long.two_pass < long.bptt
    assert 'KiB' in str(long)


def test_oversized_traces_are_refused_before_they_are_made(xs):
    learner = compiled(xs, max_trace_bytes=100)
    assert learner.traces == {}
    with pytest.raises(braintrace.NotSupportedError, match=r'pp_prop.*bfloat16'):
        learner.etrace_grad(xs, step_fn=squares(learner))
    for wrong in ('1GB', -1, float('nan')):
        with pytest.raises(ValueError, match='number of bytes'):
            compiled(xs, max_trace_bytes=wrong)


def test_passes_are_chosen_by_size_or_by_the_caller(xs):
    wanted = compiled(xs)
    reference = wanted.etrace_grad(xs, step_fn=squares(wanted), fresh=True)
    for passes in (1, 2):
        learner = compiled(xs, model=wanted.model, passes=passes, block=2)
        assert_close(
            learner.etrace_grad(xs, step_fn=squares(learner), fresh=True), reference
        )
    with pytest.raises(ValueError, match='passes=3'):
        compiled(xs, passes=3)


def test_traces_in_half_precision(xs):
    learner = compiled(xs, trace_dtype=jnp.bfloat16, block=1)
    assert {
        x.dtype for t in learner.traces.values() for x in jax.tree.leaves(t.value)
    } == {jnp.dtype(jnp.bfloat16)}
    found = learner.etrace_grad(xs, step_fn=squares(learner))
    whole = compiled(xs, model=learner.model, block=1)
    wanted = whole.etrace_grad(xs, step_fn=squares(whole))
    error = [
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    ]
    assert 0 < max(error) < 0.02


def test_sparse_weights_carry_one_entry_for_each_synapse(xs):
    learner = compiled(xs, model=SparseNet(), block=2)
    (trace,) = learner.traces_of(('w',)).values()
    assert {s: x.shape for s, x in trace.items()} == {0: (6, B)}
    found = learner.etrace_grad(xs, step_fn=squares(learner))
    exact = compiled(xs, 'bptt', model=learner.model)
    assert_close(found, exact.etrace_grad(xs, step_fn=squares(exact)))


def test_vmap_is_the_batched_model(xs):
    model = Net(brainstate.nn.LSTMCell)
    batched = compiled(xs, model=model)
    wanted = batched.etrace_grad(xs, step_fn=squares(batched), fresh=True)
    mapped = braintrace.compile(
        model, 'd_rtrl', xs[0, 0], batch_size=B, vmap=True, block=2
    )
    for fresh in (True, False):
        mapped.reset_state()
        assert_close(
            mapped.etrace_grad(xs, step_fn=squares(mapped), fresh=fresh), wanted
        )


def test_only_chosen_parameters_are_traced(xs):
    marked = compiled(xs, model=Net(braintrace.nn.GRUCell), trace='marked')
    assert marked.traces
    assert not compiled(xs, trace='marked').traces
    learner = compiled(xs, trace=lambda path: 'Wh' in path)
    assert all('Wh' in name for key in learner.traces for name in key[0])
    whole = compiled(xs, model=learner.model)
    found = learner.etrace_grad(xs, step_fn=squares(learner), fresh=True)
    wanted = whole.etrace_grad(xs, step_fn=squares(whole), fresh=True)
    assert_close(found['cell', 'Wh', 'weight'], wanted['cell', 'Wh', 'weight'])
    assert (
        np.abs(
            found['cell', 'Wrz', 'weight']['weight']
            - wanted['cell', 'Wrz', 'weight']['weight']
        ).max()
        > 1e-3
    )


def test_gradient_check_tells_exact_from_local(xs):
    learner = compiled(xs)
    before = learner.model.cell.h.value
    check = learner.gradient_check(xs, step_fn=squares(learner))
    assert learner.model.cell.h.value is before
    assert check['readout.weight.weight'].credit == 'exact'
    assert check['readout.weight.weight'].gradient == 'equal to BPTT'
    assert check['readout.weight.weight'].relative_error < 1e-5
    assert (
        check['cell.Wh.weight.weight'].credit
        == check['cell.Wh.weight.weight'].gradient
        == 'local'
    )
    assert check['cell.Wh.weight.weight'].relative_error > 1e-3
    assert 'cosine' in str(check)


def test_rules_by_name_and_class(xs):
    assert isinstance(compiled(xs, 'D_rtrl'), braintrace.D_RTRL)
    assert isinstance(
        compiled(xs, braintrace.pp_prop, decay_or_rank=9), braintrace.ES_D_RTRL
    )
    with pytest.raises(ValueError, match='backprop'):
        compiled(xs, 'backprop')
    with pytest.raises(TypeError, match='D_RTRL only'):
        compiled(xs, 'd_rtrl', decay_or_rank=0.9)
    with pytest.raises(ValueError, match=r'decay_or_rank=1\.5'):
        compiled(xs, 'pp_prop', decay_or_rank=1.5)
    with pytest.warns(UserWarning, match='automatic here'):
        compiled(xs, 'd_rtrl', fast_solve=True)


def in_loop(learner, xs, loop, call=None):
    """Gradients of single steps, summed by hand in a loop of brainstate's."""
    call = call or learner
    weights = learner.param_states
    one = lambda x: dict(
        brainstate.transform.grad(lambda: jnp.sum(call(x) ** 2), weights)()
    )
    if loop == 'for_loop':
        stacked = brainstate.transform.jit(
            lambda xs: brainstate.transform.for_loop(one, xs)
        )(xs)
        return jax.tree.map(lambda g: g.sum(axis=0), stacked)
    zero = {
        path: jax.tree.map(jnp.zeros_like, state.value)
        for path, state in weights.items()
    }
    return brainstate.transform.scan(
        lambda total, x: (jax.tree.map(jnp.add, total, one(x)), None), zero, xs
    )[0]


@pytest.mark.parametrize('loop', ['for_loop', 'scan'])
def test_steps_inside_loops_and_jit(xs, loop):
    learner = compiled(xs)
    wanted = learner.etrace_grad(xs, step_fn=squares(learner), reduction='sum')
    learner.reset_state()
    assert_close(in_loop(learner, xs, loop), wanted)
    learner.reset_state()
    jitted = brainstate.transform.jit(
        lambda xs: learner.etrace_grad(xs, step_fn=squares(learner), reduction='sum')
    )
    assert_close(jitted(xs), wanted)


def test_compiled_for_one_sample_and_mapped_by_the_caller(xs):
    whole = compiled(xs)
    wanted = whole.etrace_grad(xs, step_fn=squares(whole), reduction='sum')
    brainstate.random.seed(0)
    learner = braintrace.D_RTRL(Net())
    for path, state in learner.param_states.items():
        state.value = whole.param_states[path].value

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=B)
    def start():
        brainstate.nn.init_all_states(learner.model)
        learner.compile_graph(xs[0, 0])

    start()
    mapped = brainstate.nn.Vmap(learner, vmap_states='new')
    for _ in range(2):
        assert_close(in_loop(learner, xs, 'for_loop', mapped), wanted)
        learner.reset_state()


def test_learner_is_a_module_before_and_after_training(xs):
    learner = compiled(xs)
    before = {key: trace.value for key, trace in learner.traces.items()}
    learner.etrace_grad(xs, step_fn=squares(learner), fresh=True)
    assert all(
        trace.value is before[key] for key, trace in learner.traces.items()
    )  # nothing was written
    learner.etrace_online(xs, step_fn=squares(learner), optimizer=optax.sgd(0.1))
    paths = learner.states()
    assert ('model', 'cell', 'h') in paths
    assert any(path[0] == 'traces' for path in paths)


class ConvNet(brainstate.nn.Module):
    """Leaky units behind a convolution with every option of its own."""

    def __init__(self, **options):
        super().__init__()
        self.conv = brainstate.nn.Conv2d((5, 6, 2), 3, (3, 2), **options)

    def init_state(self, batch_size=None):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, *self.conv.out_size)))

    def update(self, x):
        self.V.value = 0.8 * self.V.value + jnp.tanh(self.conv(x))
        return self.V.value


@pytest.mark.parametrize(
    'options', [{}, {'stride': 2, 'padding': 'VALID'}, {'rhs_dilation': 2}]
)
def test_filters_carry_one_entry_for_each_element_and_patch(options):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, 5, 6, 2)), jnp.float32)
    learner = compiled(xs, model=ConvNet(**options), block=2)
    (trace,) = [
        t
        for key, t in learner.traces_of(('conv', 'weight')).items()
        if 'weight.weight' in key[0][0]
    ]
    assert trace[0].size == learner.model.V.value.size * 3 * 2 * 2
    wanted = compiled(xs, 'bptt', model=learner.model)
    wanted = wanted.etrace_grad(xs, step_fn=squares(wanted), fresh=True)
    learner.reset_state()
    assert_close(learner.etrace_grad(xs, step_fn=squares(learner)), wanted, 1e-4)
    assert_close(
        learner.etrace_grad(xs, step_fn=squares(learner), fresh=True), wanted, 1e-4
    )


def test_no_tracer_is_left_behind(xs):
    learner = compiled(xs)
    one = brainstate.transform.jit(
        lambda x: brainstate.transform.grad(
            lambda: jnp.sum(learner(x) ** 2), learner.param_states
        )()
    )
    with jax.checking_leaks():
        learner.etrace_grad(xs, step_fn=squares(learner))
        one(xs[0])
        learner.evaluate(xs)
        if (
            os.environ.get('ZOO') == 'all'
        ):  # nothing is cached while leaks are looked for
            learner.etrace_grad(xs, step_fn=squares(learner), fresh=True)
            learner.etrace_evolve(xs)
            learner.etrace_online(
                xs, step_fn=squares(learner), optimizer=optax.sgd(0.1)
            )
        learner.reset_state()
    for state in learner.states().values():
        assert not any(
            isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state.value)
        )


def test_bad_options_are_refused_where_they_are_given(xs):
    for options in (
        {'block': 0},
        {'block': 1.5},
        {'trace_dtype': jnp.int32},
        {'trace_dtype': 'foo'},
    ):
        (name,) = options
        with pytest.raises(ValueError, match=f'{name}=.*\n.*\n'):
            compiled(xs, **options)
    for rule, options in (
        ('tbptt', {'k': 0}),
        ('pp_prop', {'decay_or_rank': -1}),
        ('pp_prop', {'decay_or_rank': 'a'}),
    ):
        with pytest.raises(ValueError, match='Fix: '):
            compiled(xs, rule, **options)
    with pytest.raises(TypeError, match='D_RTRL only'):
        compiled(xs, rank=3)
    with pytest.raises(ValueError, match='share one input'):
        braintrace.compile(Net(), 'd_rtrl', xs[0, 0], batch_size=B)
    learner = compiled(xs)
    with pytest.raises(braintrace.CompilationError, match='batch axis'):
        learner.etrace_grad(xs[:, 0], step_fn=squares(learner))
    with pytest.raises(TypeError, match='optimizer='):
        learner.etrace_online(xs, step_fn=squares(learner), optimizer='adam')


def test_a_refused_call_changes_nothing(xs):
    learner = compiled(xs)
    step = squares(learner)
    learner.etrace_grad(xs, step_fn=step)
    held = lambda: [
        np.array(x) for s in learner._held() for x in jax.tree.leaves(s.value)
    ]
    before = held()
    mean = {'step_fn': step, 'reduction': 'mean'}
    for error, call in (
        (ValueError, lambda: learner.etrace_grad(xs, **mean, weights=[('zz',)])),
        (ValueError, lambda: learner.etrace_grad(xs, **mean, weights=3)),
        (ValueError, lambda: learner.etrace_grad(xs, **mean, mask='abc')),
        (ValueError, lambda: learner.etrace_grad(xs, **mean, mask=1j * np.ones(T))),
        (ValueError, lambda: learner.etrace_grad(xs, **mean, chunk_size=2.0)),
        (
            ValueError,
            lambda: learner.etrace_online(
                xs, step_fn=step, optimizer=optax.sgd(0.1), update_every='a'
            ),
        ),
        (TypeError, lambda: learner.etrace_grad(xs, step_fn=None)),
        (ValueError, lambda: learner.apply(None, optax.sgd(0.1))),
        (ValueError, lambda: learner.apply({('zz',): 1.0}, optax.sgd(0.1))),
        (
            ValueError,
            lambda: braintrace.compile(
                Net(), braintrace.learner.Learner, xs[0], batch_size=B
            ),
        ),
    ):
        with pytest.raises(error, match='Fix: '):
            call()
    jax.tree.map(np.testing.assert_array_equal, held(), before)


def test_some_weights_learn_and_the_others_stay(xs):
    learner = compiled(xs)
    chosen = ('readout', 'weight')
    before = {path: state.value for path, state in learner.param_states.items()}
    gradients = learner.etrace_grad(xs, step_fn=squares(learner), weights=[chosen])
    for optimizer in (optax.adamw(0.1), braintools.optim.Adam(lr=0.1)):
        learner.apply(gradients, optimizer)
    for path, state in learner.param_states.items():
        moved = [
            np.any(a != b)
            for a, b in zip(
                *map(jax.tree.leaves, (state.value, before[path])), strict=True
            )
        ]
        assert any(moved) == (path == chosen)


def test_online_learning_refuses_what_is_not_finite_and_undoes_it(xs):
    learner = compiled(xs, check_finite=True)
    for optimizer in (optax.adam(0.1), braintools.optim.Adam(lr=0.1)):
        learner.etrace_online(xs, step_fn=squares(learner), optimizer=optimizer)
        before = jax.device_get(
            {path: state.value for path, state in learner.states().items()}
        )
        with pytest.raises(FloatingPointError, match='step 3'):
            learner.etrace_online(
                xs.at[3].set(jnp.nan), step_fn=squares(learner), optimizer=optimizer
            )
        after = {path: state.value for path, state in learner.states().items()}
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_plan_after_another_batch_size(xs):
    learner = compiled(xs)
    small = learner.memory_plan(T)
    learner.reset_state(batch_size=3 * B)
    large = learner.memory_plan(T)
    assert sum(large.traces.values()) == 3 * sum(small.traces.values())


@pytest.mark.parametrize('rule', ['pp_prop', 'tbptt'])
def test_convolutions_learn_by_every_rule(rule):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(1, B, 5, 6, 2)), jnp.float32)
    learner = compiled(xs, rule, model=ConvNet())
    exact = compiled(xs, 'bptt', model=learner.model)
    wanted = exact.etrace_grad(xs, step_fn=squares(exact), fresh=True)
    assert_close(
        learner.etrace_grad(xs, step_fn=squares(learner), fresh=True), wanted, 1e-4
    )


def test_another_batch_size_may_be_met_inside_a_transformation_first():
    net = brainstate.nn.GRUCell(2, 3)
    learner = braintrace.compile(net, 'd_rtrl', jnp.ones((4, 2)), batch_size=4)
    learner(jnp.ones((4, 2)))
    learner.reset_state(batch_size=5)
    weights = net.states(brainstate.ParamState)
    found = brainstate.transform.grad(
        lambda: jnp.sum(learner(jnp.ones((5, 2)))), weights
    )()
    other = braintrace.compile(net, 'd_rtrl', jnp.ones((5, 2)), batch_size=5)
    wanted = brainstate.transform.grad(
        lambda: jnp.sum(other(jnp.ones((5, 2)))), weights
    )()
    jax.tree.map(np.testing.assert_allclose, dict(found), dict(wanted))


def test_programs_do_not_pile_up():
    learner = braintrace.compile(
        brainstate.nn.GRUCell(2, 3), 'd_rtrl', jnp.ones((2, 2)), batch_size=2
    )
    outputs = [
        learner.evaluate(jnp.ones((2, 2, 2)), step_fn=lambda x: learner(x).sum())
        for _ in range(40)
    ]
    assert len(learner._kept.programs) <= 32
    assert outputs[0][0] != 0
    np.testing.assert_array_equal(outputs[0], outputs[-1])


class Constants(brainstate.nn.Module):
    """Its output has a constant part, a state is set to one, and its first state has no batch axis."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3)))
        self.clock = brainstate.ShortTermState(jnp.zeros(()))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.clock.value = jnp.ones(())
        self.h.value = jnp.tanh(0.9 * self.h.value + x @ self.w.value)
        return self.h.value, 1.0


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'rtrl', 'bptt'])
def test_outputs_states_and_losses_may_be_constant(rule):
    net, x = Constants(), jnp.ones((2, 2))
    learner = braintrace.compile(net, rule, x, batch_size=2)
    weights = net.states(brainstate.ParamState)
    single = brainstate.transform.grad(lambda: learner(x)[0].sum(), weights)()
    learner.reset_state()
    whole = learner.etrace_grad(x[None], step_fn=lambda x: learner(x)[0].sum())
    np.testing.assert_allclose(single['w',], whole['w',], rtol=1e-6)
    assert np.any(whole['w',] != 0)
    constant = lambda x: (jnp.ones(()), learner(x))
    nothing, aux = learner.etrace_grad(
        jnp.stack([x, x]), step_fn=constant, has_aux=True
    )
    assert not np.any(nothing['w',])
    assert aux[0].shape == (2, 2, 3)


def test_another_batch_size_where_the_first_state_has_none():
    learner = braintrace.compile(Constants(), 'd_rtrl', jnp.ones((2, 2)), batch_size=2)
    learner.reset_state(batch_size=5)
    gradients = learner.etrace_grad(
        jnp.ones((3, 5, 2)), step_fn=lambda x: learner(x)[0].sum()
    )
    assert np.any(gradients['w',] != 0)


def test_an_optimiser_starts_once():
    started = []
    adam = optax.adam(0.1)
    counted = optax.GradientTransformation(
        lambda p: started.append(p) or adam.init(p), adam.update
    )
    learner = braintrace.compile(Constants(), 'd_rtrl', jnp.ones((2, 2)), batch_size=2)
    for _ in range(3):
        learner.apply(
            {path: jnp.ones_like(s.value) for path, s in learner.param_states.items()},
            counted,
        )
    assert len(started) == 1


def test_weakly_typed_weights_do_not_compile_again():
    net = brainstate.nn.GRUCell(2, 3)
    net.weak = brainstate.ParamState(jnp.full((3,), jnp.log(10.0)))
    assert net.weak.value.weak_type
    learner = braintrace.compile(net, 'd_rtrl', jnp.ones((2, 2)), batch_size=2)
    step, adam = lambda x: jnp.sum(learner(x) * net.weak.value), optax.adam(0.1)
    for _ in range(3):
        learner.apply(
            learner.etrace_grad(jnp.ones((4, 2, 2)), step_fn=step, fresh=True), adam
        )
    kept = learner._kept.programs.values()
    runs = [program.run for program in kept if isinstance(program, Transaction)]
    assert max(run._cache_size() for run in runs) == 1


def test_traces_of_a_parameter_are_found_by_path_and_by_state(xs):
    learner = compiled(xs)
    path = ('cell', 'Wh', 'weight')
    found = learner.traces_of(path)
    assert found
    for same in (list(path), learner.param_states[path]):
        assert_close(learner.traces_of(same), found)
    hidden = learner.hidden_states['cell', 'h']
    foreign = brainstate.ParamState(jnp.ones(2))
    array = jnp.ones(2)
    for wrong in ('zz', ('cell', 'zz'), 3, None, array, [array], hidden, foreign):
        with pytest.raises(ValueError, match='no such parameter') as error:
            learner.traces_of(wrong)
        assert all(repr(p) in str(error.value) for p in learner.param_states)


@pytest.mark.parametrize('kind', [braintrace.SingleStepData, braintrace.MultiStepData])
def test_wrapped_inputs_are_pytrees(xs, kind):
    given = kind({'x': xs, 'flag': jnp.arange(T)})
    doubled = jax.tree.map(lambda x: 2 * x, given)
    assert isinstance(doubled, kind)
    assert_close(doubled.data, {'x': 2 * xs, 'flag': 2 * jnp.arange(T)})
    for transformed in (jax.jit(lambda d: d), jax.vmap(lambda d: d)):
        found = transformed(given)
        assert isinstance(found, kind)
        assert_close(found.data, given.data)


def test_wrapped_inputs_pass_through_jit_into_the_learner(xs):
    learner = compiled(xs)
    wanted = jnp.stack([learner(x) for x in xs])
    step = brainstate.transform.jit(lambda data: learner(data))
    learner.reset_state()
    found = jnp.stack([step(braintrace.SingleStepData(x)) for x in xs])
    assert_close(found, wanted)
    learner.reset_state()
    assert_close(step(braintrace.MultiStepData(xs)), wanted)


def test_the_program_used_last_is_dropped_last():
    learner = braintrace.compile(
        brainstate.nn.GRUCell(2, 3), 'd_rtrl', jnp.ones((2, 2)), batch_size=2
    )
    traced = []

    def used_always(x):
        traced.append(x)
        return learner(x).sum()

    xs = jnp.ones((2, 2, 2))
    learner.evaluate(xs, step_fn=used_always)
    count = len(traced)
    for _ in range(40):
        learner.evaluate(xs, step_fn=lambda x: learner(x).sum())
        learner.evaluate(xs, step_fn=used_always)
    assert len(traced) == count


def test_deep_windows_are_not_exact_windows():
    with pytest.raises(ValueError, match="reach='deep' with vjp"):
        braintrace.D_RTRL(
            brainstate.nn.GRUCell(2, 3), reach='deep', vjp_method='multi-step'
        )


def test_windows_of_weights_in_half_precision_are_summed_in_single():
    """A thousand small terms, each less than half of the last place of their sum."""

    class Half(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones(1, jnp.bfloat16))

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros(1, jnp.bfloat16))

        def update(self, x):
            self.h.value = 0 * self.h.value + self.w.value * x
            return self.h.value

    xs = jnp.ones((1000, 1), jnp.bfloat16)
    learner = braintrace.compile(Half(), 'tbptt', xs[0], k=1)
    step = lambda x: learner(x).astype(jnp.float32).sum()
    found = learner.etrace_grad(xs, step_fn=step, reduction='sum')
    np.testing.assert_allclose(float(found['w',][0]), 1000, rtol=1e-2)
