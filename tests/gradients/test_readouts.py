"""Leaky read-outs: with ``reach='readout'`` traces carry what they remember.

Where no unit feeds another across time, gradients below a leaky linear read-out are those of BPTT, in every way of
running. The oracle is plain reverse mode through the model; for random feedback, through a model whose read-out has
another derivative.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import MultiStepData, networks, nn

B, I, H, O, T = 2, 3, 6, 4, 9  # batch, inputs, units, outputs, steps  # noqa: E741
DECAYS = np.array([0.9, 0.5, 0.9, 0.7])
fire = networks.fire


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64, with steps of length one."""
    with brainstate.environ.context(precision=64, dt=1.0):
        yield


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def weights(*shape, seed=0):
    return brainstate.ParamState(0.7 * drawn(*shape, seed=seed))


class Base(brainstate.nn.Module):
    """Adaptive spiking units without any weights between them, and a leaky read-out."""

    outputs = O

    def __init__(self):
        super().__init__()
        self.feed, self.out = weights(I, H), weights(H, O, seed=1)

    def init_state(self, batch_size=None, **kwargs):
        batch = () if batch_size is None else (batch_size,)
        zeros = lambda n: brainstate.HiddenState(jnp.zeros((*batch, n)))
        self.V, self.a, self.y = zeros(H), zeros(H), zeros(self.outputs)

    def spikes(self):
        return fire(self.V.value - 0.3 - 0.2 * self.a.value)

    def advance(self, x):
        z = self.spikes()
        self.V.value = 0.8 * self.V.value + x @ self.feed.value - 0.3 * z
        self.a.value = 0.95 * self.a.value + z
        return self.spikes()

    def update(self, x):
        self.y.value = self.read(self.advance(x))
        return self.y.value

    def read(self, z):
        return 0.9 * self.y.value + z @ self.out.value


class SeveralDecays(Base):
    def read(self, z):
        return DECAYS * self.y.value + (1 - DECAYS) * (z @ self.out.value)


class Gain(Base):
    """Gains, a bias, and weights in the other order."""

    def __init__(self):
        super().__init__()
        self.back, self.bias = weights(O, H, seed=2), weights(O)

    def read(self, z):
        drive = jnp.einsum('...h,oh->...o', 2.0 * z, jnp.tanh(self.back.value))
        return 0.9 * self.y.value + 0.1 * (drive + self.bias.value)


class Layer(Base):
    """The layer of the library, with a time constant for each output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LeakyRateReadout(H, O, tau=-1 / np.log(DECAYS))

    def update(self, x):
        return self.layer(self.advance(x))


class SpikesAsState(Base):
    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.z = brainstate.HiddenState(jnp.zeros_like(self.V.value))

    def advance(self, x):
        self.z.value = super().advance(x)
        return self.z.value


class Reshaped(Base):
    """Units in two rows, reversed, and read by groups of weights."""

    def __init__(self):
        super().__init__()
        self.rows = weights(2, H // 2, O, seed=3)

    def read(self, z):
        rows = z.reshape(*z.shape[:-1], 2, H // 2)[..., ::-1]
        drive = jnp.einsum('...rh,rho->...o', rows, self.rows.value)
        return 0.9 * self.y.value + drive


class Memoryless(Base):
    """Units that keep nothing; all memory is in the read-out."""

    def advance(self, x):
        self.V.value = jnp.tanh(x @ self.feed.value)
        self.a.value = self.V.value**2
        return self.V.value * self.a.value


class ReadsOld(Base):
    """The output is that of the step before."""

    def update(self, x):
        old = self.y.value
        self.y.value = self.read(self.advance(x))
        return old + 0.5 * self.y.value


class OldSpikes(Base):
    """The read-out reads the spikes of the states before the step."""

    def update(self, x):
        z = self.spikes()
        self.advance(x)
        self.y.value = self.read(z)
        return self.y.value


class OldAndNew(Base):
    """A product of what the units were and are."""

    def update(self, x):
        before = self.V.value
        z = self.advance(x)
        self.y.value = self.read(jnp.tanh(before + 0.3) * z + 0.2 * self.V.value)
        return self.y.value


class TwoReadouts(Base):
    """Two read-outs of the same units, one with another memory."""

    def __init__(self):
        super().__init__()
        self.value = weights(H, 1, seed=4)

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.v = brainstate.HiddenState(jnp.zeros((*self.V.value.shape[:-1], 1)))

    def update(self, x):
        z = self.advance(x)
        self.y.value = self.read(z)
        self.v.value = 0.5 * self.v.value + z @ self.value.value
        return self.y.value + jnp.tanh(self.v.value)


class TwoPopulations(Base):
    """Two groups side by side, read by one product."""

    def __init__(self):
        super().__init__()
        self.more, self.both = weights(I, 2), weights(H + 2, O, seed=5)

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.h = brainstate.HiddenState(jnp.zeros((*self.V.value.shape[:-1], 2)))

    def update(self, x):
        z = self.advance(x)
        self.h.value = 0.6 * self.h.value + jnp.sin(x @ self.more.value)
        seen = jnp.concatenate([z, self.h.value**2], -1)
        self.y.value = 0.9 * self.y.value + seen @ self.both.value
        return self.y.value


class FixedReadout(Base):
    """The read-out does not learn."""

    def read(self, z):
        return 0.9 * self.y.value + z @ drawn(H, O, seed=6)


class ThenDense(Base):
    """A leaky layer between the units and a read-out without memory."""

    def __init__(self):
        super().__init__()
        self.last = weights(O, O, seed=7)

    def update(self, x):
        return jnp.tanh(super().update(x)) @ self.last.value


EXACT = [
    Base,
    SeveralDecays,
    Gain,
    Layer,
    SpikesAsState,
    Reshaped,
    Memoryless,
    ReadsOld,
    OldSpikes,
    OldAndNew,
    TwoReadouts,
    TwoPopulations,
    FixedReadout,
    ThenDense,
]

XS, YS = drawn(T, B, I, seed=8), drawn(T, B, O, seed=9)
MASK = np.array([1.0, 0, 1, 1, 0, 0.5, 1, 2, 0])


def loss(out, y):
    return jnp.sum((out - y) ** 2)


def flat(gradients):
    return {path: np.asarray(x) for path, x in gradients.items()}


def bptt(model, mask=None, of=loss, batch=B):
    """By plain reverse mode."""
    brainstate.random.seed(0)
    net = model()
    brainstate.nn.init_all_states(net, batch_size=batch)
    scale = np.ones(T) if mask is None else mask
    step = lambda x, y, m: m * of(net(x), y)
    total = lambda: jnp.sum(brainstate.transform.for_loop(step, XS, YS, scale))
    # Some models leave weights of the base class out.
    parameters = net.states(brainstate.ParamState)
    return flat(brainstate.transform.grad(total, parameters, check_states=False)())


def learner_of(model, rule='d_rtrl', **options):
    options = {'reach': 'readout', **options}
    brainstate.random.seed(0)
    return braintrace.compile(model(), rule, XS[0], batch_size=B, **options)


def whole(learner, fresh=True, **options):
    step = lambda x, y: loss(learner(x), y)
    options = {'reduction': 'sum', 'fresh': fresh, **options}
    return flat(learner.etrace_grad(XS, YS, step_fn=step, **options))


def close(found, wanted, rtol=1e-10):
    assert found.keys() == wanted.keys()
    for path in wanted:
        np.testing.assert_allclose(
            found[path], wanted[path], rtol=rtol, atol=1e-10, err_msg=str(path)
        )


def distance(found, wanted, path=('feed',)):
    return np.linalg.norm(found[path] - wanted[path]) / np.linalg.norm(wanted[path])


# ---------------------------------------------------------------- equal to BPTT


@pytest.mark.parametrize('model', EXACT)
def test_gradients_are_those_of_bptt(model):
    wanted = bptt(model)
    close(whole(learner_of(model)), wanted)
    close(whole(learner_of(model, block=4), fresh=False), wanted)
    local = whole(learner_of(model, reach='local'))
    assert distance(local, wanted) > 0.05


def in_two_calls(learner):
    learner.reset_state()
    step = lambda x, y: loss(learner(x), y)
    parts = [
        learner.etrace_grad(XS[p], YS[p], step_fn=step, reduction='sum')
        for p in (slice(0, 4), slice(4, T))
    ]
    return {path: sum(np.asarray(part[path]) for part in parts) for path in parts[0]}


def step_by_step(learner):
    learner.reset_state()
    total = dict.fromkeys(learner.param_states, 0.0)
    for x, y in zip(XS, YS, strict=True):
        now = lambda x=x, y=y: loss(learner(x), y)
        found = brainstate.transform.grad(now, learner.param_states)()
        total = {path: total[path] + np.asarray(g) for path, g in found.items()}
    return total


def in_chunks(learner):
    step = lambda x, y: loss(learner(MultiStepData(x)), y)
    options = {'chunk_size': 3, 'reduction': 'sum', 'loss_output': 'per_step'}
    return flat(learner.etrace_grad(XS, YS, step_fn=step, **options))


def online(learner):
    """The change by one update of plain descent at the end."""
    learner.reset_state()
    before = {p: np.asarray(s.value) for p, s in learner.param_states.items()}
    step = lambda x, y: loss(learner(x), y)
    learner.etrace_online(
        XS, YS, step_fn=step, optimizer=optax.sgd(1.0), update_every=T
    )
    return {p: before[p] - np.asarray(s.value) for p, s in learner.param_states.items()}


WAYS = {
    'two passes': lambda m: whole(learner_of(m, passes=2, block=4)),
    'one pass': lambda m: whole(learner_of(m, passes=1)),
    'blocks of one': lambda m: whole(learner_of(m, passes=1, block=1)),
    'blocks of four': lambda m: whole(learner_of(m, passes=1, block=4)),
    'two calls': lambda m: in_two_calls(learner_of(m)),
    'step by step': lambda m: step_by_step(learner_of(m)),
    'exact windows': lambda m: whole(learner_of(m, vjp_method='multi-step')),
    'chunks': lambda m: in_chunks(learner_of(m)),
    'online': lambda m: online(learner_of(m)),
    'vmapped': lambda m: whole(
        braintrace.compile(
            m(), 'd_rtrl', XS[0, 0], batch_size=B, vmap=True, reach='readout'
        )
    ),
    'eprop': lambda m: whole(learner_of(m, 'eprop', reach=None)),
    'ostl': lambda m: whole(learner_of(m, 'ostlrecurrent')),
}


@pytest.mark.parametrize('model', [Base, SeveralDecays])
@pytest.mark.parametrize('way', WAYS)
def test_every_way_of_running_gives_the_same(way, model):
    close(WAYS[way](model), bptt(model))


def test_masked_steps():
    wanted = bptt(SeveralDecays, MASK)
    for options in ({'passes': 2}, {'passes': 1, 'block': 4}):
        found = whole(learner_of(SeveralDecays, **options), mask=MASK)
        close(found, wanted)
    xs = XS.at[-1].set(jnp.nan)
    learner = learner_of(SeveralDecays, passes=1, block=4)
    step = lambda x, y: loss(learner(x), y)
    options = {'mask': MASK, 'reduction': 'sum', 'fresh': True}
    found = learner.etrace_grad(xs, YS, step_fn=step, **options)
    close(flat(found), wanted)


def test_without_a_batch():
    net, single = Base(), XS[:, 0]
    learner = braintrace.compile(net, 'd_rtrl', single[0], reach='readout')
    step = lambda x, y: loss(learner(x), y)
    options = {'reduction': 'sum', 'fresh': True}
    found = learner.etrace_grad(single, YS[:, 0], step_fn=step, **options)

    def total(feed, out):
        V, a, y, sum_ = jnp.zeros(H), jnp.zeros(H), jnp.zeros(O), 0.0
        for x, target in zip(single, YS[:, 0], strict=True):
            z = fire(V - 0.3 - 0.2 * a)
            V, a = 0.8 * V + x @ feed - 0.3 * z, 0.95 * a + z
            y = 0.9 * y + fire(V - 0.3 - 0.2 * a) @ out
            sum_ = sum_ + loss(y, target)
        return sum_

    feed, out = jax.grad(total, (0, 1))(net.feed.value, net.out.value)
    close(flat(found), {('feed',): feed, ('out',): out})


def test_plain_functions():
    def step(params, state, x):
        V = 0.8 * state['V'] + jnp.tanh(x @ params['feed'])
        y = 0.9 * state['y'] + V**2 @ params['out']
        return {'V': V, 'y': y}, y

    params = {'feed': drawn(I, H), 'out': drawn(H, O)}
    state = {'V': jnp.zeros((B, H)), 'y': jnp.zeros((B, O))}
    learner = braintrace.compile(step, 'd_rtrl', params, state, XS[0], reach='readout')
    found = learner.etrace_grad(
        XS, YS, step_fn=lambda x, y: loss(learner(x), y), reduction='sum', fresh=True
    )

    def total(params):
        at, sum_ = state, 0.0
        for x, y in zip(XS, YS, strict=True):
            at, out = step(params, at, x)
            sum_ = sum_ + loss(out, y)
        return sum_

    close(flat(found), flat(jax.grad(total)(params)))


# ---------------------------------------------------------------- what is not linked


class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.recur = weights(H, H, seed=10)

    def advance(self, x):
        z = self.spikes()
        drive = x @ self.feed.value + 0.1 * z @ self.recur.value
        self.V.value = 0.8 * self.V.value + drive - 0.3 * z
        self.a.value = 0.95 * self.a.value + z
        return self.spikes()


class LearnedDecay(Base):
    def __init__(self):
        super().__init__()
        self.decay = weights(O)

    def read(self, z):
        return jax.nn.sigmoid(self.decay.value) * self.y.value + z @ self.out.value


class Saturating(Base):
    def read(self, z):
        return jnp.tanh(0.9 * self.y.value + z @ self.out.value)


class Normalised(Base):
    def read(self, z):
        return 0.9 * self.y.value + (z - z.mean(-1, keepdims=True)) @ self.out.value


class Gated(Base):
    """The drive is multiplied by the number of spikes: ∂Y/∂u changes from step to step."""

    def read(self, z):
        return 0.9 * self.y.value + jnp.sum(z) * (z @ self.out.value)


class FedBack(Base):
    """The output drives the units."""

    def advance(self, x):
        return super().advance(x + 0.1 * self.y.value[..., :I])


class Stack(Base):
    """Two layers of units below the read-out."""

    def __init__(self):
        super().__init__()
        self.first = weights(I, 5)
        self.feed = weights(5, H)

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.h = brainstate.HiddenState(jnp.zeros((*self.V.value.shape[:-1], 5)))

    def update(self, x):
        self.h.value = 0.7 * self.h.value + jnp.tanh(x @ self.first.value)
        return super().update(self.h.value)


def test_recurrence_that_mixes_keeps_its_approximation():
    """More of the true gradient than without the memory of the read-out, but not all."""
    wanted = bptt(Recurrent)
    learner = learner_of(Recurrent)
    near, far = whole(learner), whole(learner_of(Recurrent, reach='local'))
    assert 1e-4 < distance(near, wanted) < 0.3 * distance(far, wanted)
    assert learner.report.gradients['feed'].kind == 'local'
    assert 'across positions' in learner.report.gradients['feed'].reason


@pytest.mark.parametrize(
    'model', [LearnedDecay, Saturating, Normalised, Gated, FedBack]
)
def test_read_outs_that_are_not_linked(model):
    """They are left as they are, and the report does not say otherwise."""
    wanted = bptt(model)
    learner = learner_of(model)
    found, local = whole(learner), whole(learner_of(model, reach='local'))
    close(found, local)
    given = learner.report.gradients['feed']
    assert given.kind == 'local'
    assert distance(found, wanted) > 1e-3
    if model is not FedBack:
        assert "reach='readout' leaves out y" in given.reason


def test_only_the_layer_below_the_read_out_is_linked():
    wanted, learner = bptt(Stack), learner_of(Stack)
    found, gives = whole(learner), learner.report.gradients
    assert gives['feed'].kind == 'equal to BPTT'
    assert gives['first'].kind == 'local'
    assert distance(found, wanted) < 1e-10
    assert distance(found, wanted, ('first',)) > 1e-3


class Chain(Base):
    """A leaky linear layer between the units and the read-out: it feeds the read-out, and is none itself."""

    def __init__(self):
        super().__init__()
        self.last = weights(O, O, seed=7)

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.layer = brainstate.HiddenState(jnp.zeros_like(self.y.value))

    def read(self, z):
        self.layer.value = 0.7 * self.layer.value + z @ self.out.value
        return 0.9 * self.y.value + self.layer.value @ self.last.value


def test_a_linear_layer_below_the_read_out():
    wanted, learner = bptt(Chain), learner_of(Chain)
    found, gives = whole(learner), learner.report.gradients
    assert gives['out'].kind == gives['last'].kind == 'equal to BPTT'
    assert gives['feed'].kind == 'local'
    assert distance(found, wanted, ('out',)) < 1e-10
    assert distance(found, wanted) > 1e-3


# ---------------------------------------------------------------- the report


@pytest.mark.parametrize('model', EXACT)
def test_the_report_is_true(model):
    gives = learner_of(model).report.gradients
    assert {given.kind for given in gives.values()} <= {'equal to BPTT', 'none'}
    if model is not Layer:
        carried = gives['feed'].reason.split('traces carry the memory of ')[1]
        assert 'y' in carried.split(', ')
    local = learner_of(model, reach='local').report.gradients['feed']
    assert local.kind in ('local', 'one step', 'none')
    assert "costs credit: reach='readout' keeps it" in local.reason


def test_each_decay_has_a_trace():
    count = lambda m, **o: len(
        next(iter(learner_of(m, **o).traces_of('feed').values()))
    )
    assert count(Base, reach='local') == 2
    assert count(Base) == 3
    assert count(SeveralDecays) == 5
    assert count(TwoReadouts) == 4


def test_read_out_weights_keep_their_own_trace():
    for kappa in (None, 0.3, 0.9):
        learner = learner_of(Base, 'eprop', reach=None, kappa_filter_decay=kappa)
        np.testing.assert_allclose(
            whole(learner)['out',], bptt(Base)['out',], rtol=1e-10
        )
        assert learner.report.gradients['out'].kind == 'equal to BPTT'


def test_a_given_decay_replaces_that_of_the_read_out():
    wanted = bptt(Base)
    same = learner_of(Base, 'eprop', reach=None, kappa_filter_decay=0.9)
    close(whole(same), wanted)
    assert same.report.gradients['feed'].kind == 'equal to BPTT'
    other = learner_of(Base, 'eprop', reach=None, kappa_filter_decay=0.5)
    assert distance(whole(other), wanted) > 0.1
    assert other.report.gradients['feed'].kind == 'approximate'


def test_eprop_is_d_rtrl_where_no_read_out_remembers():
    model = lambda: brainstate.nn.Sequential(
        brainstate.nn.GRUCell(I, H), brainstate.nn.Linear(H, O)
    )
    found = []
    for rule in ('eprop', 'd_rtrl'):
        brainstate.random.seed(0)
        learner = braintrace.compile(model(), rule, XS[0], batch_size=B)
        step = lambda x, y, learner=learner: loss(learner(x), y)
        gradient = learner.etrace_grad(XS, YS, step_fn=step, fresh=True)
        found.append(jax.tree.leaves(gradient))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- penalties


class WithRate(SeveralDecays):
    def __init__(self):
        super().__init__()
        self.rate = nn.WindowRate(H, T)

    def update(self, x):
        z = self.advance(x)
        self.rate(z)
        self.y.value = self.read(z)
        return self.y.value


@pytest.mark.parametrize('options', [{}, {'passes': 1, 'block': 4}])
def test_penalties_are_not_filtered(options):
    """BPTT of loss and penalty; the penalty is that of the rates of the whole window."""
    net = WithRate()
    brainstate.nn.init_all_states(net, batch_size=B)

    def total():
        def step(x, y):
            z = net.advance(x)
            net.y.value = net.read(z)
            return loss(net.y.value, y), z

        losses, spikes = brainstate.transform.for_loop(step, XS, YS)
        rates = jnp.mean(spikes, axis=0)
        return jnp.sum(losses) + 7 * 0.5 * jnp.sum((rates - 0.1) ** 2) / B

    wanted = flat(brainstate.transform.grad(total, net.states(brainstate.ParamState))())
    learner = braintrace.compile(WithRate(), 'eprop', XS[0], batch_size=B, **options)
    step = lambda x, y: loss(learner(x), y) + 7 * learner.model.rate.penalty(0.1)
    found = learner.etrace_grad(XS, YS, step_fn=step, reduction='sum', fresh=True)
    close(flat(found), wanted)
    learner.reset_state()
    twice = [
        learner.etrace_grad(XS, YS, step_fn=step, reduction='sum') for _ in range(2)
    ]
    close(flat(twice[0]), wanted)


def test_windows_of_rates():
    rate = nn.WindowRate(2, 3)
    rate.init_state()
    seen = []
    for z in ([1, 0], [1, 1], [0, 1], [1, 1]):
        rate(jnp.asarray(z, float))
        seen.append(float(rate.penalty(0.5)))
    np.testing.assert_allclose(seen, [0, 0, (1 / 6) ** 2, 0])
    np.testing.assert_allclose(rate.r.value, [1 / 3, 1 / 3])
    with pytest.raises(ValueError, match='at least one step'):
        nn.WindowRate(2, 0)


# ---------------------------------------------------------------- random feedback


@jax.custom_vjp
def product(z, w, back):
    """z @ w, whose derivative by z goes by other weights."""
    return z @ w


def _product_back(kept, bar):
    z, back = kept
    return bar @ back.T, jnp.einsum('...h,...o->ho', z, bar), jnp.zeros_like(back)


product.defvjp(lambda z, w, back: (z @ w, (z, back)), _product_back)
BACK = drawn(H, O, seed=11)


class Back(Base):
    def read(self, z):
        return 0.9 * self.y.value + product(z, self.out.value, BACK)


class SeveralBack(Base):
    def read(self, z):
        drive = product(z, self.out.value, BACK)
        return DECAYS * self.y.value + (1 - DECAYS) * drive


class Stateless(Base):
    def update(self, x):
        return self.advance(x) @ self.out.value


class StatelessBack(Base):
    def update(self, x):
        return product(self.advance(x), self.out.value, BACK)


@pytest.mark.parametrize('array', [BACK, np.asarray(BACK).T, [BACK]])
@pytest.mark.parametrize(
    ('model', 'oracle'),
    [(Base, Back), (SeveralDecays, SeveralBack), (Stateless, StatelessBack)],
)
def test_errors_come_back_by_given_weights(model, oracle, array):
    wanted = bptt(oracle)
    learner = learner_of(model, 'eprop', reach=None, feedback=array)
    close(whole(learner), wanted)
    gives = learner.report.gradients
    assert gives['feed'].kind == 'approximate'
    assert gives['out'].kind == 'equal to BPTT'
    if isinstance(array, list):
        one_pass = learner_of(
            model, 'eprop', reach=None, feedback=array, passes=1, block=4
        )
        close(whole(one_pass), wanted)
        close(step_by_step(learner), wanted)


def test_drawn_weights_are_those_of_the_read_out():
    weights = braintrace.FixedRandomFeedback(3)(0, (H, O), jnp.float64)
    given = whole(learner_of(Base, 'eprop', reach=None, feedback=weights))
    found = whole(
        learner_of(Base, 'eprop', reach=None, feedback='random', random_feedback_key=3)
    )
    close(found, given)
    symmetric = whole(learner_of(Base, 'eprop', reach=None))
    assert distance(found, symmetric) > 0.1


@pytest.mark.parametrize('rule', ['eprop', 'rflo'])
def test_feedback_through_a_read_out_whose_decay_is_learned(rule):
    options = {'reach': None, 'feedback': BACK}
    found = whole(learner_of(LearnedDecay, rule, **options))
    symmetric = whole(learner_of(LearnedDecay, rule, reach=None))
    assert distance(found, symmetric) > 0.1
    for path in (('out',), ('decay',)):
        np.testing.assert_allclose(found[path], symmetric[path], rtol=1e-10)


def test_weights_of_a_wrong_shape_are_refused_at_compile():
    with pytest.raises(ValueError, match=r'weights of shape \(6, 4\)'):
        learner_of(Base, 'eprop', reach=None, feedback=drawn(H, O + 1))
    with pytest.raises(ValueError, match='read-out number 1'):
        learner_of(TwoReadouts, 'eprop', reach=None, feedback=BACK)


def test_two_read_outs_have_a_feedback_each():
    value = drawn(H, 1, seed=12)
    learner = learner_of(TwoReadouts, 'eprop', reach=None, feedback=[BACK, value])

    class TwoBack(TwoReadouts):
        def update(self, x):
            z = self.advance(x)
            self.y.value = 0.9 * self.y.value + product(z, self.out.value, BACK)
            drive = product(z, self.value.value, value)
            self.v.value = 0.5 * self.v.value + drive
            return self.y.value + jnp.tanh(self.v.value)

    close(whole(learner), bptt(TwoBack))


class NoReadout(Base):
    def update(self, x):
        return self.advance(x)[..., :O]


@pytest.mark.parametrize('rule', ['eprop', 'rflo'])
def test_feedback_without_a_read_out_is_refused_at_compile(rule):
    model = lambda: brainstate.nn.GRUCell(I, H)
    with pytest.raises(braintrace.CompilationError, match='without a read-out'):
        learner_of(model, rule, reach=None, feedback='random')


def test_a_read_out_of_a_function_in_the_step_function():
    def step(params, state, x):
        V = 0.8 * state['V'] + jnp.tanh(x @ params['feed'])
        return {'V': V}, V

    params = {'feed': drawn(I, H), 'out': drawn(H, O)}
    state = {'V': jnp.zeros((B, H))}
    given = (params, state, XS[0])
    learner = braintrace.compile(step, 'eprop', *given, feedback='random')
    assert learner.report.gradients
    with pytest.raises(braintrace.CompilationError, match='without a read-out'):
        braintrace.compile(
            step, 'eprop', {'feed': drawn(I, H)}, *given[1:], feedback='random'
        )


def test_a_read_out_in_the_step_function():
    """A model may hold a read-out that only the step_fn calls."""
    learner = learner_of(NoReadout, 'eprop', reach=None, feedback=[BACK])
    out = learner.model.out

    def step(x, y):
        learner(x)
        return loss(learner.model.spikes() @ out.value, y)

    found = learner.etrace_grad(XS, YS, step_fn=step, reduction='sum', fresh=True)
    close(flat(found), bptt(StatelessBack))
