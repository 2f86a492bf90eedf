"""Learners: members, steps, sequences, states."""

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
from checking import (
    CELLS,
    FACTORISED,
    PER_PARAMETER,
    RULES,
    XS,
    YS,
    B,
    H,
    I,
    Net,
    Op,
    X,
    check,
    each,
    learner_of,
    ones,
    raises,
    ready,
    shapes,
)

import braintrace
from braintrace import nn

EVERY = tuple(RULES)
PROJECTED = ('UORO', 'RandomProjectionVjpAlgorithm')


def loss_of(learner):
    return lambda x, y: jnp.mean((learner(x) - y) ** 2)


@each(*EVERY)
def check_members(rule):
    net, learner = learner_of(rule)
    assert isinstance(learner, braintrace.ETraceAlgorithm)
    assert isinstance(learner, braintrace.ETraceVjpAlgorithm)
    assert isinstance(learner, brainstate.nn.Module)
    assert isinstance(learner, braintrace.SequenceDriverMixin)
    assert type(learner).__name__ in (rule, 'pp_prop', 'ES_D_RTRL')
    assert learner.is_compiled
    assert learner.model4compile is net
    assert isinstance(learner.graph, braintrace.ETraceGraph)
    assert isinstance(learner.graph_executor, braintrace.ETraceGraphExecutor)
    assert isinstance(learner.graph_executor, braintrace.ETraceVjpGraphExecutor)
    assert learner.executor is learner.graph_executor
    assert learner.graph_executor.vjp_method == learner.vjp_method
    assert isinstance(learner.graph_executor.is_single_step_vjp, bool)
    assert isinstance(learner.config, braintrace.ETraceConfig)
    assert set(learner.param_states) == set(net.states(brainstate.ParamState))
    assert set(learner.hidden_states) == {('rnn', 'h')}
    assert len(learner.other_states) == 0
    assert ('rnn', 'h') in learner.path_to_states
    assert set(learner.state_id_to_path.values()) == set(learner.path_to_states)
    assert int(learner.running_index.value) == 0
    assert isinstance(learner.report, braintrace.CompilationReport)
    text = learner.show_graph(verbose=False, return_msg=True)
    assert isinstance(text, str)
    assert len(learner.report.hidden_groups) == 1


@each(*EVERY)
def check_before_compiling(rule):
    net = ready(Net())
    learner = getattr(braintrace, rule)(net, **RULES[rule])
    assert not learner.is_compiled
    raises(Exception, lambda: learner.graph.hidden_groups)
    raises(Exception, learner, X)
    raises(Exception, learner.get_etrace_of, net.rnn.Wh.weight)


@each(*EVERY)
def check_call(rule):
    _, learner = learner_of(rule)
    out = learner(X)
    assert out.shape == (B, 2)
    assert learner.update(X).shape == (B, 2)
    assert int(learner.running_index.value) == 2
    learner.init_etrace_state()
    assert learner(braintrace.SingleStepData(X)).shape == (B, 2)


@each(*(rule for rule in EVERY if rule != 'ThreeFactor'))
def check_windows_of_inputs(rule):
    _, learner = learner_of(rule, vjp_method='multi-step')
    out = learner(braintrace.MultiStepData(XS))
    assert out.shape == (5, B, 2)


@each(*EVERY)
def check_grad_of_a_step(rule):
    net, learner = learner_of(rule)
    learner(X)
    weights = net.states(brainstate.ParamState)
    grads, value = brainstate.transform.grad(
        lambda: jnp.mean(learner(X) ** 2), weights, return_value=True
    )()
    assert value.shape == ()
    assert shapes(dict(grads)) == shapes({p: s.value for p, s in weights.items()})
    assert any(bool(jnp.any(g != 0)) for g in jax.tree.leaves(dict(grads)))


@each(*EVERY)
def check_etrace_grad(rule):
    _, learner = learner_of(rule)
    grads = learner.etrace_grad(XS, YS, step_fn=loss_of(learner))
    weights = {path: state.value for path, state in learner.param_states.items()}
    assert shapes(dict(grads)) == shapes(weights)


@each('per_step', 'masked', 'scalar')
def check_loss_outputs(output):
    _, learner = learner_of('D_RTRL')
    mask = jnp.array([1.0, 1, 1, 0, 0])
    _, losses = learner.etrace_grad(
        XS,
        YS,
        step_fn=loss_of(learner),
        mask=mask,
        loss_output=output,
        return_value=True,
    )
    assert losses.shape == (() if output == 'scalar' else (5,))
    if output == 'masked':
        assert not np.any(losses[3:])


@each('mean', 'sum')
def check_reductions(reduction):
    _, learner = learner_of('D_RTRL')
    step = loss_of(learner)
    grads = learner.etrace_grad(XS, YS, step_fn=step, reduction=reduction)
    assert set(grads) == set(learner.param_states)


@check
def check_has_aux():
    _, learner = learner_of('D_RTRL')

    def step(x, y):
        out = learner(x)
        return jnp.mean((out - y) ** 2), out

    _, losses, aux = learner.etrace_grad(
        XS, YS, step_fn=step, has_aux=True, return_value=True
    )
    assert losses.shape == (5,)
    assert aux.shape == (5, B, 2)
    _, aux = learner.etrace_grad(XS, YS, step_fn=step, has_aux=True)
    assert aux.shape == (5, B, 2)


@each(1, 5)
def check_chunks(size):
    _, learner = learner_of('D_RTRL', vjp_method='multi-step')

    def window(x, y):
        out = learner(braintrace.MultiStepData(x))
        return jnp.mean((out - y) ** 2, axis=(1, 2))

    step = loss_of(learner) if size == 1 else window
    _, losses = learner.etrace_grad(
        XS, YS, step_fn=step, chunk_size=size, return_value=True
    )
    assert losses.shape[0] == 5


@check
def check_chunk_size_must_divide():
    _, learner = learner_of('D_RTRL', vjp_method='multi-step')
    step = lambda x, y: jnp.mean(learner(braintrace.MultiStepData(x)))
    raises(ValueError, learner.etrace_grad, XS, YS, step_fn=step, chunk_size=3)


@each(('reduction', 'other'), ('loss_output', 'other'), ('chunk_size', 0))
def check_etrace_grad_refuses(name, value):
    _, learner = learner_of('D_RTRL')
    step = loss_of(learner)
    raises(ValueError, learner.etrace_grad, XS, YS, step_fn=step, **{name: value})


@check
def check_mask_of_another_length():
    _, learner = learner_of('D_RTRL')
    step = loss_of(learner)
    raises(ValueError, learner.etrace_grad, XS, YS, step_fn=step, mask=ones(3))


@check
def check_sequences_of_unequal_length():
    _, learner = learner_of('D_RTRL')
    raises(ValueError, learner.etrace_grad, XS, YS[:3], step_fn=loss_of(learner))


@check
def check_no_sequences():
    _, learner = learner_of('D_RTRL')
    raises(ValueError, learner.etrace_grad, step_fn=lambda: 0.0)


@check
def check_chosen_weights():
    net, learner = learner_of('D_RTRL')
    weights = net.rnn.states(brainstate.ParamState)
    grads = learner.etrace_grad(XS, YS, step_fn=loss_of(learner), weights=weights)
    assert set(grads) == set(weights)


@each(*EVERY)
def check_evolve(rule):
    _, learner = learner_of(rule)
    assert learner.etrace_evolve(XS) is None
    assert learner.etrace_evolve(XS, return_outputs=True).shape == (5, B, 2)
    assert int(learner.running_index.value) == 10


@check
def check_evolve_in_chunks():
    _, learner = learner_of('D_RTRL', vjp_method='multi-step')
    out = learner.etrace_evolve(XS, chunk_size=5, return_outputs=True)
    assert np.size(out) == 5 * B * 2


@check
def check_evolve_by_a_function():
    _, learner = learner_of('D_RTRL')
    out = learner.etrace_evolve(
        XS, step_fn=lambda x: learner(x) * 2, return_outputs=True
    )
    assert out.shape == (5, B, 2)


@each(*PER_PARAMETER)
def check_traces_of_a_weight(rule):
    net, learner = learner_of(rule)
    learner(X)
    learner(X)
    traces = learner.get_etrace_of(net.rnn.Wh.weight)
    assert isinstance(traces, dict)
    leaves = jax.tree.leaves(traces)
    assert leaves
    assert all(x.shape[0] == B for x in leaves)
    assert any(bool(jnp.any(x != 0)) for x in leaves)
    assert learner.etrace_bwg
    assert all(
        isinstance(t, braintrace.EligibilityTrace) for t in learner.etrace_bwg.values()
    )


@each(*FACTORISED)
def check_factors_of_a_weight(rule):
    net, learner = learner_of(rule)
    learner(X)
    learner(X)
    found = learner.get_etrace_of(net.rnn.Wh.weight)
    assert isinstance(found, tuple)
    inputs, factors = found
    assert isinstance(inputs, dict)
    assert isinstance(factors, dict)
    assert sum(x.shape[-1] for x in inputs.values() if x.ndim) == I + H
    assert all(x.shape[:2] == (B, H) for x in jax.tree.leaves(factors))
    assert learner.etrace_xs
    assert learner.etrace_dfs


@each(*PER_PARAMETER, *FACTORISED)
def check_trace_by_path_and_keyword(rule):
    _, learner = learner_of(rule)
    assert learner.get_etrace_of(('rnn', 'Wh', 'weight'))
    assert learner.get_etrace_of(weight=('rnn', 'Wh', 'weight'))


@each(*PER_PARAMETER, *FACTORISED)
def check_traces_of_unknown_weights(rule):
    _, learner = learner_of(rule)
    raises((KeyError, ValueError), learner.get_etrace_of, ('a', 'b'))
    raises(ValueError, learner.get_etrace_of, brainstate.ParamState(ones(2)))


@each(*PER_PARAMETER, *FACTORISED)
def check_trace_of_a_weight_without_one(rule):
    net, learner = learner_of(rule)
    raises(ValueError, learner.get_etrace_of, net.out.weight)


@each(*EVERY)
def check_states_of_traces(rule):
    _, learner = learner_of(rule)
    states = learner.states(braintrace.EligibilityTrace)
    # The factors of a projection are plain states there; DNI has no traces here.
    assert len(states) > 0 or rule in (*PROJECTED, 'DNI')


@each(*EVERY)
def check_reset(rule):
    _, learner = learner_of(rule)
    learner(X)
    learner.reset_state()
    assert int(learner.running_index.value) == 0
    traces = learner.states(braintrace.EligibilityTrace).values()
    if rule not in PROJECTED:
        for trace in traces:
            assert all(not np.any(x) for x in jax.tree.leaves(trace.value))


@each(*EVERY)
def check_reset_with_a_batch_size(rule):
    net, learner = learner_of(rule)
    learner(X)
    brainstate.nn.reset_all_states(net, batch_size=B)
    learner.reset_state(batch_size=B)
    assert learner(X).shape == (B, 2)


@each(*EVERY)
def check_inside_for_loop_and_jit(rule):
    _, learner = learner_of(rule)

    @brainstate.transform.jit
    def run(xs):
        return brainstate.transform.for_loop(learner, xs)

    assert run(XS).shape == (5, B, 2)
    assert int(learner.running_index.value) == 5


@each(*EVERY)
def check_training(rule):
    net, learner = learner_of(rule)
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.Adam(1e-2)
    optimizer.register_trainable_weights(weights)

    @brainstate.transform.jit
    def train(xs, ys):
        brainstate.nn.reset_all_states(net, batch_size=B)
        learner.reset_state(B)

        def one(total, at):
            grads, loss = brainstate.transform.grad(
                lambda x, y: jnp.mean((learner(x) - y) ** 2), weights, return_value=True
            )(*at)
            return jax.tree.map(jnp.add, total, grads), loss

        zero = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
        grads, losses = brainstate.transform.scan(one, zero, (xs, ys))
        optimizer.update(grads)
        return losses.mean()

    losses = [float(train(XS, YS)) for _ in range(3)]
    assert np.isfinite(losses).all()


@each('D_RTRL', 'pp_prop', 'EProp', 'OSTLRecurrent')
def check_compile_by_class(rule):
    kind = getattr(braintrace, rule)
    learner = braintrace.compile(Net(), kind, X, batch_size=B, **RULES[rule])
    assert learner(X).shape == (B, 2)
    assert learner.is_compiled


@each('D_RTRL', 'd_rtrl', 'pp_prop', 'es_d_rtrl', 'eprop', 'e_prop', 'ostl_recurrent')
def check_compile_by_name(name):
    options = {'decay_or_rank': 0.9} if name in ('pp_prop', 'es_d_rtrl') else {}
    learner = braintrace.compile(Net(), name, X, batch_size=B, **options)
    assert learner(X).shape == (B, 2)


@check
def check_compile_refuses_a_name():
    raises(ValueError, braintrace.compile, Net(), 'nothing', X, batch_size=B)


@check
def check_compile_refuses_a_number():
    raises(TypeError, braintrace.compile, Net(), 3, X, batch_size=B)


@check
def check_compile_needs_examples():
    raises(ValueError, braintrace.compile, Net(), braintrace.D_RTRL)


@check
def check_compile_without_batch_size():
    learner = braintrace.compile(Net(), braintrace.D_RTRL, X[0])
    assert learner(X[0]).shape == (2,)


@check
def check_compile_one_sample():
    drive = lambda s, x: braintrace.matmul(x, s.W.value)
    net = Op(drive, W=ones((I, H)))
    learner = braintrace.compile(net, braintrace.D_RTRL, X[0], batch_size=1)
    assert net.h.value.shape == (1, H)
    assert learner(X[0]).shape == (1, H)


@check
def check_compile_one_sample_of_a_cell():
    compile_it = braintrace.compile
    raises(TypeError, compile_it, Net(), braintrace.D_RTRL, X[0], batch_size=1)


@check
def check_compile_seed():
    brainstate.random.seed(0)
    learner = braintrace.compile(Net(), braintrace.D_RTRL, X, batch_size=B, seed=3)
    assert learner(X).shape == (B, 2)


@each(0, 1, 2)
def check_compile_verbose(verbose):
    braintrace.compile(Net(), braintrace.D_RTRL, X, batch_size=B, verbose=verbose)


@each('D_RTRL', 'pp_prop', 'EProp', 'SnAp', 'ThreeFactor')
def check_vmapped(rule):
    kind = getattr(braintrace, rule)
    learner = braintrace.compile(Net(), kind, X, batch_size=B, vmap=True, **RULES[rule])
    assert isinstance(learner, braintrace.ETraceVmap)
    assert isinstance(learner.module, kind)
    assert learner(X).shape == (B, 2)
    grads = learner.etrace_grad(XS, YS, step_fn=loss_of(learner))
    assert all(len(path) >= 2 for path in grads)


@check
def check_vmap_needs_a_batch_size():
    raises(ValueError, braintrace.compile, Net(), braintrace.D_RTRL, X, vmap=True)


@check
def check_vmap_by_hand():
    net = Net()
    learner = braintrace.D_RTRL(net)

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=B)
    def start():
        brainstate.nn.init_all_states(net)
        learner.compile_graph(X[0])

    start()
    mapped = braintrace.ETraceVmap(learner, vmap_states='new')
    assert mapped(X).shape == (B, 2)


POSITIONAL = {
    'D_RTRL': ('name', 'single-step', True, None, True, None, None, None, 16777216),
    'ParamDimVjpAlgorithm': ('name', 'single-step', True, None, True, None),
    'OSTLRecurrent': ('name', 'single-step', True, None, True, None),
    'pp_prop': (0.9, 'name', 'single-step', True, None, None, None),
    'ES_D_RTRL': (0.9, 'name', 'single-step', True, None, None, None),
    'IODimVjpAlgorithm': (0.9, 'name', 'single-step', True, None, None, None),
    'OSTLFeedforward': (0.5, 'name'),
    'EProp': ('symmetric', 0.0, None, 'name', 'single-step', True),
    'SnAp': (2, 'name', 'single-step', True, 16777216),
    'UORO': ('name', 'multi-step', True, None, 42, 1e-12, None, 16777216),
    'RandomProjectionVjpAlgorithm': (
        'name',
        'multi-step',
        True,
        None,
        None,
        42,
        1e-12,
        None,
        16777216,
    ),
    'ThreeFactor': ('name', 'single-step', 1.0, True, None, True, None, 16777216),
    'DNI': (None, 'name', 'multi-step', True, None, True, None, 16777216),
}


@each(*POSITIONAL)
def check_arguments_by_position(rule):
    net = ready(Net())
    learner = getattr(braintrace, rule)(net, *POSITIONAL[rule])
    learner.compile_graph(X)
    assert learner.name == 'name'
    if rule == 'DNI':
        shapes = learner.group_signal_shapes()
        learner.attach_synthesizer(braintrace.SyntheticGradient(shapes))
    assert learner(X).shape == (B, 2)


@each(
    ('D_RTRL', 'trace_dtype', jnp.bfloat16),
    ('SnAp', 'trace_dtype', jnp.bfloat16),
    ('EProp', 'trace_dtype', jnp.bfloat16),
    ('OSTLRecurrent', 'trace_dtype', jnp.bfloat16),
    ('ThreeFactor', 'trace_dtype', jnp.bfloat16),
    ('D_RTRL', 'fast_solve', False),
    ('pp_prop', 'fast_solve', False),
    ('D_RTRL', 'chunked_trace', False),
    ('D_RTRL', 'snap_max_jacobian_elements', 1000),
    ('SnAp', 'snap_max_jacobian_elements', 100000),
    ('SnAp', 'n', 1),
    ('SnAp', 'n', 3),
    ('EProp', 'feedback', 'symmetric'),
    ('EProp', 'kappa_filter_decay', 0.5),
    ('pp_prop', 'decay_or_rank', (0.9, 0.8)),
    ('UORO', 'projection_key', 7),
    ('D_RTRL', 'name', 'learner'),
    ('D_RTRL', 'control_flow', braintrace.ControlFlowPolicy()),
)
def check_options(rule, option, value):
    _, learner = learner_of(rule, **{option: value})
    assert learner(X).shape == (B, 2)
    assert getattr(learner, option, value) is not None


@each(
    ('pp_prop', 'decay_or_rank', 1.5),
    ('pp_prop', 'decay_or_rank', 0),
    ('pp_prop', 'decay_or_rank', 'a'),
    ('EProp', 'feedback', 'other'),
    ('EProp', 'kappa_filter_decay', 1.5),
    ('D_RTRL', 'vjp_method', 'other'),
    ('SnAp', 'n', 0),
    ('D_RTRL', 'nothing', 1),
)
def check_options_refused(rule, option, value):
    net = ready(Net())
    options = {**RULES[rule], option: value}
    raises(
        (ValueError, TypeError, AssertionError),
        getattr(braintrace, rule),
        net,
        **options,
    )


@check
def check_random_feedback():
    _, learner = learner_of(
        'EProp', feedback='random', random_feedback_key=jax.random.PRNGKey(0)
    )
    assert learner.feedback == 'random'
    grads = learner.etrace_grad(XS, YS, step_fn=loss_of(learner))
    assert set(grads) == set(learner.param_states)


@each((0.9, 0.9), (19, 0.9))
def check_decay(given, want):
    _, learner = learner_of('pp_prop', decay_or_rank=given)
    assert np.isclose(learner.decay, want)


@check
def check_regimes():
    assert learner_of('OSTLRecurrent')[1].regime == 'with-H'
    assert learner_of('OSTLFeedforward')[1].regime == 'without-H'


@check
def check_modulator():
    _, learner = learner_of('ThreeFactor')
    assert learner.modulator == 1.0
    learner.modulator = 0.5
    assert learner.modulator == 0.5
    assert learner.update(X, modulator=0.1).shape == (B, 2)


@each(*CELLS)
def check_every_cell_learns(cell):
    net, learner = learner_of('D_RTRL', cell)
    grads = learner.etrace_grad(XS, YS, step_fn=loss_of(learner))
    assert set(grads) == set(net.states(brainstate.ParamState))
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(dict(grads)))


@check
def check_inputs_are_pytrees():
    for kind in (braintrace.SingleStepData, braintrace.MultiStepData):
        data = kind({'a': XS})
        doubled = jax.tree.map(lambda x: 2 * x, data)
        assert isinstance(doubled, kind)
        assert np.allclose(doubled.data['a'], 2 * XS)
        leaves, aux = data.tree_flatten()
        assert isinstance(kind.tree_unflatten(aux, leaves), kind)


@check
def check_eligibility_trace():
    trace = braintrace.EligibilityTrace(ones(3))
    assert isinstance(trace, brainstate.ShortTermState)
    assert trace.value.shape == (3,)


@check
def check_batched_example_without_batch_size():
    net = ready(Net())
    learner = braintrace.D_RTRL(net)
    learner.compile_graph(X)
    assert learner(X).shape == (B, 2)


@check
def check_compile_a_batch_without_a_batch_size():
    drive = lambda s, x: braintrace.matmul(x, s.W.value)
    net = Op(drive, W=ones((I, H)))
    learner = braintrace.compile(net, braintrace.D_RTRL, X)
    assert learner(X).shape == (B, H)
    assert net.h.value.shape == (B, H)


@check
def check_model_must_be_a_module():
    raises((TypeError, ValueError), braintrace.D_RTRL, lambda x: x)


@check
def check_stacked_cells():
    class Stack(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = brainstate.nn.Sequential(
                nn.GRUCell(I, H), nn.LSTMCell(H, H), nn.Linear(H, 2)
            )

        def update(self, x):
            return self.layers(x)

    learner = braintrace.compile(Stack(), braintrace.D_RTRL, X, batch_size=B)
    assert len(learner.graph.hidden_groups) == 2
    assert len(learner.hidden_states) == 3
    assert learner(X).shape == (B, 2)


@check
def check_environ_context():
    _, learner = learner_of('D_RTRL')
    with brainstate.environ.context(fit=True, t=0.0, i=0):
        assert learner(X).shape == (B, 2)


@check
def check_dni():
    _, learner = learner_of('DNI')
    group_shapes = learner.group_signal_shapes()
    assert list(group_shapes.values()) == [(B, H, 1)]
    learner.attach_synthesizer(braintrace.SyntheticGradient(group_shapes))
    errors = braintrace.train_synthetic_gradient(learner, XS, chunk_size=5, epochs=2)
    assert np.isfinite(np.asarray(errors)).all()
    assert len(learner.synthesizer.states_dict()) > 0
