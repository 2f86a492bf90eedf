"""What each primitive does to positions, a line a family.

A rule is called as ``rule(eqn, outs, const)``: the labels of the results (None = all NONE) and a
function that gives the value of an operand that is constant, or None. It returns the labels of
the operands. Rules know nothing of hidden states; the pass over the program is in positions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Equation, Primitive, is_whole_cut, solver_constants
from .labels import NONE, Labels, gather_back, join, project

AxisMap = Sequence[int | None]
Const = Callable[[Any], np.ndarray | None]
Constant = Sequence[int] | Callable[[Equation], Sequence[int]] | None


class Rule(Protocol):
    """Labels of an equation's operands from those of its results.

    Sound if no element of an operand reaches a result element whose label differs from its own.
    """

    def __call__(self, eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]: ...


@dataclass(frozen=True)
class Family:
    """How a primitive treats positions and which operands it differentiates."""

    kind: str
    rule: Rule
    constant_operands: Constant = ()
    """Operands without a derivative, or a function that tells them from the equation; None: all of them."""

    def differentiates(self, eqn: Equation, operand: int) -> bool:
        constant = self.constant_operands(eqn) if callable(self.constant_operands) else self.constant_operands
        return constant is not None and operand not in constant


TABLE: dict[str, Family] = {}


def family(kind: str, rule: Rule, names: str, constant_operands: Constant = ()) -> None:
    """Enter primitives, by name, into the table."""
    for name in names.split():
        TABLE[name] = Family(kind, rule, constant_operands)


def register_primitive(
    primitive: Primitive | str, kind: str | Rule, *, constant_operands: tuple[int, ...] = ()
) -> None:
    """Tell the compiler how a primitive of your own treats positions.

    ``kind`` is ``'elementwise'`` (element e of every operand reaches element e of the result),
    ``'mixing'`` (any element may reach any other, as in a matrix product) or a :class:`Rule`.
    ``constant_operands`` are those without a derivative.
    """
    rules: dict[str, Rule] = {'elementwise': elementwise, 'mixing': mixing}
    if isinstance(kind, str) and kind not in rules:
        raise ValueError(
            f'register_primitive(..., {kind!r})\n  why it cannot work: no family has that name\n'
            f"  what to write instead: 'elementwise', 'mixing' or a function rule(eqn, outs, const)"
        )
    name = primitive if isinstance(primitive, str) else primitive.name
    rule = rules[kind] if isinstance(kind, str) else kind
    TABLE[name] = Family(kind if isinstance(kind, str) else 'registered', rule, constant_operands)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, 'shape', ()))


def _only(outs: list[Labels]) -> np.ndarray:
    """The labels of a single result: a rule is asked only if some result has any."""
    (out,) = outs
    assert out is not None
    return out


def _merge(eqn: Equation, outs: list[Labels], axis_map: Callable[[Equation, int], AxisMap]) -> list[Labels]:
    """Project the labels of every result onto every operand."""
    result: list[Labels] = []
    for k, operand in enumerate(eqn.invars):
        labels: Labels = None
        for out in (o for o in outs if o is not None):
            labels = join(labels, project(out, axis_map(eqn, k), _shape(operand)))
        result.append(labels)
    return result


def axes(axis_map: Callable[[Equation, int], AxisMap]) -> Rule:
    """A rule told by the result axis along which each operand axis runs."""
    return lambda eqn, outs, const: _merge(eqn, outs, axis_map)


# ---------------------------------------------------------------- element-wise


def _aligned(eqn: Equation, k: int) -> AxisMap:
    shape, out = _shape(eqn.invars[k]), _shape(eqn.outvars[0])
    return [d if n == out[d] else None for d, n in enumerate(shape)]


elementwise = axes(_aligned)
family(
    'elementwise',
    elementwise,
    'abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt clamp '
    'clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp '
    'exp2 expm1 ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min '
    'mul name ne neg not or polygamma population_count pow random_gamma_grad real reduce_precision '
    'regularized_incomplete_beta rem rsqrt shift_left shift_right_arithmetic shift_right_logical sin sinh '
    'sqrt square sub tan tanh xor zeta',
)
family('elementwise', elementwise, 'sign floor ceil round nextafter stop_gradient', constant_operands=None)
family('elementwise', elementwise, 'cut', lambda eqn: (0,) if is_whole_cut(eqn) else ())
# Element-wise primitives of the ecosystem: surrogate spikes (braintools), exprel (brainunit).
family('elementwise', elementwise, 'heaviside_surrogate_gradient', constant_operands=(1,))
family('elementwise', elementwise, 'exprel')
family('elementwise', elementwise, 'random_gamma', constant_operands=(0,))


def _select(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Element-wise; where the choice is constant, what is not chosen reaches nothing."""
    labels = elementwise(eqn, outs, const)
    which = const(eqn.invars[0])
    if which is None:
        return labels
    keep = lambda k, x: x if x is None else np.where(which.astype(int) == k, x, NONE).astype(np.int32)
    return [labels[0], *(keep(k, x) for k, x in enumerate(labels[1:]))]


def _barrier(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return outs


family('elementwise', _select, 'select_n')
family('elementwise', _barrier, 'optimization_barrier')

# ---------------------------------------------------------------- data movement


def _reshape(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    shape, order = _shape(eqn.invars[0]), eqn.params.get('dimensions')
    if eqn.primitive.name != 'reshape' or order is None:
        order = range(len(shape))
    labels = _only(outs).reshape([shape[d] for d in order]).transpose(np.argsort(order))
    return [labels] + [None] * (len(eqn.invars) - 1)


family('movement', _reshape, 'reshape squeeze expand_dims')
family('movement', axes(lambda e, k: np.argsort(e.params['permutation']).tolist()), 'transpose')


def _broadcast(eqn: Equation, k: int) -> AxisMap:
    out = eqn.params['shape']
    return [
        d if n == out[d] else None
        for d, n in zip(eqn.params['broadcast_dimensions'], _shape(eqn.invars[k]), strict=True)
    ]


def _broadcast_rule(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    first = project(_only(outs), _broadcast(eqn, 0), _shape(eqn.invars[0]))
    return [first] + [None] * (len(eqn.invars) - 1)


def _tile(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    shape = _shape(eqn.invars[0])
    copies = _only(outs).reshape([n for pair in zip(eqn.params['reps'], shape, strict=True) for n in pair])
    return [project(copies, range(1, copies.ndim, 2), shape)]


family('movement', _broadcast_rule, 'broadcast_in_dim')
family('movement', _tile, 'tile')
family('movement', lambda e, outs, const: [np.flip(outs[0], e.params['dimensions'])], 'rev')


def _slice(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p = eqn.params
    labels = np.full(_shape(eqn.invars[0]), NONE, np.int32)
    strides = p['strides'] or (1,) * labels.ndim
    index = tuple(slice(*s) for s in zip(p['start_indices'], p['limit_indices'], strides, strict=True))
    labels[index] = _only(outs)
    return [labels]


def _split(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    parts = [np.full(_shape(v), NONE, np.int32) if o is None else o for v, o in zip(eqn.outvars, outs, strict=True)]
    return [np.concatenate(parts, eqn.params['axis'])]


def _concatenate(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    axis = eqn.params['dimension']
    ends = np.cumsum([_shape(v)[axis] for v in eqn.invars])[:-1]
    return list(np.split(_only(outs), ends, axis))


def _stack(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return list(np.moveaxis(_only(outs), eqn.params['axis'], 0))


def _unstack(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    parts = [np.full(_shape(v), NONE, np.int32) if o is None else o for v, o in zip(eqn.outvars, outs, strict=True)]
    return [np.stack(parts, eqn.params['axis'])]


def _pad(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    out, shape = _only(outs), _shape(eqn.invars[0])
    labels = np.full(shape, NONE, np.int32)
    inside, taken = [], []
    for n, total, (low, _, interior) in zip(shape, out.shape, eqn.params['padding_config'], strict=True):
        at = low + np.arange(n) * (interior + 1)
        ok = (at >= 0) & (at < total)
        inside.append(np.flatnonzero(ok))
        taken.append(at[ok])
    labels[np.ix_(*inside)] = out[np.ix_(*taken)]
    rest = out.copy()
    rest[np.ix_(*taken)] = NONE
    return [labels, project(rest, [], ())]


family('movement', _slice, 'slice')
family('movement', _split, 'split')
family('movement', _concatenate, 'concatenate')
family('movement', _stack, 'stack')
family('movement', _unstack, 'unstack')
family('movement', _pad, 'pad')


def _same_size(small: Sequence[int], large: Sequence[int]) -> AxisMap:
    return [d if n == m else None for d, (n, m) in enumerate(zip(small, large, strict=True))]


def _starts(eqn: Equation, first: int, sizes: Sequence[int], limits: Sequence[int], const: Const) -> tuple | None:
    """The slices a dynamic slice takes, where its start is constant."""
    values = [const(v) for v in eqn.invars[first:]]
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    at = [int(np.clip(v, 0, n - s)) for v, s, n in zip(known, sizes, limits, strict=True)]
    return tuple(slice(a, a + s) for a, s in zip(at, sizes, strict=True))


def _dynamic_slice(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    shape, sizes = _shape(eqn.invars[0]), eqn.params['slice_sizes']
    indices: list[Labels] = [None] * (len(eqn.invars) - 1)
    at = _starts(eqn, 1, sizes, shape, const)
    if at is None:
        return [project(_only(outs), _same_size(sizes, shape), shape), *indices]
    labels = np.full(shape, NONE, np.int32)
    labels[at] = _only(outs)
    return [labels, *indices]


def _dynamic_update_slice(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    out, shape, sizes = _only(outs), _shape(eqn.invars[0]), _shape(eqn.invars[1])
    indices: list[Labels] = [None] * (len(eqn.invars) - 2)
    at = _starts(eqn, 2, sizes, shape, const)
    if at is None:
        return [out, project(out, _same_size(sizes, shape), sizes), *indices]
    kept = out.copy()
    kept[at] = NONE
    return [kept, out[at], *indices]


family('movement', _dynamic_slice, 'dynamic_slice')
family('movement', _dynamic_update_slice, 'dynamic_update_slice')


@dataclass(frozen=True)
class _Window:
    """Dimension numbers shared by gather (result side) and scatter (update side)."""

    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    index_map: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    sizes: tuple[int, ...]

    def axis_map(self, operand: tuple[int, ...], windowed_rank: int) -> list[int | None]:
        """For every operand axis, the axis of the windowed array that surely runs along it."""
        batch_axes = [a for a in range(windowed_rank) if a not in self.window_dims]
        windows = iter(self.window_dims)
        result: list[int | None] = []
        for d, n in enumerate(operand):
            if d in self.batching:
                result.append(batch_axes[self.index_batching[self.batching.index(d)]])
            elif d in self.dropped:
                result.append(None)
            else:
                axis = next(windows)
                result.append(axis if self.sizes[d] == n else None)
        return result

    def locations(self, operand: tuple[int, ...], indices: np.ndarray, mode: Any) -> np.ndarray:
        """Flat operand index behind every element of the windowed array; -1 outside."""
        numbers = jax.lax.GatherDimensionNumbers(
            self.window_dims, self.dropped, self.index_map, self.batching, self.index_batching
        )
        with jax.ensure_compile_time_eval():
            table = jnp.arange(int(np.prod(operand)), dtype=jnp.int32).reshape(operand)
            taken = jax.lax.gather(table, jnp.asarray(indices), numbers, self.sizes, mode=mode, fill_value=-1)
        return np.asarray(taken)


def _gather(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p, out, shape = eqn.params, _only(outs), _shape(eqn.invars[0])
    d = p['dimension_numbers']
    window = _Window(
        d.offset_dims, d.collapsed_slice_dims, d.start_index_map,
        d.operand_batching_dims, d.start_indices_batching_dims, tuple(p['slice_sizes']),
    )  # fmt: skip
    indices = const(eqn.invars[1])
    if indices is None:
        return [project(out, window.axis_map(shape, out.ndim), shape), None]
    return [gather_back(out, window.locations(shape, indices, p['mode']), shape), None]


def _scatter(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p, out = eqn.params, _only(outs)
    shape, updates = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    d = p['dimension_numbers']
    windows = iter(d.update_window_dims)
    gone = (*d.inserted_window_dims, *d.operand_batching_dims)
    sizes = tuple(1 if a in gone else updates[next(windows)] for a in range(len(shape)))
    window = _Window(
        d.update_window_dims, d.inserted_window_dims, d.scatter_dims_to_operand_dims,
        d.operand_batching_dims, d.scatter_indices_batching_dims, sizes,
    )  # fmt: skip
    indices = const(eqn.invars[1])
    if indices is None:
        back: list[int | None] = [None] * len(updates)
        for operand_axis, axis in enumerate(window.axis_map(shape, len(updates))):
            if axis is not None:
                back[axis] = operand_axis
        return [out, None, project(out, back, updates)]
    at = window.locations(shape, indices, p['mode'])
    flat = np.append(out.reshape(-1), NONE).astype(np.int32)
    kept = out.copy()
    if eqn.primitive.name == 'scatter':
        kept.reshape(-1)[at[at >= 0]] = NONE
    return [kept, None, flat[at]]


family('movement', _gather, 'gather')
family('movement', _scatter, 'scatter scatter-add scatter_add scatter-mul scatter_mul scatter-sub scatter_sub')
family('movement', _scatter, 'scatter-min scatter_min scatter-max scatter_max')

# ---------------------------------------------------------------- reductions


def _reduced(eqn: Equation, k: int) -> AxisMap:
    gone = eqn.params['axes'] if 'axes' in eqn.params else eqn.params['dimensions']
    left = iter(range(len(_shape(eqn.outvars[0]))))
    return [None if d in gone else next(left) for d in range(len(_shape(eqn.invars[k])))]


def _reduce_generic(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    half = len(eqn.invars) // 2
    return _merge(eqn, outs, lambda e, k: _reduced(e, k) if k < half else [])


family('reduction', axes(_reduced), 'reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor')
family('reduction', axes(_reduced), 'argmax argmin')
family('reduction', _reduce_generic, 'reduce')

# ---------------------------------------------------------------- along whole axes


def _all_but(*gone: int, rank: int) -> AxisMap:
    blocked = {a % rank for a in gone} if rank else set()
    return [None if d in blocked else d for d in range(rank)]


def _along(name: str) -> Callable[[Equation, int], AxisMap]:
    return lambda e, k: _all_but(e.params[name], rank=len(_shape(e.invars[k])))


family('along', axes(_along('axis')), 'cumsum cumprod cummax cummin cumlogsumexp')
family('along', axes(_along('dimension')), 'sort')
family('along', axes(lambda e, k: _all_but(e.params.get('axis', -1), rank=len(_shape(e.invars[k])))), 'top_k')
family('along', axes(_along('reduction_dimension')), 'approx_top_k')
family(
    'along',
    axes(lambda e, k: _all_but(*range(-len(e.params['fft_lengths']), 0), rank=len(_shape(e.invars[k])))),
    'fft',
)


def _windows(
    out: np.ndarray,
    shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base: Sequence[int],
    dilation: Sequence[int],
) -> np.ndarray:
    """Labels of an array seen through sliding windows, joined over the windows that see an element."""
    labels: Labels = None
    for offset in np.ndindex(*sizes):
        seen, taken = [], []
        for n, m, k, s, (low, _), b, d in zip(shape, out.shape, offset, strides, padding, base, dilation, strict=True):
            at = np.arange(m) * s + k * d - low
            ok = (at >= 0) & (at % b == 0) & (at // b < n)
            seen.append(at[ok] // b)
            taken.append(np.flatnonzero(ok))
        part = np.full(shape, NONE, np.int32)
        part[np.ix_(*seen)] = out[np.ix_(*taken)]
        labels = join(labels, part)
    return np.full(shape, NONE, np.int32) if labels is None else labels


def _reduce_window(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p = eqn.params
    shape = _shape(eqn.invars[0])
    result: list[Labels] = []
    for operand in eqn.invars:
        labels: Labels = None
        for out in (o for o in outs if o is not None):
            if _shape(operand) != shape:
                labels = join(labels, project(out, [], ()))
            else:
                parts = (p['window_dimensions'], p['window_strides'], p['padding'])
                labels = join(labels, _windows(out, shape, *parts, p['base_dilation'], p['window_dilation']))
        result.append(labels)
    return result


family('along', _reduce_window, 'reduce_window_sum reduce_window_max reduce_window_min reduce_window')

# ---------------------------------------------------------------- products


def _dot(eqn: Equation, k: int) -> AxisMap:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params['dimension_numbers']
    rank_l = len(_shape(eqn.invars[0]))
    free_l = [d for d in range(rank_l) if d not in contract_l and d not in batch_l]
    batch, contract = (batch_l, contract_l) if k == 0 else (batch_r, contract_r)
    start = len(batch_l) + (0 if k == 0 else len(free_l))
    free = [d for d in range(len(_shape(eqn.invars[k]))) if d not in contract and d not in batch]
    place = {d: i for i, d in enumerate(batch)} | {d: start + i for i, d in enumerate(free)}
    return [place.get(d) for d in range(len(_shape(eqn.invars[k])))]


def _conv(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Image: through the kernel's windows, features of a group joined. Kernel: its output features."""
    p, d, out = eqn.params, eqn.params['dimension_numbers'], _only(outs)
    image, kernel = (_shape(v) for v in eqn.invars)
    kernel_map: list[int | None] = [d.out_spec[1] if a == d.rhs_spec[0] else None for a in range(len(kernel))]
    kernel_labels = project(out, kernel_map, kernel)
    if p['batch_group_count'] != 1:
        return [project(out, [None] * len(image), image), kernel_labels]
    groups = p['feature_group_count']
    out = out.transpose(d.out_spec)
    out = project(out.reshape(out.shape[0], groups, -1, *out.shape[2:]), [0, 1, *range(3, out.ndim + 1)], (
        out.shape[0], groups, *out.shape[2:]
    ))  # fmt: skip
    shape = [image[a] for a in d.lhs_spec]
    out = np.repeat(out, shape[1] // groups, axis=1)
    ones, none = (1, 1), ((0, 0), (0, 0))
    labels = _windows(
        out,
        shape,
        (*ones, *(kernel[a] for a in d.rhs_spec[2:])),
        (*ones, *p['window_strides']),
        (*none, *p['padding']),
        (*ones, *p['lhs_dilation']),
        (*ones, *p['rhs_dilation']),
    )
    return [labels.transpose(np.argsort(d.lhs_spec)), kernel_labels]


def mixing(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Any element of any operand may reach any element of any result."""
    return _merge(eqn, outs, lambda e, k: [None] * len(_shape(e.invars[k])))


family('product', axes(_dot), 'dot_general')
family('product', _conv, 'conv_general_dilated')
# Sparse and event-driven products of brainevent: the operator is hidden in indices.
family(
    'product',
    mixing,
    'csrmv csrmm binary_csrmv binary_csrmm binary_csrmv_indexed binary_csrmm_indexed coomv coomm binary_coomv '
    'binary_coomm binary_densemv binary_densemm fcnmv fcnmm binary_fcnmv binary_fcnmm bitpack_binary_fcnmv '
    'bitpack_binary_fcnmm compact_binary_fcnmv compact_binary_fcnmm jitsmv jitsmm binary_jitsmv binary_jitsmm '
    'jitnmv jitnmm binary_jitnmv binary_jitnmm jitumv jitumm binary_jitumv binary_jitumm csrmv_dt2t csrmm_dt2t',
)
# Known to mix along unknown patterns: cut, with no missing-rule diagnostic.
family(
    'mixing',
    mixing,
    'cholesky triangular_solve lu qr svd eigh eig tridiagonal_solve select_and_scatter_add '
    'select_and_gather_add conv_general_dilated_patches householder_product',
)
family('mixing', mixing, 'custom_linear_solve', solver_constants)
family('opaque', mixing, 'while pure_callback io_callback', None)
family('none', mixing, 'iota rng_uniform rng_bit_generator threefry2x32 random_bits random_seed random_wrap', None)
family('none', mixing, 'random_unwrap random_fold_in random_split random_clone', None)
# Checks of brainstate: values that must not be batched, and conditions over a batch.
family('none', mixing, 'no_vmap unvmap_any unvmap_all unvmap_max', None)
