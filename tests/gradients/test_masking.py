"""Steps of mask 0 contribute nothing, whatever their inputs hold: NaN and infinity count as 0 in them.

Two cases. Padding at the end of a sequence: the gradient is that of the sequence without it.
Gaps inside of a sequence whose inputs the model leaves out by `jnp.where`: the gradient is that of any finite inputs.
Calls without a mask, and losses that count for nothing: NaN changes no gradient and no trace.
"""

import os

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import MultiStepData
from braintrace.learner.by_rule import RULES

B, I, H, O, T = 2, 3, 4, 2, 6  # batch, inputs, units, outputs, steps  # noqa: E741
END = np.array([1.0, 2.0, 0.5, 1.0, 0.0, 0.0])
GAPS = np.array([1.0, 0.0, 2.0, 0.5, 0.0, 1.0])
OPTIONS = {
    'dni': {'window': 2},
    'tbptt': {'k': 4},
    'snap': {'n': 2},
    'ottt': {'leak': 0.5},
}
EVERY = [name for name in RULES if name != 'es_d_rtrl']
ALL = os.environ.get('ZOO') == 'all'  # by default a part, `make zoo` runs all


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""


class Net(brainstate.nn.Module):
    """Gated units whose drive comes through all kinds of operations; an invalid input leaves the states as they are.

    Where x is 0, so is what each operation reads of it: without a mask, traces take NaN for 0 wherever it is read.
    """

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        weight = lambda *shape: brainstate.ParamState(
            jnp.asarray(0.4 * rng.standard_normal(shape))
        )
        self.feed, self.back, self.gate = weight(I, H), weight(H, H), weight(I + H, H)
        self.gain, self.heads, self.filter = (
            weight(H),
            weight(2, H // 2, H // 2),
            weight(1, 1, 2),
        )
        self.out = weight(H, O)
        self.h = brainstate.HiddenState(jnp.zeros((B, H)))
        self.a = brainstate.HiddenState(jnp.zeros((B, H)))

    def update(self, x, valid):
        h, a = self.h.value, self.a.value
        gate = jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ self.gate.value)
        drive = jnp.tanh(x @ self.feed.value) * self.gain.value
        drive += jnp.einsum(
            'bij,ijk->bik', drive.reshape(B, 2, H // 2), self.heads.value
        ).reshape(B, H)
        image = jax.lax.conv_general_dilated(
            drive[:, None], self.filter.value, (1,), 'SAME'
        )[:, 0]
        new = (
            gate * h
            + (1 - gate) * image
            + 0.5 * jnp.tanh(h @ self.back.value)
            - 0.3 * a
        )
        self.h.value = jnp.where(valid, new, h)
        self.a.value = jnp.where(valid, 0.8 * a + jnp.log(1 + x[:, :1] ** 2) * h, a)
        return self.h.value @ self.out.value


def learner_of(rule, **options):
    learner = RULES[rule](Net(), **OPTIONS.get(rule, {}), **options)
    learner.compile_graph(jnp.zeros((B, I)), jnp.asarray(True))
    return learner


def standing(learner):
    """A function that takes a learner back to where it is now: states, traces, random signs and predictor."""
    before = None if learner.rule_state is None else learner.rule_state.value

    def start():
        learner.reset_state()
        if learner.rule_state is not None:
            learner.rule_state.value = before

    return start


def loss_of(learner):
    return lambda x, y, valid: jnp.sum((learner(x, valid) - y) ** 2)


def data():
    rng = np.random.default_rng(1)
    return rng.standard_normal((T, B, I)), rng.standard_normal((T, B, O))


def spoilt(values, mask, bad):
    """Values with something else at masked steps."""
    return np.where((mask == 0).reshape(-1, *(1,) * (values.ndim - 1)), bad, values)


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


WAYS = [
    *((rule, {}, fresh) for rule in EVERY for fresh in (True, False)),
    *(
        ('d_rtrl', {'passes': passes, 'block': block}, True)
        for passes in (1, 2)
        for block in (1, 4, 5)
    ),
    *((rule, {'block': 4}, False) for rule in ('d_rtrl', 'pp_prop', 'eprop')),
]


@pytest.mark.parametrize(('rule', 'options', 'fresh'), WAYS if ALL else WAYS[::3])
def test_padding_at_the_end(rule, options, fresh):
    """The gradient is that of the sequence without the padding, and values are those of inputs of 0."""
    (xs, ys), learner, valid = data(), learner_of(rule, **options), np.ones(T, bool)
    call = {
        'step_fn': loss_of(learner),
        'reduction': 'sum',
        'fresh': fresh,
        'return_value': True,
    }
    start = standing(learner)

    def run(bad, n=T):
        start()
        given = (spoilt(xs, END, bad), spoilt(ys, END, bad), valid)
        return learner.etrace_grad(*(x[:n] for x in given), mask=END[:n], **call)

    wanted = run(0.0), learner.model.h.value
    for bad in (np.nan, np.inf):
        same((run(bad), learner.model.h.value), wanted)
    found, _ = run(np.nan)
    if rule != 'dni':  # which is told when a sequence ends
        same(found, run(np.nan, np.count_nonzero(END))[0])


@pytest.mark.parametrize(('rule', 'options', 'fresh'), WAYS if ALL else WAYS[1::3])
def test_what_the_model_leaves_out(rule, options, fresh):
    """NaN and infinity in inputs that reach no state, at steps that are masked."""
    (xs, ys), learner = data(), learner_of(rule, **options)
    call = {
        'step_fn': loss_of(learner),
        'reduction': 'sum',
        'fresh': fresh,
        'mask': GAPS,
    }
    start = standing(learner)

    def run(bad):
        start()
        return learner.etrace_grad(
            spoilt(xs, GAPS, bad), spoilt(ys, GAPS, bad), GAPS > 0, **call
        )

    wanted = run(0.0)
    same(run(np.inf), wanted)
    same(run(np.nan), wanted)
    states = jax.tree.leaves([t.value for t in learner.traces.values()])
    assert all(np.isfinite(x).all() for x in (learner.model.h.value, *states))


WITHOUT_PREDICTOR = [rule for rule in EVERY if rule != 'dni']  # it reads the states


@pytest.mark.parametrize(
    'rule', WITHOUT_PREDICTOR if ALL else ['d_rtrl', 'pp_prop', 'bptt']
)
def test_padding_that_the_model_cannot_take(rule):
    """Zeros at the end, of which the model takes the logarithm: states are not finite after it, and gradients are."""

    def step(p, s, x):
        new = 0.5 * s + jnp.log(x) @ p['w'] + jnp.tanh(s @ p['r']) / x[:, :1]
        return new, new @ p['o']

    rng, options = np.random.default_rng(2), OPTIONS.get(rule, {})
    weights = {'w': (I, H), 'r': (H, H), 'o': (H, O)}
    p = {k: 0.4 * rng.standard_normal(shape) for k, shape in weights.items()}
    learner = braintrace.compile(
        step, rule, p, np.zeros((B, H)), np.ones((B, I)), **options
    )
    xs = spoilt(1 + rng.random((T, B, I)), END, 0.0)
    loss = lambda x: jnp.sum(learner(x) ** 2)
    for fresh in (True, False):
        start = standing(learner)
        whole = learner.etrace_grad(
            xs, step_fn=loss, mask=END, reduction='sum', fresh=fresh
        )
        assert not np.isfinite(jax.tree.leaves(learner.state)[0]).any()
        start()
        part = learner.etrace_grad(
            xs[:4], step_fn=loss, mask=END[:4], reduction='sum', fresh=fresh
        )
        start()
        same(whole, part)


@pytest.mark.parametrize('mask', [END, GAPS])
def test_bptt_is_jax_grad_of_a_guarded_loss(mask):
    """The same by plain JAX, with finite numbers in the place of NaN."""
    (xs, ys), learner = data(), learner_of('bptt')
    valid = mask > 0
    given = (spoilt(xs, mask, np.nan), spoilt(ys, mask, np.nan), valid)
    options = {'step_fn': loss_of(learner), 'mask': mask, 'reduction': 'sum'}
    found = learner.etrace_grad(*given, fresh=True, **options)
    model = Net()
    parameters = model.states(brainstate.ParamState)
    guarded = [np.where(np.isnan(x), 0.3, x) for x in given[:2]]

    def loss():
        model.h.value = model.a.value = jnp.zeros((B, H))
        total = 0.0
        for x, y, v, m in zip(*guarded, valid, mask, strict=True):
            total += m * jnp.sum((model.update(x, v) - y) ** 2)
        return total

    wanted = brainstate.transform.grad(loss, parameters)()
    same(found, {path: wanted[path] for path in found})


@pytest.mark.parametrize('rule', EVERY if ALL else EVERY[::2])
def test_online_training(rule):
    """Weights that change at every step stay finite, and where they would be without NaN and infinity."""
    (xs, ys), after = data(), []
    for bad in (0.0, np.where(np.arange(I) > 0, np.nan, np.inf)):
        learner = learner_of(rule)
        given = (spoilt(xs, GAPS, bad), spoilt(ys, GAPS, np.max(bad)), GAPS > 0)
        optimizer = braintools.optim.SGD(lr=0.05)
        learner.etrace_online(
            *given,
            step_fn=loss_of(learner),
            optimizer=optimizer,
            mask=GAPS,
            update_every=2,
        )
        after.append({path: s.value for path, s in learner.param_states.items()})
    same(*after)


@pytest.mark.parametrize('rule', EVERY if ALL else EVERY[1::2])
def test_step_by_step(rule):
    """Calls of the learner itself, and losses that count for nothing."""
    (xs, ys), found = data(), []
    for bad in (0.0, np.nan):
        learner = learner_of(rule)
        given = (spoilt(xs, GAPS, bad), ys, GAPS)
        parameters = learner.model.states(brainstate.ParamState)

        def loss(x, y, m, learner=learner):
            return m * jnp.sum((jnp.where(m > 0, learner(x, m > 0), 0.0) - y) ** 2)

        step = brainstate.transform.jit(brainstate.transform.grad(loss, parameters))
        steps = [dict(step(*at)) for at in zip(*given, strict=True)]
        found.append(jax.tree.map(lambda *g: sum(g), *steps))
    same(*found)


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'bptt'])
def test_windows_of_the_users_own(rule):
    """A window whose loss is masked, by ``chunk_size``."""
    (xs, ys), learner = data(), learner_of(rule)
    mask = np.array([1.0, 0.0, 2.0])
    steps = np.repeat(mask, 2)

    def step_fn(x, y, valid):
        return jnp.sum((learner(MultiStepData(x), MultiStepData(valid)) - y) ** 2)

    def run(bad):
        learner.reset_state()
        given = (spoilt(xs, steps, bad), spoilt(ys, steps, bad), steps > 0)
        return learner.etrace_grad(
            *given, step_fn=step_fn, mask=mask, chunk_size=2, reduction='sum'
        )

    wanted = run(0.0)
    same(run(np.nan), wanted)
    same(run(np.inf), wanted)


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'rtrl', 'uoro'])
def test_evolving(rule):
    """Without any loss, traces are those of finite inputs."""
    (xs, _), found = data(), []
    for bad in (0.0, np.nan):
        learner = learner_of(rule)
        learner.etrace_evolve(spoilt(xs, GAPS, bad), GAPS > 0)
        found.append([t.value for t in learner.traces.values()])
    same(*found)
