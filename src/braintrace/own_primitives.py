"""The primitives of this package: the cut, and products with a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from .compat import Equation, Primitive, Var, new_equation, new_primitive, new_var

# ---------------------------------------------------------------- the cut


class CutMask:
    """A hashable boolean array: which elements of an operand are cut."""

    def __init__(self, array: np.ndarray):
        self.array = np.asarray(array, bool)
        self._key = (self.array.shape, self.array.tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CutMask) and self._key == other._key

    def __repr__(self) -> str:
        return f'{int(self.array.sum())}/{self.array.size}'


cut_p = new_primitive('cut')
"""The identity whose derivative is zero where its mask is true (everywhere without a
mask)."""


@cut_p.def_impl
def _cut_impl(x: Any, *, mask: CutMask | None) -> Any:
    return x


@cut_p.def_abstract_eval
def _cut_abstract(x: Any, *, mask: CutMask | None) -> Any:
    return x


def _cut_jvp(primals: Any, tangents: Any, *, mask: CutMask | None) -> Any:
    (x,), (dx,) = primals, tangents
    if mask is None or isinstance(dx, ad.Zero):
        return cut_p.bind(x, mask=mask), ad.Zero(jax.typeof(x).to_tangent_aval())
    return cut_p.bind(x, mask=mask), jnp.where(mask.array, jnp.zeros_like(dx), dx)


def _cut_batch(args: Any, dims: Any, *, mask: CutMask | None) -> Any:
    return cut_p.bind(jnp.moveaxis(args[0], dims[0], 0), mask=mask), 0


ad.primitive_jvps[cut_p] = _cut_jvp
batching.primitive_batchers[cut_p] = _cut_batch
mlir.register_lowering(
    cut_p, mlir.lower_fun(lambda x, *, mask: x, multiple_results=False)
)


def cut_equation(operand: Var, mask: np.ndarray | None) -> Equation:
    """An equation that gives the operand with its derivative cut."""
    some = None if mask is None or mask.all() else CutMask(mask)
    return new_equation([operand], new_var(operand.aval), cut_p, mask=some)


def is_whole_cut(eqn: Equation) -> bool:
    """True for a cut through which nothing passes."""
    return eqn.primitive is cut_p and eqn.params['mask'] is None


# ---------------------------------------------------------------- kernels


def kernel_primitive(
    name: str,
    *,
    shape: Callable[..., tuple[tuple[int, ...], Any]],
    run: Callable[..., Any],
    transposes: dict[int, Callable[..., Any]],
    batched: Callable[..., tuple[Any, int] | None] | None = None,
) -> Primitive:
    """A primitive that runs by a kernel where there is one.

    ``shape(*operands, **params)`` gives shape and type of the result, ``run`` the
    result itself. It is linear in each of the operands that have a
    transpose: ``transposes[k](cotangent, *operands, **params)``, where operand k is not
    known. ``batched(operands, has_axis, **params)`` runs many cases at once, given
    which operands have a leading axis of cases: the result and the axis of cases in it.
    Where it gives None, the cases run one after the other."""
    primitive = new_primitive(name)

    @functools.cache
    def compiled(params: tuple) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    @primitive.def_impl
    def impl(*operands: Any, **params: Any) -> Any:
        return compiled(tuple(sorted(params.items())))(*operands)

    @primitive.def_abstract_eval
    def abstract(*operands: Any, **params: Any) -> Any:
        return jax.core.ShapedArray(*shape(*operands, **params))

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        terms = []
        for k in transposes:
            if not isinstance(tangents[k], ad.Zero):
                moved = [*primals[:k], tangents[k], *primals[k + 1 :]]
                terms.append(primitive.bind(*moved, **params))
        zero = ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, sum(terms[1:], terms[0]) if terms else zero

    def transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
        found: list[Any] = [None] * len(operands)
        for k, pull in transposes.items():
            if ad.is_undefined_primal(operands[k]):
                is_zero = isinstance(cotangent, ad.Zero)
                zero = ad.Zero(operands[k].aval)
                found[k] = zero if is_zero else pull(cotangent, *operands, **params)
        return found

    def batch(operands: Any, dims: Any, **params: Any) -> tuple[Any, int]:
        has_axis = [d is not None for d in dims]
        moved = [
            jnp.moveaxis(x, d, 0) if has else x
            for x, d, has in zip(operands, dims, has_axis, strict=True)
        ]
        found = batched(moved, has_axis, **params) if batched else None
        if found is not None:
            return found
        cases = [x for x, has in zip(moved, has_axis, strict=True) if has]

        def one(case: list[Any]) -> Any:
            rest = iter(case)
            filled = [
                next(rest) if has else x for x, has in zip(moved, has_axis, strict=True)
            ]
            return primitive.bind(*filled, **params)

        return jax.lax.map(one, cases), 0

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    return primitive
