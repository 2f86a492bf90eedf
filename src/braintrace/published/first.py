"""The names of version 0.1: a parameter that knows its operation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from .. import ops
from ..errors import three_parts

INSTEAD = {
    'ConvOp': 'braintrace.conv',
    'ElemWiseOp': 'braintrace.element_wise',
    'ElemWiseParam': 'brainstate.ParamState and braintrace.element_wise',
    'ETraceOp': 'the marked operations, such as braintrace.matmul',
    'ETraceParam': 'brainstate.ParamState and plain JAX: x @ w is traced as it is',
    'FakeETraceParam': 'a plain object and plain JAX',
    'FakeElemWiseParam': 'a plain object and plain JAX',
    'LoraOp': 'braintrace.lora_matmul',
    'MatMulOp': 'braintrace.matmul, or x @ w',
    'NonTempParam': 'brainstate.ParamState and trace=lambda path: ...',
    'SpMatMulOp': 'braintrace.sparse_matmul',
}


def named(name: str) -> Any:
    """A class by its name, with a warning that says what to write now."""
    warnings.warn(
        f'braintrace.{name} is a name of version 0.1; write {INSTEAD[name]}',
        DeprecationWarning,
        stacklevel=4,
    )
    return globals()[name]


def _same(value: Any) -> Any:
    return value


# ---------------------------------------------------------------- operations


class ETraceOp:
    """An operation of an input and a weight."""

    def __init__(self, is_diagonal: bool | None = False, name: str | None = None):
        self.is_diagonal = is_diagonal
        self.name = name

    def xw_to_y(self, x: Any, w: Any) -> Any:
        """The result of the operation."""
        raise NotImplementedError

    def raw_xw_to_y(self, x: Any, w: Any) -> Any:
        """The same."""
        return self.xw_to_y(x, w)

    def __call__(self, x: Any, w: Any) -> Any:
        return self.xw_to_y(x, w)

    def xy_to_dw(self, x: Any, y: Any, w: Any) -> Any:
        """The gradient of the weight, from the input and the gradient of the result."""
        _, pull = jax.vjp(lambda weight: self.xw_to_y(x, weight), w)
        return pull(y)[0]

    def dt_to_t(self, *args: Any) -> Any:
        """Traces follow from the operation itself here."""
        raise NotImplementedError(
            three_parts(
                f'{type(self).__name__}.dt_to_t(...)',
                'traces here follow from the operation, not from a rule of it',
                'learner.get_etrace_of(parameter) for the traces themselves',
            )
        )


class _Masked(ETraceOp):
    """An operation whose weight is masked, and a function of it taken."""

    weight_mask: Any
    weight_fn: Callable
    apply_weight_fn_before_mask = False

    def _weight(self, weight: Any) -> Any:
        masked = lambda w: w if self.weight_mask is None else w * self.weight_mask
        if self.apply_weight_fn_before_mask:
            return masked(self.weight_fn(weight))
        return self.weight_fn(masked(weight))


class MatMulOp(_Masked):
    """``x @ weight + bias`` of a dictionary with these names."""

    def __init__(
        self,
        weight_mask: Any = None,
        weight_fn: Callable = _same,
        apply_weight_fn_before_mask: bool = False,
    ):
        super().__init__(is_diagonal=False)
        self.weight_mask = weight_mask
        self.weight_fn = weight_fn
        self.apply_weight_fn_before_mask = apply_weight_fn_before_mask

    def xw_to_y(self, x: Any, w: Any) -> Any:
        """The product."""
        w = _dictionary(self, w)
        return ops.matmul(x, w['weight'], w.get('bias'), weight_fn=self._weight)


class ConvOp(_Masked):
    """A convolution with ``weight`` and ``bias`` of a dictionary."""

    def __init__(
        self,
        xinfo: jax.ShapeDtypeStruct,
        window_strides: Any,
        padding: Any,
        lhs_dilation: Any = None,
        rhs_dilation: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        dimension_numbers: Any = None,
        weight_mask: Any = None,
        weight_fn: Callable = _same,
    ):
        super().__init__(is_diagonal=False)
        self.xinfo = xinfo
        self.weight_mask = weight_mask
        self.weight_fn = weight_fn
        self.options = {
            'strides': window_strides,
            'padding': padding,
            'lhs_dilation': lhs_dilation,
            'rhs_dilation': rhs_dilation,
            'feature_group_count': feature_group_count,
            'batch_group_count': batch_group_count,
            'dimension_numbers': dimension_numbers,
        }

    def xw_to_y(self, x: Any, w: Any) -> Any:
        """The convolution."""
        w = _dictionary(self, w)
        given = (x, w['weight'], w.get('bias'))
        return ops.conv(*given, kernel_fn=self._weight, **self.options)


class SpMatMulOp(ETraceOp):
    """A product with a sparse matrix, whose entries are ``weight`` of a dictionary."""

    def __init__(self, sparse_mat: Any, weight_fn: Callable = _same):
        super().__init__(is_diagonal=False)
        self.sparse_mat = sparse_mat
        self.weight_fn = weight_fn

    def xw_to_y(self, x: Any, w: Any) -> Any:
        """The product."""
        w = _dictionary(self, w)
        options = {'sparse_mat': self.sparse_mat, 'bias': w.get('bias')}
        return ops.sparse_matmul(x, w['weight'], weight_fn=self.weight_fn, **options)


class LoraOp(ETraceOp):
    """A product with ``B`` and ``A`` of a dictionary, times alpha."""

    def __init__(self, alpha: Any = None):
        super().__init__(is_diagonal=False)
        self.alpha = 1.0 if alpha is None else alpha

    def xw_to_y(self, x: Any, w: Any) -> Any:
        """The product."""
        w = _dictionary(self, w)
        options = {'alpha': self.alpha, 'bias': w.get('bias')}
        return ops.lora_matmul(x, w['B'], w['A'], **options)


class ElemWiseOp(ETraceOp):
    """A function of the weight alone."""

    def __init__(self, fn: Callable = _same):
        super().__init__(is_diagonal=True)
        self.fn = fn

    def xw_to_y(self, x: Any, w: Any) -> Any:
        """The function of the weight."""
        return ops.element_wise(w, weight_fn=self.fn)


def _dictionary(op: ETraceOp, weight: Any) -> dict[str, Any]:
    if not isinstance(weight, dict):
        kind = type(op).__name__
        raise TypeError(
            three_parts(
                f'{kind} with a weight of type {type(weight).__name__}',
                'its weight is a dictionary of arrays',
                "{'weight': array}, with 'bias' if there is one",
            )
        )
    return weight


# ---------------------------------------------------------------- parameters


class _WithOperation:
    """A value with its operation; ``execute(x)`` runs it."""

    value: Any
    op: Any

    def execute(self, x: Any) -> Any:
        """The operation of x and the value."""
        return self.op(x, self.value)


class ETraceParam(_WithOperation, brainstate.ParamState):
    """A parameter with its operation; ``execute(x)`` runs it."""

    def __init__(
        self,
        weight: Any,
        op: ETraceOp | Callable,
        grad: object = None,
        name: str | None = None,
    ):
        super().__init__(weight, name=name)
        self.op = op
        self.gradient = grad
        self.is_etrace = True


class ElemWiseParam(ETraceParam):
    """A parameter used element by element; ``execute()`` gives it."""

    def __init__(
        self, weight: Any, op: ElemWiseOp | Callable = _same, name: str | None = None
    ):
        op = op if isinstance(op, ElemWiseOp) else ElemWiseOp(op)
        super().__init__(weight, op, name=name)

    def execute(self) -> Any:  # type: ignore[override]
        """The operation of the parameter."""
        return self.op(None, self.value)


class NonTempParam(_WithOperation, brainstate.ParamState):
    """A parameter with its operation. It is traced like any other:
    ``trace=lambda path: ...`` of ``compile`` chooses."""

    def __init__(
        self,
        value: Any,
        op: ETraceOp | Callable,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(value, name=name)
        self.op = op
        self.is_etrace = False


class FakeETraceParam(_WithOperation):
    """A value that is no parameter, with an operation."""

    def __init__(self, value: Any, op: ETraceOp | Callable):
        self.value = value
        self.op = op


class FakeElemWiseParam:
    """A value that is no parameter, used element by element."""

    def __init__(
        self, weight: Any, op: ETraceOp | Callable = _same, name: str | None = None
    ):
        self.value = weight
        self.op = op if isinstance(op, ETraceOp) else ElemWiseOp(op)
        self.name = name

    def execute(self) -> Any:
        """The operation of the value."""
        return self.op(None, self.value)
