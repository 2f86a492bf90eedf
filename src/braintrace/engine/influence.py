"""The influence of all parameters on all states, carried forward: the exact reference, and two ways to hold less.

    whole     RTRL     every parameter, every state: G_t = J_t G_{t-1} + ∂s_t/∂θ
    sparse    SnAp-n   only states that a parameter reaches within n steps
    rank one  UORO     s̃ ⊗ θ̃, whose mean over random signs is G

The gradient of a step is ∂ℓ_t/∂θ + ∂ℓ_t/∂s_{t-1} · G_{t-1}, both by reverse mode of the whole step: nothing is cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ..analysis.families import TABLE
from ..compat import Atom, Var, evaluate_equation, has_reverse_only, is_differentiable, is_var
from .masking import without_nan, zero_at
from .plan import Plan, Values
from .products import wide
from .sequence import Solved
from .window import Run, exact_step

Influence = Any
_SILENT = np.ones((), bool)
_TOGETHER = 256
"""Parameters whose influence is moved on at once."""
_DRAWS = 64
"""Random values at which the reach of a parameter is looked for."""


class Carried(NamedTuple):
    """An influence, and the steps it has seen."""

    value: Influence
    steps: jax.Array


class Forward:
    """Solves sequences of one plan by carrying an influence forward. Pure, with the interface of a Sequencer.

    ``reach``: None for all states, n for those within n steps, 0 for a rank-one estimate with random signs from
    ``seed``.
    """

    def __init__(self, plan: Plan, reach: int | None, seed: int = 0):
        self.plan = plan
        self.aux = plan.aux
        self.reach = reach
        self.seed = seed

    @property
    def labels(self) -> list[tuple]:
        """The one influence: of all parameters, on all states."""
        names = tuple(p.name for p in self.plan.program.parameters)
        return [(names, 'influence', tuple(h.path for h in self.plan.program.hidden))]

    @property
    def owner(self) -> tuple[int, ...]:
        """It shares nothing."""
        return (0,)

    @property
    def step_bytes(self) -> int:
        """Nothing is kept of a step."""
        return 1

    def block_length(self, steps: int, carried: bool) -> int:
        """Steps are solved one by one."""
        return 1

    # ------------------------------------------------------------ the step

    @cached_property
    def _moving(self) -> tuple[tuple[Var, Atom], ...]:
        """(old, new) of every state that can carry a derivative."""
        return tuple((old, new) for old, new in self.plan.carried if is_differentiable(old))

    @property
    def _parameters(self) -> tuple[Var, ...]:
        return tuple(p.invar for p in self.plan.program.parameters)

    def _step(
        self, env: Values, wanted: Sequence[Atom], run: Run | None = None
    ) -> Callable[[Values, Values], tuple[Values, list[Any]]]:
        """A step as a function of parameters and of states that carry a derivative: the new ones, wanted values."""
        new = [n for _, n in self._moving]

        def step(parameters: Values, states: Values) -> tuple[Values, list[Any]]:
            results = exact_step(self.plan, env | parameters | states, [*new, *wanted], run)
            moved = zip((old for old, _ in self._moving), results, strict=False)
            return Values((v, _shaped(x, v)) for v, x in moved), results[len(new) :]

        return step

    def _others(self, env: Values) -> Values:
        """New values of states that carry no derivative."""
        pairs = [(old, new) for old, new in self.plan.carried if not is_differentiable(old)]
        found = exact_step(self.plan, env, [new for _, new in pairs])
        return Values((old, x) for (old, _), x in zip(pairs, found, strict=True))

    # ------------------------------------------------------------ the influence

    @cached_property
    def _count(self) -> int:
        """Real numbers that the parameters are made of."""
        return sum(v.aval.size * (2 if _is_complex(v) else 1) for v in self._parameters)

    def _as_parameters(self, flat: jax.Array) -> Values:
        """Parameters of real numbers; of a complex one all real parts come first."""
        found, start = Values(), 0
        for v in self._parameters:
            parts = 2 if _is_complex(v) else 1
            each = flat[start : start + parts * v.aval.size].reshape(parts, *v.aval.shape)
            found[v] = (each[0] if parts == 1 else jax.lax.complex(*each)).astype(v.aval.dtype)
            start += parts * v.aval.size
        return found

    @cached_property
    def _places(self) -> int:
        return sum(old.aval.size for old, _ in self._moving)

    @cached_property
    def _ways(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether each parameter moves each place in one step, and whether each place moves each.

        Found at random parameters, states and inputs, with all that opens and closes a way left open: whatever moves
        at any of them is reached. An element that never acts, as the row of a symbol not drawn, counts as the others
        of its column do.
        """
        rng = np.random.default_rng(0)
        variables = self.plan.program.closed.jaxpr.invars
        with jax.ensure_compile_time_eval():
            draws = [[_drawn(v, rng, scale) for v in variables] for scale in np.geomspace(0.1, 3.0, _DRAWS)]
            moved = jax.jit(self._moves)
            jacobian = functools.reduce(np.logical_or, (np.asarray(moved(draw)) for draw in draws))
        return self._by_column(jacobian[:, : self._count].T), jacobian[:, self._count :].T

    @cached_property
    def _within(self) -> np.ndarray:
        """(parameters, places): whether each parameter reaches each place within n steps."""
        assert self.reach is not None
        direct, onward = self._ways
        found = direct
        for _ in range(self.reach - 1):
            found = direct | _after(found, onward)
        return found

    @cached_property
    def reached(self) -> np.ndarray:
        """(parameters, places): the states that each parameter reaches within n steps; the rest is padding."""
        found = self._within
        width = max(int(found.sum(axis=1).max()), 1)
        order = np.argsort(~found, axis=1, kind='stable')[:, :width]
        return np.where(np.take_along_axis(found, order, axis=1), order, self._places)

    @cached_property
    def complete(self) -> dict[Var, bool]:
        """For each parameter whether it never reaches more states than within n steps, so that nothing is left out."""
        further = (_after(self._within, self._ways[1]) & ~self._within).any(axis=1)
        found, start = {}, 0
        for v in self._parameters:
            size = v.aval.size * (2 if _is_complex(v) else 1)
            found[v] = not further[start : start + size].any()
            start += size
        return found

    def _by_column(self, direct: np.ndarray) -> np.ndarray:
        """What each parameter reaches at once; where one reaches nothing, what those with the same last index reach."""
        parts, start = [], 0
        for v in self._parameters:
            size = v.aval.size * (2 if _is_complex(v) else 1)
            part = direct[start : start + size].reshape(-1, v.aval.shape[-1] if v.aval.shape else 1, self._places)
            part = np.where(part.any(-1, keepdims=True), part, part.any(0, keepdims=True))
            parts.append(part.reshape(size, self._places))
            start += size
        return np.concatenate(parts)

    def _opened(self, i: int, operands: list[Any]) -> list[Any]:
        """An equation that lets through any change of what it takes, at its element.

        A surrogate that is zero far from the threshold, a rectifier, a choice or a gate would otherwise close ways at
        most of the values that are drawn. What is closed by a constant stays closed.
        """
        eqn, name = self.plan.equations[i], self.plan.equations[i].primitive.name
        results = evaluate_equation(eqn, operands)
        family = TABLE.get(name)
        varies = [is_var(v) and v in self._varying for v in eqn.invars]
        if family is None and name.startswith('custom_'):
            passed = varies
        elif family is None or family.kind != 'elementwise' or (name == 'select_n' and not varies[0]):
            return results
        else:
            passed = [v and family.differentiates(eqn, k) for k, v in enumerate(varies)]
            passed = [v and all(varies) for v in passed] if name == 'mul' else passed
        taken = [x for x, p in zip(operands, passed, strict=True) if p and jnp.issubdtype(x.dtype, jnp.inexact)]
        if not taken or any(x.shape not in ((), r.shape) for x in taken for r in results):
            return results
        held = lambda r: jax.lax.stop_gradient(jnp.nan_to_num(r)) if family is not None else r
        return [_changing(held(r), taken) if jnp.issubdtype(r.dtype, jnp.inexact) else r for r in results]

    @cached_property
    def _varying(self) -> set[Var]:
        """What depends on anything but constants."""
        found = set(self.plan.program.closed.jaxpr.invars)
        for eqn in self.plan.equations:
            if any(is_var(v) and v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return found

    def _moves(self, values: list[jax.Array]) -> jax.Array:
        """(places, parameters and places): where the derivative of a step is not zero."""
        env = Values(zip(self.plan.program.closed.jaxpr.invars, values, strict=True))
        parameters, states = env.pick(self._parameters), env.pick(old for old, _ in self._moving)
        flat, to_states = ravel_pytree(states)

        def moved(changes: jax.Array, real: jax.Array, imaginary: jax.Array) -> jax.Array:
            changed = jax.tree.map(jnp.add, parameters, self._as_parameters(changes))
            tangent = jax.lax.complex(real, imaginary) if jnp.iscomplexobj(flat) else real
            step = self._step(env, (), self._opened)
            new, _ = ravel_pytree(step(changed, to_states(flat + tangent.astype(flat.dtype)))[0])
            return jnp.stack([jnp.real(new), jnp.imag(new)])

        zeros = lambda n: jnp.zeros(n, jnp.finfo(flat.dtype).dtype)
        given = (zeros(self._count), zeros(self._places), zeros(self._places))
        by_parameter, *by_state = (jnp.any(x != 0, axis=0) for x in jax.jacrev(moved, (0, 1, 2))(*given))
        return jnp.concatenate([by_parameter, by_state[0] | by_state[1]], axis=1)

    def init_traces(self) -> list[Carried]:
        """The influence at the start: none."""
        none = lambda *shape: jnp.zeros(shape, self._dtype)
        if self.reach == 0:
            zeros = lambda variables: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]
            value: Influence = (zeros(old for old, _ in self._moving), zeros(self._parameters))
        elif self.reach is None:
            value = none(self._count, self._places)
        else:
            value = none(*self.reached.shape)
        return [Carried(value, jnp.zeros((), jnp.int32))]

    @property
    def _dtype(self) -> Any:
        return jnp.result_type(*(old.aval.dtype for old, _ in self._moving))

    def _advance(self, env: Values, parameters: Values, states: Values, trace: Carried) -> Carried:
        """The influence after a step."""
        step = lambda p, s: self._step(env, ())(p, s)[0]
        if self.reach == 0:
            value = self._rank_one(env, step, parameters, states, trace)
        else:
            value = self._columns(step, parameters, states, trace.value)
        return Carried(value, trace.steps + 1)

    def _columns(self, step: Callable, parameters: Values, states: Values, trace: jax.Array) -> jax.Array:
        """Each parameter's influence, moved on by one forward derivative of the step."""
        flat, to_states = ravel_pytree(states)
        index = None if self.reach is None else jnp.asarray(self.reached)

        def one(at: tuple) -> jax.Array:
            k, column = at
            if index is not None:
                column = jnp.zeros(self._places + 1, column.dtype).at[index[k]].set(column)[:-1]
            unit = jnp.zeros(self._count, jnp.finfo(self._dtype).dtype).at[k].set(1)
            tangents = (self._as_parameters(unit), to_states(column.astype(flat.dtype)))
            moved, _ = ravel_pytree(self._pushed(step, (parameters, states), tangents)[1])
            return (moved if index is None else jnp.append(moved, 0)[index[k]]).astype(self._dtype)

        return jax.lax.map(one, (jnp.arange(self._count), trace), batch_size=min(_TOGETHER, self._count))

    def _pushed(self, step: Callable, primals: tuple, tangents: tuple) -> tuple[Values, Values]:
        """A step and its forward derivative: the reverse one transposed, where an operation has no other."""
        if not any(map(has_reverse_only, self.plan.equations)):
            return jax.jvp(step, primals, tangents)
        new, pull = jax.vjp(step, *primals)
        (moved,) = jax.linear_transpose(pull, new)(tangents)
        return new, moved

    def _rank_one(self, env: Values, step: Callable, parameters: Values, states: Values, trace: Carried) -> Influence:
        """s̃ and θ̃ after a step, balanced so that neither grows without need."""
        s, theta = self._factors(trace)
        key = jax.random.fold_in(jax.random.key(self.seed), self._number(env))
        key = jax.random.fold_in(key, trace.steps)
        still = jax.tree.map(jnp.zeros_like, parameters)
        new, pushed = self._pushed(step, (parameters, states), (still, s))
        leaves, structure = jax.tree.flatten(new)
        keys = jax.random.split(key, len(leaves))
        nu = jax.tree.unflatten(structure, [_signs(k, x) for k, x in zip(keys, leaves, strict=True)])
        (pulled,) = jax.vjp(lambda p: step(p, states), parameters)[1](jax.tree.map(jnp.conj, nu))
        tiny = float(jnp.finfo(self._dtype).tiny) ** 0.5
        past = jnp.sqrt((_norm(theta) + tiny) / (_norm(pushed) + tiny))
        now = jnp.sqrt((_norm(pulled) + tiny) / (_norm(nu) + tiny))
        s = jax.tree.map(lambda a, b: (past * a + now * b).astype(a.dtype), pushed, nu)
        theta = jax.tree.map(lambda a, b: (a / past + b / now).astype(a.dtype), theta, pulled)
        return [s[old] for old, _ in self._moving], [theta[v] for v in self._parameters]

    def _factors(self, trace: Carried) -> tuple[Values, Values]:
        states, parameters = trace.value
        old = (old for old, _ in self._moving)
        return Values(zip(old, states, strict=True)), Values(zip(self._parameters, parameters, strict=True))

    def _number(self, env: Values) -> Any:
        """How often the learner has been asked: no two sequences see the same signs."""
        (atom,) = self.plan.standing
        return env[atom] if is_var(atom) else atom.val

    def _told(self, trace: Carried, bar: Values) -> Values:
        """∂ℓ/∂s · G in the shape of the parameters."""
        if self.reach == 0:
            s, theta = self._factors(trace)
            factor = jnp.real(sum(jnp.sum(a * s[v]) for v, a in bar.items()))
            return jax.tree.map(lambda x: (factor * x).astype(x.dtype), theta)
        flat, _ = ravel_pytree(bar)
        if self.reach is None:
            told = trace.value @ flat.astype(self._dtype)
        else:
            told = jnp.sum(trace.value * jnp.append(flat, 0)[jnp.asarray(self.reached)], axis=1)
        return jax.tree.map(jnp.conj, self._as_parameters(jnp.real(told)))

    # ------------------------------------------------------------ drivers

    def one_pass(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        weights: jax.Array,
        block: int,
        masked: bool = True,
    ) -> Solved:
        """A sequence step by step: gradients, losses, next states, next influence.

        ``masked``: some of the weights may be zero.
        """
        wanted = (*self.plan.targets, *self.aux)

        def one(carry: tuple, at: tuple) -> tuple[tuple, tuple[jax.Array, Values]]:
            states, trace, total = carry
            xs, weight = at
            env = self._environment(parameters, states, xs)
            gradients = self._gradient(env, parameters, states, trace, [weight], masked)
            silent = jnp.all(weight == 0) if masked else None
            new, trace, values = self._moved(env, parameters, states, trace, wanted, silent)
            total = jax.tree.map(jnp.add, total, gradients)
            return (new, trace, total), (values[0], Values(zip(self.aux, values[1:], strict=True)))

        start = (states, traces[0], _no_gradient(parameters))
        (states, trace, total), (losses, aux) = jax.lax.scan(one, start, (inputs, weights))
        return Solved(_as_parameters(total, parameters), losses, aux, states, [trace])

    def evolve(self, parameters: Values, states: Values, traces: list, inputs: Values, block: int) -> Solved:
        """Advance states and influence without a loss; ``aux`` values of every step come along."""

        def one(carry: tuple, xs: Values) -> tuple[tuple, Values]:
            states, trace = carry
            env = self._environment(parameters, states, xs)
            states, trace, values = self._moved(env, parameters, states, trace, self.aux, _SILENT)
            return (states, trace), Values(zip(self.aux, values, strict=True))

        (states, trace), aux = jax.lax.scan(one, (states, traces[0]), inputs)
        return Solved(Values(), jnp.zeros(0), aux, states, [trace])

    def run(self, parameters: Values, states: Values, traces: list, inputs: Values) -> tuple[Values, Values, list]:
        """A few steps: targets and auxiliary values of each, next states, next influence."""
        wanted = tuple(dict.fromkeys((*self.plan.targets, *self.aux)))

        def one(carry: tuple, xs: Values) -> tuple[tuple, list[Any]]:
            states, trace = carry
            env = self._environment(parameters, states, xs)
            states, trace, values = self._moved(env, parameters, states, trace, wanted, _SILENT)
            return (states, trace), values

        (states, trace), values = jax.lax.scan(one, (states, traces[0]), inputs)
        return Values(zip(wanted, values, strict=True)), states, [trace]

    def block_gradient(
        self, parameters: Values, states: Values, traces: list, inputs: Values, cotangents: Sequence[jax.Array]
    ) -> Values:
        """Gradient of a few steps for cotangents (t, ...) of their targets."""

        def one(carry: tuple, at: tuple) -> tuple:
            states, trace, total = carry
            xs, bars = at
            env = self._environment(parameters, states, xs)
            found = self._gradient(env, parameters, states, trace, bars)
            states, trace, _ = self._moved(env, parameters, states, trace, (), _SILENT)
            return (states, trace, jax.tree.map(jnp.add, total, found)), None

        start = (states, traces[0], _no_gradient(parameters))
        (_, _, total), _ = jax.lax.scan(one, start, (inputs, list(cotangents)))
        return _as_parameters(total, parameters)

    def _environment(self, parameters: Values, states: Values, inputs: Values) -> Values:
        closed = self.plan.program.closed
        return Values(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | parameters | states | inputs

    def _split(self, states: Values) -> Values:
        return states.pick(old for old, _ in self._moving)

    def _gradient(
        self,
        env: Values,
        parameters: Values,
        states: Values,
        trace: Carried,
        bars: Sequence[jax.Array],
        masked: bool = True,
    ) -> Values:
        targets = self.plan.targets
        values, pull = jax.vjp(lambda p, s: self._step(env, targets)(p, s)[1], parameters, self._split(states))
        mine, past = pull([jnp.asarray(b).astype(x.dtype) for b, x in zip(bars, values, strict=True)])
        found = jax.tree.map(jnp.add, mine, self._told(trace, past))
        return zero_at(found, jnp.all(jnp.stack([jnp.all(b == 0) for b in bars]))) if masked else found

    def _moved(
        self,
        env: Values,
        parameters: Values,
        states: Values,
        trace: Carried,
        wanted: Sequence[Atom],
        silent: jax.Array | np.ndarray | None,
    ) -> tuple[Values, Carried, list[Any]]:
        """States, influence and wanted values after a step.

        Where the step is ``silent``, the influence is moved on at values without NaN.
        """
        moving = self._split(states)
        new, values = self._step(env, wanted)(parameters, moving)
        others = self._others(env)
        if silent is not None:
            given = [*self.plan.program.inputs, *states]
            env = env | without_nan(env.pick(given), silent)
        trace = self._advance(env, parameters, env.pick(moving), trace)
        return states | new | others, trace, values


def _no_gradient(parameters: Values) -> Values:
    return Values((v, jnp.zeros_like(x, wide(x.dtype))) for v, x in parameters.items())


def _as_parameters(gradients: Values, parameters: Values) -> Values:
    return Values((v, x.astype(parameters[v].dtype)) for v, x in gradients.items())


def _after(places: np.ndarray, onward: np.ndarray) -> np.ndarray:
    """The places that are moved one step after these."""
    return places.astype(np.int64) @ onward.astype(np.int64) > 0


def _is_complex(v: Var) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.complexfloating)


def _signs(key: jax.Array, like: jax.Array) -> jax.Array:
    """Random signs, of real and imaginary part apart."""
    if not jnp.iscomplexobj(like):
        return jax.random.rademacher(key, like.shape, like.dtype)
    return jax.lax.complex(*jax.random.rademacher(key, (2, *like.shape), jnp.real(like).dtype))


def _shaped(x: Any, v: Var) -> jax.Array:
    return jnp.broadcast_to(x, v.aval.shape).astype(v.aval.dtype)


def _changing(result: jax.Array, taken: Sequence[jax.Array]) -> jax.Array:
    """A result that is not zero, and changes with all that was taken."""
    for x in taken:
        x = jnp.real(x) + jnp.imag(x) if jnp.iscomplexobj(x) and not jnp.iscomplexobj(result) else x
        result = result + 0.7321 * x.astype(result.dtype)
    return result


def _drawn(v: Var, rng: np.random.Generator, scale: float) -> jax.Array:
    if is_differentiable(v):
        return jnp.asarray(rng.normal(size=v.aval.shape, scale=scale), v.aval.dtype)
    if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), v.aval.shape)
    return jnp.asarray(rng.integers(0, 2, v.aval.shape), v.aval.dtype)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(tree)))
