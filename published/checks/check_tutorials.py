"""Calls as tutorials make them: training loops, transformations, spiking units with
units of measure, optimisers, names of version 0.1."""

import warnings

import brainpy.state
import brainstate
import braintools
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
from check_traces import DRIVES
from checking import (
    CELLS,
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
STEPWISE = ('D_RTRL', 'pp_prop', 'ES_D_RTRL', 'EProp', 'OSTLRecurrent', 'SnAp')


def square(out):
    return jnp.mean(out**2)


# ---------------------------------------------------------------- gradients


def exact(name, batch):
    """The gradient of BPTT for the sum of the losses of all steps."""
    drive, shape, params, xs = DRIVES[name]
    net = ready(Op(drive, shape, **params), batch)
    xs = xs if batch else xs[:, 0]
    run = lambda: sum(square(net(x)) for x in xs)
    return brainstate.transform.grad(run, net.states(brainstate.ParamState))()


def by_etrace_grad(learner, xs, weights):
    step = lambda x: square(learner(x))
    return learner.etrace_grad(xs, step_fn=step, reduction='sum')


def by_sum_of_steps(learner, xs, weights):
    total = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
    for x in xs:
        gradient = brainstate.transform.grad(lambda x=x: square(learner(x)), weights)()
        total = jax.tree.map(jnp.add, total, gradient)
    return total


def by_scan(learner, xs, weights):
    @brainstate.transform.jit
    def run(xs):
        def one(total, x):
            step = lambda: square(learner(x))
            gradient = brainstate.transform.grad(step, weights)()
            return jax.tree.map(jnp.add, total, gradient), None

        zero = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
        return brainstate.transform.scan(one, zero, xs)[0]

    return run(xs)


def by_for_loop(learner, xs, weights):
    step = lambda x: brainstate.transform.grad(lambda: square(learner(x)), weights)()
    gradients = brainstate.transform.for_loop(step, xs)
    return jax.tree.map(lambda x: x.sum(0), gradients)


WAYS = {
    'etrace_grad': by_etrace_grad,
    'sum': by_sum_of_steps,
    'scan': by_scan,
    'for_loop': by_for_loop,
}
UNBATCHED = tuple(name for name in DRIVES if name != 'einsum')


@each(
    *((name, way, B) for name in DRIVES for way in WAYS),
    *((name, 'scan', None) for name in UNBATCHED),
)
def check_gradient_is_that_of_bptt(name, way, batch):
    drive, shape, params, xs = DRIVES[name]
    net = ready(Op(drive, shape, **params), batch)
    learner = braintrace.D_RTRL(net)
    xs = xs if batch else xs[:, 0]
    learner.compile_graph(xs[0])
    found = WAYS[way](learner, xs, net.states(brainstate.ParamState))
    wanted = exact(name, batch)
    assert set(found) == set(wanted)
    for path, gradient in wanted.items():
        assert np.allclose(found[path], gradient, atol=1e-5), path


@each(*(name for name in UNBATCHED))
def check_gradient_of_a_mapped_learner(name):
    drive, shape, params, xs = DRIVES[name]
    net = Op(drive, shape, **params)
    options = {'batch_size': B, 'vmap': True}
    learner = braintrace.compile(net, braintrace.D_RTRL, xs[0], **options)
    step = lambda x: square(learner(x))
    found = learner.etrace_grad(xs, step_fn=step, reduction='sum')
    wanted = exact(name, B)
    by_end = {path[-1]: gradient for path, gradient in found.items()}
    for path, gradient in wanted.items():
        assert np.allclose(by_end[path[-1]], gradient, atol=1e-5), path


@each(*((flag, value) for flag in (False, True) for value in (False, True)))
def check_what_grad_returns(has_aux, return_value):
    _, learner = learner_of('D_RTRL')

    def step(x):
        out = learner(x)
        return (square(out), {'out': out}) if has_aux else square(out)

    grad = brainstate.transform.grad(
        step, learner.param_states, has_aux=has_aux, return_value=return_value
    )
    found = grad(X)
    parts = found if has_aux or return_value else (found,)
    assert len(parts) == 1 + has_aux + return_value
    assert set(parts[0]) == set(learner.param_states)
    if return_value:
        assert parts[1].shape == ()
    if has_aux:
        assert parts[-1]['out'].shape == (B, 2)


# ---------------------------------------------------------------- outputs


@each(*EVERY)
def check_outputs_of_every_rule(rule):
    net, learner = learner_of(rule)
    out = jnp.stack([learner(x) for x in XS])
    brainstate.nn.init_all_states(net, batch_size=B)
    wanted = jnp.stack([net(x) for x in XS])
    assert np.allclose(out, wanted, atol=1e-5)


@each(*CELLS)
def check_outputs_of_every_cell(cell):
    net, learner = learner_of('pp_prop', cell)
    out = brainstate.transform.for_loop(learner, XS)
    brainstate.nn.init_all_states(net, batch_size=B)
    wanted = brainstate.transform.for_loop(net, XS)
    assert np.allclose(out, wanted, atol=1e-5)


# ---------------------------------------------------------------- training


@each('Adam', 'AdamW', 'SGD', 'Momentum', 'RMSprop', 'Adagrad', 'Lion')
def check_optimizers(name):
    net, learner = learner_of('D_RTRL')
    weights = net.states(brainstate.ParamState)
    before = jax.tree.map(jnp.array, weights.to_dict_values())
    optimizer = getattr(braintools.optim, name)(lr=1e-2)
    optimizer.register_trainable_weights(weights)
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    for _ in range(2):
        learner.reset_state()
        optimizer.update(learner.etrace_grad(XS, YS, step_fn=step))
    after = weights.to_dict_values()
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, after)
    assert any(jax.tree.leaves(changed))


@each(*STEPWISE)
def check_new_states_in_a_jitted_update(rule):
    net = Net()
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.Adam(1e-2)
    optimizer.register_trainable_weights(weights)

    @brainstate.transform.jit
    def train(xs, ys):
        learner = getattr(braintrace, rule)(net, **RULES[rule])

        @brainstate.transform.vmap_new_states(state_tag='new', axis_size=B)
        def start():
            brainstate.nn.init_all_states(net)
            learner.compile_graph(xs[0, 0])

        start()
        mapped = brainstate.nn.Vmap(learner, vmap_states='new')

        def one(total, at):
            x, y = at
            loss = lambda: jnp.mean((mapped(x) - y) ** 2)
            grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
            return jax.tree.map(jnp.add, total, grads), value

        zero = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
        grads, losses = brainstate.transform.scan(one, zero, (xs, ys))
        optimizer.update(grads)
        return losses.mean()

    first, *_, last = [float(train(XS, YS)) for _ in range(8)]
    assert last < first


@each(*STEPWISE)
def check_warm_up_then_learn(rule):
    net, learner = learner_of(rule)
    brainstate.transform.for_loop(learner, XS[:3])
    assert int(learner.running_index.value) == 3
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    grads, losses = learner.etrace_grad(XS[3:], YS[3:], step_fn=step, return_value=True)
    assert losses.shape == (2,)
    assert shapes(dict(grads)) == shapes(
        {path: s.value for path, s in net.states(brainstate.ParamState).items()}
    )


@check
def check_weights_from_one_model_to_another():
    (a, _), (b, learner) = learner_of('D_RTRL'), learner_of('D_RTRL')
    for path, state in a.states(brainstate.ParamState).items():
        b.states(brainstate.ParamState)[path].value = state.value
    brainstate.nn.init_all_states(a, batch_size=B)
    assert np.allclose(learner(X), a(X), atol=1e-6)


# ---------------------------------------------------------------- spiking


class Spiking(brainstate.nn.Module):
    """A current in mA, a synapse, LIF units and a leaky read-out."""

    def __init__(self, neuron='LIF', synapse=True):
        super().__init__()
        no_current = braintools.init.ZeroInit(unit=u.mA)
        current = braintools.init.KaimingNormal(3.0, unit=u.mA)
        self.into = nn.Linear(I + H, H, w_init=current, b_init=no_current)
        self.synapse = None
        if synapse:
            self.synapse = brainpy.state.Expon(
                H, tau=10 * u.ms, g_initializer=no_current
            )
        options = {
            'R': 1 * u.ohm,
            'tau': 20 * u.ms,
            'V_th': 0.01 * u.mV,
            'V_reset': 0 * u.mV,
            'V_rest': 0 * u.mV,
            'V_initializer': braintools.init.ZeroInit(unit=u.mV),
        }
        if neuron == 'ALIF':
            options |= {'tau_a': 100 * u.ms, 'beta': 0.1 * u.mV}
        self.neuron = getattr(brainpy.state, neuron)(H, **options)
        self.out = nn.LeakyRateReadout(H, 2, tau=10 * u.ms)

    def update(self, x):
        x = jnp.concatenate([x, self.neuron.get_spike()], axis=-1)
        current = self.into(x)
        if self.synapse is not None:
            current = self.synapse(current)
        self.neuron(current)
        return self.out(self.neuron.get_spike())


@each(
    *((neuron, True, r) for neuron in ('LIF', 'ALIF') for r in STEPWISE[:4]),
    ('LIF', False, 'D_RTRL'),
    ('LIF', False, 'pp_prop'),
)
def check_spiking_units(neuron, synapse, rule):
    net = ready(Spiking(neuron, synapse))
    learner = getattr(braintrace, rule)(net, **RULES[rule])
    learner.compile_graph(X)
    (group,) = (
        g for g in learner.graph.hidden_groups if ('neuron', 'V') in g.hidden_paths
    )
    assert group.num_state == {'LIF': 1, 'ALIF': 2}[neuron] + synapse
    out = brainstate.transform.for_loop(learner, XS)
    brainstate.nn.init_all_states(net, batch_size=B)
    assert np.allclose(out, brainstate.transform.for_loop(net, XS), atol=1e-5)
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    grads = learner.etrace_grad(XS, YS, step_fn=step)
    weights = net.states(brainstate.ParamState).to_dict_values()
    assert set(grads) == set(weights)
    path = ('into', 'weight')
    for name, weight in weights[path].items():
        assert grads[path][name].shape == weight.shape
        assert u.get_unit(grads[path][name]) == u.get_unit(weight)


@each('D_RTRL', 'pp_prop')
def check_spiking_units_mapped(rule):
    learner = braintrace.compile(
        Spiking(), getattr(braintrace, rule), X, batch_size=B, vmap=True, **RULES[rule]
    )
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    grads, losses = learner.etrace_grad(XS, YS, step_fn=step, return_value=True)
    assert losses.shape == (5,)
    assert len(grads) == 2


# ---------------------------------------------------------------- version 0.1


class FirstNames(brainstate.nn.Module):
    """A leaky unit by the names of version 0.1."""

    def __init__(self):
        super().__init__()
        weight = {'weight': 0.1 * ones((I, H)), 'bias': jnp.zeros(H)}
        self.w = braintrace.ETraceParam(weight, braintrace.MatMulOp())
        self.decay = braintrace.ElemWiseParam(
            jnp.zeros(H), braintrace.ElemWiseOp(jax.nn.sigmoid)
        )
        self.out = braintrace.NonTempParam(
            {'weight': ones((H, 2))}, braintrace.MatMulOp()
        )

    def init_state(self, batch_size=None, **kwargs):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, H)))

    def update(self, x):
        self.h.value = self.decay.execute() * self.h.value + self.w.execute(x)
        return self.out.execute(self.h.value)


@each('D_RTRL', 'pp_prop', 'EProp')
def check_first_names(rule):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        net = ready(FirstNames())
    learner = getattr(braintrace, rule)(net, **RULES[rule])
    learner.compile_graph(X)
    assert learner(X).shape == (B, 2)
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    grads = learner.etrace_grad(XS, YS, step_fn=step)
    assert {path[0] for path in grads} == {'w', 'decay', 'out'}


@each(
    'ConvOp',
    'ElemWiseOp',
    'ElemWiseParam',
    'ETraceOp',
    'ETraceParam',
    'FakeElemWiseParam',
    'FakeETraceParam',
    'LoraOp',
    'MatMulOp',
    'NonTempParam',
    'SpMatMulOp',
)
def check_first_names_warn(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        kind = getattr(braintrace, name)
        if name in ('ElemWiseOp', 'MatMulOp', 'LoraOp'):
            kind()
        elif name == 'ETraceParam':
            kind({'weight': ones((2, 2))}, braintrace.MatMulOp())
    if name in ('ElemWiseOp', 'MatMulOp', 'LoraOp', 'ETraceParam'):
        assert any(issubclass(w.category, DeprecationWarning) for w in caught)


# ---------------------------------------------------------------- choices as a record


@each(
    ('D_RTRL', {}),
    ('D_RTRL', {'learning_signal': 'symmetric'}),
    ('D_RTRL', {'trace_filter': 'kappa', 'kappa': 0.5}),
    ('D_RTRL', {'temporal_recursion': 'scalar_leak', 'decay': 0.9}),
    ('D_RTRL', {'recurrence_scope': 'sparse_n', 'sparse_n': 1}),
)
def check_config(rule, parts):
    config = braintrace.ETraceConfig(**parts)
    net = ready(Net())
    learner = getattr(braintrace, rule)(net, config=config)
    learner.compile_graph(X)
    assert learner.config == config
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    grads = learner.etrace_grad(XS, YS, step_fn=step)
    assert set(grads) == set(learner.param_states)


# ---------------------------------------------------------------- errors


@each('graph', 'report', 'path_to_states', 'state_id_to_path')
def check_member_before_compiling(member):
    learner = braintrace.D_RTRL(ready(Net()))
    raises((ValueError, RuntimeError), lambda: getattr(learner, member))


@each(
    ('trace_factorization', 'other'),
    ('temporal_recursion', 'other'),
    ('recurrence_scope', 'other'),
    ('learning_signal', 'other'),
    ('trace_filter', 'other'),
    ('update_schedule', 'other'),
    ('trace_filter', 'kappa'),
    ('recurrence_scope', 'sparse_n'),
    ('decay', 2.0),
    ('kappa', 2.0),
)
def check_config_refused(name, value):
    raises(ValueError, braintrace.ETraceConfig, **{name: value})


@each(*(f'{cell}' for cell in CELLS))
def check_input_of_another_size(cell):
    _, learner = learner_of('D_RTRL', cell)
    raises((TypeError, ValueError), learner, ones((B, I + 1)))


@check
def check_window_of_a_learner_by_steps():
    """A window is given to a learner by windows."""
    _, learner = learner_of('D_RTRL', vjp_method='multi-step')
    out = learner(braintrace.MultiStepData(XS))
    _, other = learner_of('D_RTRL')
    assert out.shape == jnp.stack([other(x) for x in XS]).shape
