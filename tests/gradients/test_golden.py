"""The two tasks of the e-prop paper, with networks written as the paper has them, beside NumPy and published losses."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import nn
from eprop_numpy import (
    CLASSIFICATION,
    DOUBLE,
    LOSSES,
    REGRESSION,
    classification,
    drawn,
    regression,
)

ITERATIONS = 5


@jax.custom_jvp
def fire(over):
    """A spike at and above the threshold; in derivatives a triangle of height 0.3."""
    return (over >= 0).astype(over.dtype)


@fire.defjvp
def _(primals, tangents):
    (over,), (d,) = primals, tangents
    return fire(over), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(over)) * d


@pytest.fixture(autouse=True)
def milliseconds():
    """A step takes one."""
    with brainstate.environ.context(dt=1.0):
        yield


@pytest.fixture
def double(x64):
    with brainstate.environ.context(precision=64):
        yield


class Network(brainstate.nn.Module):
    """Spiking units, some with an adaptive threshold, all-to-all, and a leaky read-out."""

    def __init__(self, task, start, dtype, has_readout_layer):
        super().__init__()
        self.task = task
        given = lambda w: brainstate.ParamState(jnp.asarray(w, dtype))
        self.w_in, self.w_rec = given(start.w_in), given(start.w_rec)
        self.others = jnp.asarray(1 - np.eye(task.units), dtype)
        self.rate = nn.WindowRate(task.units, task.steps)
        self.has_readout_layer = has_readout_layer
        if has_readout_layer:
            self.out = nn.LeakyRateReadout(
                task.units,
                task.outputs,
                tau=task.tau_out,
                w_init=jnp.asarray(start.w_out, dtype),
            )
        else:
            self.w_out = given(start.w_out)

    def init_state(self, batch_size=None, **kwargs):
        dtype = self.w_in.value.dtype
        zeros = lambda size: jnp.zeros((batch_size, size), dtype)
        self.v = brainstate.HiddenState(zeros(self.task.units))
        self.a = brainstate.HiddenState(zeros(self.task.units))
        self.z = brainstate.HiddenState(zeros(self.task.units))
        self.rest = brainstate.ShortTermState(zeros(self.task.units))
        if not self.has_readout_layer:
            self.y = brainstate.HiddenState(zeros(self.task.outputs))

    def update(self, x):
        task, z = self.task, self.z.value
        rest = jnp.maximum(self.rest.value - 1, 0)
        drive = x @ self.w_in.value + z @ (self.w_rec.value * self.others)
        reset = task.threshold * jax.lax.stop_gradient(z)
        self.v.value = task.alpha * self.v.value + task.gain * drive - reset
        self.a.value = task.rho * self.a.value + z
        bound = task.threshold + jnp.asarray(task.beta, x.dtype) * self.a.value
        spikes = fire((self.v.value - bound) / task.threshold)
        self.z.value = jnp.where(rest == 0, spikes, 0.0)
        self.rest.value = jnp.where(self.z.value > 0, float(task.refractory), rest)
        self.rate(self.z.value)
        driven = (1 - task.kappa) * self.z.value
        if self.has_readout_layer:
            return self.out(driven)
        self.y.value = task.kappa * self.y.value + driven @ self.w_out.value
        return self.y.value


class AdamOfThePaper(optax.GradientTransformation):
    """Adam with ε before the bias correction."""

    def __new__(cls, rate):
        zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        start = lambda tree: (zeros(tree), zeros(tree), jnp.zeros(()))

        def update(grads, state, params=None):
            m, s, n = state
            n = n + 1
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
            s = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, s, grads)
            now = rate * jnp.sqrt(1 - 0.999**n) / (1 - 0.9**n)
            step = lambda m, s: (-now * m / (jnp.sqrt(s) + 1e-8)).astype(m.dtype)
            return jax.tree.map(step, m, s), (m, s, n)

        return super().__new__(cls, start, update)


class Trained:
    """A task under e-prop with the feedback of the paper, as a user would set it up."""

    def __init__(self, name, dtype, has_readout_layer=True, **options):
        self.task = REGRESSION if name == 'regression' else CLASSIFICATION
        self.name, self.dtype = name, dtype
        self.start = drawn(name)
        net = Network(self.task, self.start, dtype, has_readout_layer)
        self.learner = braintrace.compile(
            net,
            'eprop',
            jnp.zeros((1, self.task.inputs), dtype),
            batch_size=1,
            feedback=self.start.feedback,
            **options,
        )
        self.net = net

    def batch(self, i=0):
        xs, ys = self.start.batch()
        if self.name == 'classification':
            inside = np.arange(self.task.steps) >= self.task.steps - self.task.window
            answer = np.broadcast_to(ys, (self.task.steps, len(ys)))
            return jnp.asarray(xs, self.dtype), jnp.asarray(answer), jnp.asarray(inside)
        ys = jnp.asarray(ys, self.dtype)
        return jnp.asarray(xs, self.dtype), ys, jnp.ones(self.task.steps)

    def step(self, x, y, inside):
        """The loss of a step, and the part of it that the task itself measures."""
        out = self.learner(x)
        rate = self.task.penalty * self.net.rate.penalty(self.task.target_rate)
        if self.name == 'regression':
            error = 0.5 * jnp.sum((out - y) ** 2)
            return error + rate, error
        chances = jax.nn.log_softmax(out)
        error = -jnp.mean(jnp.take_along_axis(chances, y[:, None], 1))
        error = jnp.where(inside, error, 0.0) / self.task.window
        return error + rate / self.task.window, error

    @property
    def optimizer(self):
        """For gradients summed over time."""
        if self.name == 'regression':
            return optax.sgd(1e-4)
        return AdamOfThePaper(5e-3)

    def by_etrace_grad(self, fresh=True):
        optimizer, losses = self.optimizer, []
        for _ in range(ITERATIONS):
            if not fresh:
                self.learner.reset_state()
            found, errors = self.learner.etrace_grad(
                *self.batch(),
                step_fn=self.step,
                reduction='sum',
                has_aux=True,
                fresh=fresh,
            )
            self.learner.apply(found, optimizer)
            losses.append(float(jnp.sum(errors)))
        return losses

    def by_fit(self):
        """Losses and gradients are means over time here."""
        optimizer = optax.chain(optax.scale(float(self.task.steps)), self.optimizer)
        history = braintrace.fit(
            self.learner,
            self.batch,
            step_fn=self.step,
            metrics=lambda errors, *_: {'error': jnp.sum(errors)},
            optimizer=optimizer,
            updates=ITERATIONS,
            show=False,
        )
        return [float(x) for x in history['error']]

    def by_etrace_online(self):
        optimizer, losses = self.optimizer, []
        loss = lambda *slices: self.step(*slices)[0]
        for _ in range(ITERATIONS):
            self.learner.reset_state()
            found = self.learner.etrace_online(
                *self.batch(),
                step_fn=loss,
                optimizer=optimizer,
                update_every=self.task.steps,
            )
            losses.append(float(jnp.sum(found)) - self.penalty)
        return losses

    @property
    def penalty(self):
        """The penalty of the window that has just ended."""
        scale = 1.0 if self.name == 'regression' else 1 / self.task.window
        rate = self.net.rate.penalty(self.task.target_rate)
        return float(self.task.penalty * scale * rate)


BY_HAND = {}


def by_hand(name):
    if name not in BY_HAND:
        run = regression if name == 'regression' else classification
        BY_HAND[name] = run(ITERATIONS)
    return BY_HAND[name]


TASKS = ['regression', 'classification']


@pytest.mark.parametrize('name', TASKS)
def test_numpy_has_the_published_losses(name):
    """Those of the paper's own code were made in single precision."""
    np.testing.assert_allclose(by_hand(name), LOSSES[name], rtol=2e-7)
    np.testing.assert_allclose(by_hand(name), DOUBLE[name], rtol=1e-13)


@pytest.mark.parametrize(
    ('name', 'has_readout_layer', 'options'),
    [
        ('regression', True, {}),
        ('regression', False, {'passes': 1, 'block': 40}),
        ('classification', False, {}),
        ('classification', True, {'passes': 1}),
    ],
)
def test_losses_in_double_precision(double, name, has_readout_layer, options):
    trained = Trained(name, jnp.float64, has_readout_layer, **options)
    np.testing.assert_allclose(trained.by_etrace_grad(), by_hand(name), rtol=1e-9)


@pytest.mark.parametrize('way', ['etrace_grad', 'fit', 'etrace_online'])
@pytest.mark.parametrize('name', TASKS)
def test_losses_in_single_precision(name, way):
    losses = getattr(Trained(name, jnp.float32), f'by_{way}')()
    np.testing.assert_allclose(losses, LOSSES[name], rtol=1e-5)


@pytest.mark.parametrize('way', ['fit', 'etrace_online'])
@pytest.mark.parametrize('name', TASKS)
def test_other_ways_in_double_precision(double, name, way):
    losses = getattr(Trained(name, jnp.float64), f'by_{way}')()
    np.testing.assert_allclose(losses, by_hand(name), rtol=1e-9)


def test_carried_sequences_in_double_precision(double):
    trained = Trained('regression', jnp.float64)
    losses = trained.by_etrace_grad(fresh=False)
    np.testing.assert_allclose(losses, by_hand('regression'), rtol=1e-9)


def test_each_part_of_the_rule_is_seen_in_the_losses(double):
    """Without the filter, or with the read-out's own weights back, losses differ by per cents."""
    wanted = np.array(by_hand('regression'))
    for options in ({'kappa_filter_decay': 0.0}, {'feedback': 'symmetric'}):
        trained = Trained('regression', jnp.float64)
        trained.learner = braintrace.compile(
            trained.net,
            'eprop',
            jnp.zeros((1, trained.task.inputs)),
            batch_size=1,
            **{'feedback': trained.start.feedback, **options},
        )
        found = trained.by_etrace_grad()
        assert np.max(np.abs(found / wanted - 1)) > 5e-3
