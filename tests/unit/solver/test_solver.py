"""The solver without any compiler: steps written by hand as a `CompiledStep`, against BPTT of the same equations.

Three steps, in which no position feeds another across time, so that D-RTRL is exact: a leaky integrator driven by a
dense layer, a unit with two states of which one adapts to the other, and a unit whose gate and decay are learned
element by element.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.compiled_step import (
    CompiledGroup,
    CompiledSite,
    CompiledStep,
    Tap,
    Values,
)
from braintrace.operations.dense import DenseUse
from braintrace.operations.weight_use import ElementwiseUse
from braintrace.solver import (
    BlockSolver,
    JacobianRecursion,
    ScalarLeak,
    Traces,
)
from braintrace.solver.recursion import products_to_end

B, N_IN, H, T = 2, 3, 4, 7
shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)


def dense_use():
    """y = x @ w."""
    apply = lambda operands: operands[0] @ operands[1]
    return DenseUse(
        apply, 1, (shape(B, N_IN), shape(N_IN, H)), shape(B, H), 'bi,io->bo'
    )


def scaling_use():
    """y = w * x, one w a unit."""
    apply = lambda operands: operands[0] * operands[1]
    return ElementwiseUse(apply, 1, (shape(B, H), shape(H)), shape(B, H))


def tap(weight, result, use, x):
    """A tap with one weight, one result and one site into the only group."""
    positions = np.arange(B * H).reshape(B, H)
    site = CompiledSite(weight, result, 0, use, positions, result, True)

    def gradients(fixed, steps, y_bars, boxes):
        return Values({weight: use.gradient(fixed, steps, y_bars[result])})

    return Tap(
        weights=(weight,),
        results=(result,),
        sites=(site,),
        operands=lambda constants, values: ({1: constants[weight]}, {0: values[x]}),
        gradients=gradients,
        cut_gradients={},
    )


class HandWritten:
    """A step as equations: `drives(theta, x, h)` gives tap results, `new(h, ys)` the new states from them.

    `states` are names of components, all of shape (B, H); `loss(theta, h)` reads the new ones.
    """

    def __init__(self, parameters, states, taps, drives, new, loss, reached, pattern):
        self.parameters, self.names = parameters, states
        self.taps, self.drives, self.new, self.loss = taps, drives, new, loss
        self.reached, self.pattern = reached, pattern

    def step(self):
        """The record, as a person would fill it in."""
        names = self.names
        news = [f'new {name}' for name in names]
        results = [result for t in self.taps for result in t.results]
        old = lambda values: [values[name] for name in names]

        def advance(constants, values):
            found = self.drives(constants, values['x'], old(values))
            new = self.new(old(values), found)
            return Values(zip(names, new, strict=True)), Values(
                zip(results, found, strict=True)
            )

        def outputs(constants, values):
            at = [values[name] for name in news]
            return Values({'loss': self.loss(constants, at, values['target'])})

        def local(g, constants, values, old, delta, taps):
            new = self.new(old, [taps[result] for result in results])
            assert delta is None  # no new state reads another
            return new

        def joint(constants, values, old_read, delta, taps, feedback):
            new = self.new(old(values), [taps[result] for result in results])
            moved = [h + delta[0].get(i, 0.0) for i, h in enumerate(new)]
            return [self.loss(constants, moved, values['target'])]

        def run(parameters, states, inputs, silent=None):
            found = self.drives(parameters, inputs['x'], old(states))
            new = self.new(old(states), found)
            loss = self.loss(parameters, new, inputs['target'])
            return Values(zip(names, new, strict=True)), [loss], Values()

        group = CompiledGroup(
            name=names,
            shape=(B, H),
            dtypes=(jnp.float32,) * len(names),
            pattern=self.pattern,
            inner=frozenset(),
            signalled=frozenset(range(len(names))),
            direct=frozenset(),
            reached=self.reached,
            components=old,
            states=lambda parts: Values(zip(names, parts, strict=True)),
        )
        return CompiledStep(
            parameters={
                k: jax.ShapeDtypeStruct(v.shape, v.dtype)
                for k, v in self.parameters.items()
            },
            names={k: k for k in self.parameters},
            states={name: shape(B, H) for name in names},
            inputs={'x': shape(B, N_IN), 'target': shape(B, H)},
            carried=tuple(zip(names, news, strict=True)),
            hidden=tuple(zip(names, news, strict=True)),
            targets=('loss',),
            is_loss=True,
            aux=(),
            groups=(group,),
            taps=self.taps,
            weights=tuple(self.parameters),
            constant_targets=(),
            kept_bytes=4 * B * H,
            constants=lambda parameters, states: Values(parameters),
            project=lambda constants, inputs: Values(),
            advance=advance,
            complete=lambda constants, values: values,
            outputs=outputs,
            local=local,
            joint=joint,
            extend=lambda kappa, to_readouts: None,  # no memories here
            run=run,
            run_deep=run,
            other_effects=lambda group, result: None,
        )

    def bptt(self, parameters, inputs, weights):
        """The gradient by plain reverse mode through a Python loop."""

        def total(parameters):
            h, found = [jnp.zeros((B, H)) for _ in self.names], 0.0
            for t in range(T):
                h = self.new(h, self.drives(parameters, inputs['x'][t], h))
                found = found + weights[t] * self.loss(
                    parameters, h, inputs['target'][t]
                )
            return found

        return jax.grad(total)(parameters)


def squared(constants, h, target):
    return jnp.mean((h[0] - target) ** 2)


def leaky():
    return HandWritten(
        {'w': _draw(0, N_IN, H)},
        ['v'],
        (tap('w', 'y', dense_use(), 'x'),),
        drives=lambda p, x, h: [x @ p['w']],
        new=lambda h, ys: [0.9 * h[0] + jnp.tanh(ys[0])],
        loss=squared,
        reached={'y': (0,)},
        pattern=frozenset({(0, 0)}),
    )


def adaptive():
    """v reads the old a, a reads the new v inside the step."""

    def new(h, ys):
        v = 0.9 * h[0] - 0.3 * h[1] + ys[0]
        return [v, 0.95 * h[1] + 0.2 * jnp.tanh(v)]

    return HandWritten(
        {'w': _draw(0, N_IN, H)},
        ['v', 'a'],
        (tap('w', 'y', dense_use(), 'x'),),
        drives=lambda p, x, h: [x @ p['w']],
        new=new,
        loss=squared,
        reached={'y': (0, 1)},
        pattern=frozenset({(0, 0), (0, 1), (1, 0), (1, 1)}),
    )


def gated():
    """One gain a unit on the input current of a dense layer, and a learned decay of the state."""

    def new(h, ys):
        current, decayed = ys
        return [decayed + jnp.tanh(current)]

    # The decay multiplies the old state, so its tap reads 'v'.
    return HandWritten(
        {'w': _draw(0, N_IN, H), 'decay': 0.8 + 0.1 * _draw(1, H)},
        ['v'],
        (tap('w', 'y', dense_use(), 'x'), tap('decay', 'd', scaling_use(), 'v')),
        drives=lambda p, x, h: [x @ p['w'], h[0] * p['decay']],
        new=new,
        loss=squared,
        reached={'y': (0,), 'd': (0,)},
        pattern=frozenset(),
    )


def _draw(seed, *sizes):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=sizes) * 0.5, jnp.float32
    )


@functools.cache
def problem(name):
    written = {'leaky': leaky, 'adaptive': adaptive, 'gated': gated}[name]()
    inputs = Values({'x': _draw(2, T, B, N_IN), 'target': _draw(3, T, B, H)})
    weights = jnp.asarray([1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 0.3])
    states = Values((n, jnp.zeros((B, H))) for n in written.names)
    return written, Values(written.parameters), states, inputs, weights


def solver(step, decay=None, kind=None):
    return BlockSolver(step, Traces(step, kind or JacobianRecursion(), decay))


@pytest.mark.parametrize('block', [1, 3, 7])
@pytest.mark.parametrize('name', ['leaky', 'adaptive'])
def test_both_passes_are_bptt(name, block):
    written, parameters, states, inputs, weights = problem(name)
    engine = solver(written.step())
    wanted = written.bptt(parameters, inputs, weights)
    two = engine.two_pass(parameters, states, inputs, weights, block)
    one = engine.one_pass(
        parameters, states, engine.init_traces(), inputs, weights, block
    )
    for found in (two, one):
        for key in parameters:
            np.testing.assert_allclose(
                found.gradients[key], wanted[key], rtol=1e-5, atol=1e-6
            )
    np.testing.assert_allclose(one.losses, two.losses, rtol=1e-6)


def test_the_derivative_by_a_tap_that_reads_a_state_is_its_own():
    """The decay of `gated` acts on the old state through its tap; without it in D, credit ends after one step."""
    written, parameters, states, inputs, weights = problem('gated')
    engine = solver(written.step())
    found = engine.two_pass(parameters, states, inputs, weights, 3).gradients

    def one_step(parameters):
        h, total = [jnp.zeros((B, H))], 0.0
        for t in range(T):
            old = jax.tree.map(jax.lax.stop_gradient, h)
            h = written.new(old, written.drives(parameters, inputs['x'][t], old))
            total = total + weights[t] * written.loss(
                parameters, h, inputs['target'][t]
            )
        return total

    wanted = jax.grad(one_step)(parameters)
    for key in parameters:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, atol=1e-6)
    assert not np.allclose(
        found['w'], written.bptt(parameters, inputs, weights)['w'], rtol=0.05
    )


def test_traces_carry_on_from_call_to_call():
    written, parameters, states, inputs, weights = problem('adaptive')
    engine = solver(written.step())
    cut = lambda tree, part: jax.tree.map(lambda x: x[part], tree)
    first, second = slice(0, 4), slice(4, T)
    a = engine.one_pass(
        parameters, states, engine.init_traces(), cut(inputs, first), weights[first], 2
    )
    b = engine.one_pass(
        parameters, a.states, a.traces, cut(inputs, second), weights[second], 3
    )
    wanted = written.bptt(parameters, inputs, weights)
    np.testing.assert_allclose(
        a.gradients['w'] + b.gradients['w'], wanted['w'], rtol=1e-5, atol=1e-6
    )


def test_a_leak_replaces_the_jacobian():
    """For units that leak by a number and nothing else, RFLO's trace with that number is exact."""
    written, parameters, states, inputs, weights = problem('leaky')
    wanted = written.bptt(parameters, inputs, weights)

    def gradient(leak):
        engine = solver(written.step(), kind=ScalarLeak(leak))
        found = engine.one_pass(
            parameters, states, engine.init_traces(), inputs, weights, 3
        )
        return found.gradients['w']

    np.testing.assert_allclose(gradient(0.9), wanted['w'], rtol=1e-5, atol=1e-6)
    assert not np.allclose(gradient(0.5), wanted['w'], rtol=0.05)


def test_factors_follow_their_recursion():
    """pp_prop's formulas, written out step by step."""
    written, parameters, states, inputs, weights = problem('leaky')
    decay_x, decay_f = 0.7, 0.8
    engine = solver(written.step(), (decay_x, decay_f))
    found = engine.one_pass(
        parameters, states, engine.init_traces(), inputs, weights, 3
    ).gradients
    v, e_x, e_f, wanted = (
        jnp.zeros((B, H)),
        jnp.zeros((B, N_IN)),
        jnp.zeros((B, H)),
        0.0,
    )
    for t in range(T):
        y = inputs['x'][t] @ parameters['w']
        v = 0.9 * v + jnp.tanh(y)
        e_x = decay_x * e_x + inputs['x'][t]
        e_f = decay_f * 0.9 * e_f + (1 - decay_f) * (1 - jnp.tanh(y) ** 2)
        signal = weights[t] * jax.grad(
            lambda h, t=t: squared(None, [h], inputs['target'][t])
        )(v)
        wanted = wanted + e_x.T @ (signal * e_f) / (1 - decay_f ** (t + 1))
    np.testing.assert_allclose(found['w'], wanted, rtol=1e-5, atol=1e-6)


def test_windows_are_bptt_inside():
    written, parameters, states, inputs, weights = problem('adaptive')
    engine = solver(written.step())
    whole = engine.windows.solve(parameters, states, [], inputs, weights, T)
    wanted = written.bptt(parameters, inputs, weights)
    np.testing.assert_allclose(whole.gradients['w'], wanted['w'], rtol=1e-5, atol=1e-6)
    with_traces = engine.windows.solve(
        parameters, states, engine.init_traces(), inputs, weights, 3
    )
    np.testing.assert_allclose(
        with_traces.gradients['w'], wanted['w'], rtol=1e-5, atol=1e-6
    )
    alone = engine.windows.solve(parameters, states, [], inputs, weights, 3)
    assert not np.allclose(alone.gradients['w'], wanted['w'], rtol=0.01)


def test_a_single_step_has_no_products_with_a_unit_matrix():
    """The same rows and products as those of the general recursion, less its zeros."""
    step = problem('adaptive')[0].step()
    traces = solver(step).traces
    (recursion,) = traces.recursions
    shape = recursion.group.shape
    random = np.random.default_rng(0)
    entries = sorted(recursion.pattern)
    matrix = {at: jnp.asarray(random.normal(size=(1, *shape))) for at in entries}
    unit = recursion.unit_product()
    wanted_ends, wanted = products_to_end(matrix, unit, 1)
    ends, product = recursion.products(matrix, None, 1)
    assert set(ends) == {(i, i) for i in recursion.alive}
    for at, x in wanted_ends.items():
        np.testing.assert_array_equal(x, ends.get(at, jnp.zeros_like(x)))
    for at, x in wanted.items():
        np.testing.assert_allclose(x, product.get(at, jnp.zeros_like(x)), rtol=1e-6)
