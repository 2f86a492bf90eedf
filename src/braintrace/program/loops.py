"""Loops of unknown length that can be differentiated in both directions.

JAX follows a ``while`` loop forward only: reverse mode would have to keep the states of
all rounds, and their number is not known. Here the loop becomes a primitive of its own,
``loop``, with the same sub-programs, so that the analysis can enter and cut its body.
Its derivative is ``loop_linear``, a linear primitive of two directions that are each
other's transpose:

    forward   one pass that carries tangents beside the state
    reverse   one pass counts the rounds n, one keeps the states of every s-th round in
              a fixed number of slots, and the rounds are then pulled back from last to
              first, each from its nearest kept state: n + n·s/2 rounds, s = n / slots

As everywhere in JAX, the number of rounds is taken as given: no derivative passes the
condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..compat import (
    ClosedJaxpr,
    Equation,
    consts_of,
    evaluate,
    has_reverse_only,
    is_differentiable,
    is_var,
    loop_linear_p,
    loop_p,
    open_jaxpr,
    read_while,
    structure,
    trace,
)

_SLOTS = 64
"""States that the reverse pass keeps; loops of no more rounds are run three times."""


def followed(eqn: Equation) -> Equation:
    """A ``while`` equation as a loop that reverse mode can follow; others as they are.

    A loop without differentiable results needs none, and one that prints or calls
    Python code stays as it is.
    """
    is_moved = any(is_var(v) and is_differentiable(v) for v in eqn.invars)
    has_results = any(map(is_differentiable, eqn.outvars))
    if structure(eqn) != 'while' or not (is_moved and has_results) or eqn.effects:
        return eqn
    loop = _Loop(**read_while(eqn))
    operands = list(eqn.invars)
    if open_jaxpr(loop.cond_jaxpr).outvars[0].aval.shape:
        # A loop that was mapped over samples has a condition for each of them.
        cond_consts, consts, carry = loop.split(operands)
        loop = _joined(loop, loop.goes_on, loop.round, [v.aval for v in operands])
        operands = [*cond_consts, *cond_consts, *consts, *carry]
    return eqn.replace(primitive=loop_p, invars=operands, params=loop._asdict())


class _Loop(NamedTuple):
    """The parameters of a loop, with the names that JAX gives those of ``while``."""

    cond_jaxpr: ClosedJaxpr
    body_jaxpr: ClosedJaxpr
    cond_nconsts: int
    body_nconsts: int

    @property
    def carry_avals(self) -> list[Any]:
        """Shapes and types of what a round hands to the next."""
        return [v.aval for v in open_jaxpr(self.body_jaxpr).invars[self.body_nconsts :]]

    @property
    def carry_moving(self) -> list[int]:
        """The values of the carry that have a derivative."""
        return _inexact(self.carry_avals)

    @property
    def consts_moving(self) -> list[int]:
        """The constants of the body that have a derivative."""
        invars = open_jaxpr(self.body_jaxpr).invars[: self.body_nconsts]
        return _inexact([v.aval for v in invars])

    @property
    def operands(self) -> int:
        """How many operands the loop has."""
        return self.cond_nconsts + self.body_nconsts + len(self.carry_avals)

    def split(self, operands: Sequence[Any]) -> tuple[list, list, tuple]:
        """Constants of the condition, those of the body, and the first carry."""
        a, b = self.cond_nconsts, self.cond_nconsts + self.body_nconsts
        return list(operands[:a]), list(operands[a:b]), tuple(operands[b:])

    def goes_on(self, consts: Sequence[Any], carry: Sequence[Any]) -> Any:
        """Whether there is another round."""
        return _call(self.cond_jaxpr, *consts, *carry)[0]

    def round(self, consts: Sequence[Any], carry: Sequence[Any]) -> tuple:
        """One round."""
        return tuple(_call(self.body_jaxpr, *consts, *carry))

    def moving_round(
        self, consts: Sequence[Any], carry: Sequence[Any]
    ) -> Callable[[list, list], tuple[list, tuple]]:
        """A round as a function of what has a derivative; the whole carry follows."""

        def run(moving_consts: list, moving_carry: list) -> tuple[list, tuple]:
            given = _filled(consts, self.consts_moving, moving_consts)
            state = _filled(carry, self.carry_moving, moving_carry)
            new = self.round(given, state)
            return [new[k] for k in self.carry_moving], new

        return run

    @property
    def has_forward_mode(self) -> bool:
        """Whether a round can be differentiated forward."""
        return not any(map(has_reverse_only, open_jaxpr(self.body_jaxpr).eqns))


def _inexact(avals: Sequence[Any]) -> list[int]:
    return [k for k, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _call(closed: Any, *args: Any) -> list[Any]:
    return evaluate(open_jaxpr(closed), consts_of(closed), *args)


def _filled(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list:
    filled = list(values)
    for k, x in zip(places, new, strict=True):
        filled[k] = x
    return filled


# ---------------------------------------------------------------- running


def _run(*operands: Any, **params: Any) -> tuple:
    loop = _Loop(**params)
    cond_consts, body_consts, carry = loop.split(operands)
    return jax.lax.while_loop(
        lambda carry: loop.goes_on(cond_consts, carry),
        lambda carry: loop.round(body_consts, carry),
        carry,
    )


def _push(loop: _Loop, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Tangents of the last carry, from those of the body's constants and the carry."""
    cond_consts, consts, carry = loop.split(primals)
    moved = len(loop.consts_moving)
    const_tangents, carry_tangents = list(tangents[:moved]), list(tangents[moved:])
    moving_consts = [consts[k] for k in loop.consts_moving]

    def one(at: tuple) -> tuple:
        carry, tangents = at
        run = loop.moving_round(consts, carry)
        point = (moving_consts, [carry[k] for k in loop.carry_moving])
        if loop.has_forward_mode:
            given = (const_tangents, tangents)
            _, tangents, new = jax.jvp(run, point, given, has_aux=True)
            return new, tangents
        value, pull, new = jax.vjp(run, *point, has_aux=True)
        (tangents,) = jax.linear_transpose(pull, value)((const_tangents, tangents))
        return new, tangents

    start = (carry, carry_tangents)
    return jax.lax.while_loop(lambda at: loop.goes_on(cond_consts, at[0]), one, start)[
        1
    ]


def _pull(loop: _Loop, primals: Sequence[Any], bars: Sequence[Any]) -> list[Any]:
    """Cotangents of the body's constants and of the first carry."""
    cond_consts, consts, carry = loop.split(primals)
    rounds = _count(loop, cond_consts, consts, carry)
    stride = jnp.maximum(-(-rounds // _SLOTS), 1)
    kept = _keep(loop, consts, carry, rounds, stride)
    moving_consts = [consts[k] for k in loop.consts_moving]

    def state_of(k: jax.Array) -> tuple:
        """The carry before round k, from the nearest kept one."""
        nearest = k // stride
        state = tuple(x[nearest] for x in kept)
        again = lambda at: (loop.round(consts, at[0]), at[1] + 1)
        start = (state, nearest * stride)
        return jax.lax.while_loop(lambda at: at[1] < k, again, start)[0]

    def one(at: tuple) -> tuple:
        k, const_bars, bars = at
        state = state_of(k)
        run = loop.moving_round(consts, state)
        moving = [state[j] for j in loop.carry_moving]
        _, pull, _ = jax.vjp(run, moving_consts, moving, has_aux=True)
        more, bars = pull(bars)
        return k - 1, jax.tree.map(jnp.add, const_bars, more), bars

    zeros = list(map(jnp.zeros_like, moving_consts))
    start = (rounds - 1, zeros, list(bars))
    _, const_bars, bars = jax.lax.while_loop(lambda at: at[0] >= 0, one, start)
    return [*const_bars, *bars]


def _count(loop: _Loop, cond_consts: list, consts: list, carry: tuple) -> jax.Array:
    """The number of rounds."""
    goes_on = lambda at: loop.goes_on(cond_consts, at[0])
    one = lambda at: (loop.round(consts, at[0]), at[1] + 1)
    return jax.lax.while_loop(goes_on, one, (carry, jnp.asarray(0)))[1]


def _keep(
    loop: _Loop, consts: list, carry: tuple, rounds: jax.Array, stride: jax.Array
) -> tuple:
    """(slots, ...) the carry before every round that is a multiple of ``stride``."""

    def one(at: tuple) -> tuple:
        carry, k, kept = at
        slot, is_first = k // stride, k % stride == 0
        put = lambda all_, x: all_.at[slot].set(jnp.where(is_first, x, all_[slot]))
        return loop.round(consts, carry), k + 1, tuple(map(put, kept, carry))

    empty = tuple(jnp.broadcast_to(x, (_SLOTS, *jnp.shape(x))) for x in carry)
    start = (carry, jnp.zeros_like(rounds), empty)
    return jax.lax.while_loop(lambda at: at[1] < rounds, one, start)[2]


# ---------------------------------------------------------------- the linear primitive


def _linear(*operands: Any, transposed: bool, **params: Any) -> list[Any]:
    loop = _Loop(**params)
    primals, linear = operands[: loop.operands], operands[loop.operands :]
    return (_pull if transposed else _push)(loop, primals, linear)


@loop_linear_p.def_abstract_eval
def _linear_avals(*avals: Any, transposed: bool, **params: Any) -> list[Any]:
    loop = _Loop(**params)
    carry = [loop.carry_avals[k] for k in loop.carry_moving]
    if not transposed:
        return [_plain(a) for a in carry]
    invars = open_jaxpr(loop.body_jaxpr).invars
    return [_plain(a) for a in (*(invars[k].aval for k in loop.consts_moving), *carry)]


def _plain(aval: Any) -> Any:
    return aval.update(weak_type=False) if aval.weak_type else aval


def _instantiated(x: Any) -> Any:
    if not isinstance(x, ad.Zero):
        return x
    aval: Any = x.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _linear_transpose(
    bars: Any, *operands: Any, transposed: bool, **params: Any
) -> Any:
    loop = _Loop(**params)
    primals, linear = operands[: loop.operands], operands[loop.operands :]
    given = map(_instantiated, bars)
    found = loop_linear_p.bind(*primals, *given, transposed=not transposed, **params)
    is_linear = map(ad.is_undefined_primal, linear)
    pairs = zip(is_linear, found, strict=True)
    return [None] * loop.operands + [x if wanted else None for wanted, x in pairs]


def _linear_batch(args: Any, dims: Any, *, transposed: bool, **params: Any) -> Any:
    loop = _Loop(**params)
    primals, linear = args[: loop.operands], args[loop.operands :]
    size = _batch_size(args, dims)
    # Tangents have the shapes of what they belong to, so all get the new axis.
    batched = lambda x, d: _in_front(x, d, size)
    primals = list(map(batched, primals, dims[: loop.operands]))
    linear = list(map(batched, linear, dims[loop.operands :]))
    lifted, operands = _lifted(loop, primals, [0] * loop.operands)
    # The batched body also reads the constants of the condition, which stay.
    extra = len(_inexact(primals[: loop.cond_nconsts]))
    params = lifted._asdict()
    if transposed:
        found = loop_linear_p.bind(*operands, *linear, transposed=True, **params)[
            extra:
        ]
    else:
        still = primals[: loop.cond_nconsts]
        zeros = [jnp.zeros_like(still[k]) for k in _inexact(still)]
        found = loop_linear_p.bind(
            *operands, *zeros, *linear, transposed=False, **params
        )
    return found, [0] * len(found)


# ---------------------------------------------------------------- the loop


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    loop = _Loop(**params)
    results = loop_p.bind(*primals, **params)
    _, consts, carry = loop.split(tangents)
    moving = [*(consts[k] for k in loop.consts_moving)]
    moving += [carry[k] for k in loop.carry_moving]
    still = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if all(isinstance(x, ad.Zero) for x in moving):
        return results, still
    given = map(_instantiated, moving)
    found = loop_linear_p.bind(*primals, *given, transposed=False, **params)
    return results, _filled(still, loop.carry_moving, found)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    loop = _Loop(**params)
    size = _batch_size(args, dims)
    first = loop.cond_nconsts + loop.body_nconsts
    consts = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    carry = [
        _in_front(x, d, size) for x, d in zip(args[first:], dims[first:], strict=True)
    ]
    axes = [None if d is None else 0 for d in dims[:first]]
    axes += [0] * len(carry)
    lifted, operands = _lifted(loop, [*consts[:first], *carry], axes)
    found = loop_p.bind(*operands, **lifted._asdict())
    return found, [0] * len(found)


def _batch_size(args: Sequence[Any], dims: Sequence[Any]) -> int:
    pairs = zip(args, dims, strict=True)
    return next(jnp.shape(x)[d] for x, d in pairs if d is not None)


def _in_front(x: Any, d: int | None, size: int) -> Any:
    """With the batch axis in front."""
    if d is None:
        return jnp.broadcast_to(x, (size, *jnp.shape(x)))
    return jnp.moveaxis(x, d, 0)


def _lifted(
    loop: _Loop, operands: Sequence[Any], axes: Sequence[int | None]
) -> tuple[_Loop, list[Any]]:
    """A loop over a batch, and its operands: it runs as long as any sample does, and
    the others keep their carry."""
    cond_consts, consts, carry = loop.split(operands)
    cond_axes, const_axes, carry_axes = loop.split(axes)
    axes_of = lambda const_axes: (const_axes, list(carry_axes))
    goes_on = jax.vmap(loop.goes_on, in_axes=axes_of(cond_axes))
    one = jax.vmap(loop.round, in_axes=axes_of(const_axes))
    lifted = _joined(loop, goes_on, one, list(map(jax.typeof, operands)))
    return lifted, [*cond_consts, *cond_consts, *consts, *carry]


def _joined(
    loop: _Loop,
    goes_on: Callable[..., Any],
    one: Callable[..., Any],
    avals: Sequence[Any],
) -> _Loop:
    """A loop with one condition for all samples, from a condition and a round that give
    an answer for each, on leading axes. Its body also reads the condition's constants.
    """
    a, b = loop.cond_nconsts, loop.cond_nconsts + loop.body_nconsts

    def cond(*args: Any) -> list[Any]:
        return [jnp.any(goes_on(list(args[:a]), list(args[a:])))]

    def body(*args: Any) -> list[Any]:
        own, consts, carry = list(args[:a]), list(args[a:b]), list(args[b:])
        alive = goes_on(own, carry)

        def chosen(new: Any, old: Any) -> Any:
            more = [1] * (new.ndim - alive.ndim)
            return jnp.where(alive.reshape(*alive.shape, *more), new, old)

        return list(map(chosen, one(consts, carry), carry))

    cond_jaxpr = trace(cond, [*avals[:a], *avals[b:]])
    return _Loop(cond_jaxpr, trace(body, avals), a, b)


loop_p.def_impl(_run)
loop_p.def_abstract_eval(lambda *avals, **params: _Loop(**params).carry_avals)
mlir.register_lowering(loop_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[loop_p] = _jvp
batching.primitive_batchers[loop_p] = _batch

loop_linear_p.def_impl(_linear)
mlir.register_lowering(loop_linear_p, mlir.lower_fun(_linear, multiple_results=True))
ad.primitive_transposes[loop_linear_p] = _linear_transpose
batching.primitive_batchers[loop_linear_p] = _linear_batch
