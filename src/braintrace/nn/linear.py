"""Dense, grouped, signed, standardised, sparse and low-rank linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from brainstate.nn import init
from brainstate.typing import ArrayLike

from braintrace import ops
from braintrace.errors import three_parts

KAIMING = init.KaimingNormal()
ZERO = init.ZeroInit()


class Linear(brainstate.nn.Linear):
    """``y = x @ (weight * w_mask) + bias`` on the last axis, through `ops.matmul`."""

    def update(self, x: ArrayLike) -> ops.Result:
        params = self.weight.value
        return ops.matmul(
            x, params['weight'], params.get('bias'), weight_fn=times(self.w_mask)
        )


class GroupedLinear(brainstate.nn.Module):
    """One linear map for each group, through `ops.grouped_matmul`.

    Inputs have the shape (..., groups, inputs). `w_init` is called once for each group,
    or is the whole array (groups, inputs, outputs).
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        w_init: Callable | ArrayLike = KAIMING,
        b_init: Callable | ArrayLike | None = ZERO,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        sizes = (num_groups, in_features, out_features)
        if not all(isinstance(n, (int, np.integer)) and n > 0 for n in sizes):
            raise ValueError(
                three_parts(
                    f'GroupedLinear{sizes}',
                    'it has so many groups, and each so many inputs and outputs',
                    'three numbers, such as GroupedLinear(4, 16, 8)',
                )
            )
        self.num_groups = num_groups
        self.in_features, self.out_features = in_features, out_features
        self.in_size = (num_groups, in_features)
        self.out_size = (num_groups, out_features)
        if callable(w_init):
            drawn = [w_init((in_features, out_features)) for _ in range(num_groups)]
            weight = jax.tree.map(lambda *each: jnp.stack(each), *drawn)
        else:
            weight = init.param(w_init, sizes, allow_none=False)
        params: dict[str, Any] = {'weight': weight}
        if b_init is not None:
            params['bias'] = init.param(
                b_init, (num_groups, out_features), allow_none=False
            )
        self.weight = param_type(params)

    def update(self, x: ArrayLike) -> ops.Result:
        params = self.weight.value
        return ops.grouped_matmul(x, params['weight'], params.get('bias'))


class SignedWLinear(brainstate.nn.SignedWLinear):
    """``y = x @ (|weight| * w_sign)``: the signs of the connections are fixed."""

    def update(self, x: ArrayLike) -> ops.Result:
        return ops.matmul(
            x, self.weight.value, weight_fn=lambda w: times(self.w_sign)(abs(w))
        )


class ScaledWSLinear(brainstate.nn.ScaledWSLinear):
    """A linear layer whose weight is standardised over its inputs, with a learned
    gain."""

    def update(self, x: ArrayLike) -> ops.Result:
        params = self.weight.value

        def standardised(weight: Any) -> Any:
            weight = brainstate.nn.weight_standardization(
                weight, self.eps, params.get('gain')
            )
            return times(self.w_mask)(weight)

        return ops.matmul(
            x, params['weight'], params.get('bias'), weight_fn=standardised
        )


class SparseLinear(brainstate.nn.SparseLinear):
    """``y = x @ sparse matrix + bias``; only the stored entries are parameters."""

    def update(self, x: ArrayLike) -> ops.Result:
        params = self.weight.value
        return ops.sparse_matmul(
            x, params['weight'], sparse_mat=self.spar_mat, bias=params.get('bias')
        )


class LoRA(brainstate.nn.LoRA):
    """A low-rank map ``x @ (lora_a @ lora_b) / rank``. If `base_module` is given,
    `base_module(x)` is added."""

    def __call__(self, x: ArrayLike) -> ops.Result:
        if self.base_module is not None and not callable(self.base_module):
            raise ValueError(
                three_parts(
                    f'LoRA(..., base_module={self.base_module!r})',
                    'the low-rank map is added to what this module gives for x',
                    'a layer or a function of x, or None',
                )
            )
        params = self.weight.value
        rank = params['lora_a'].shape[-1]
        y = ops.lora_matmul(x, params['lora_a'], params['lora_b'], alpha=1 / rank)
        return y if self.base_module is None else y + self.base_module(x)

    update = __call__


def times(factor: Any) -> Callable[[Any], Any]:
    """Multiplication by a constant, or nothing at all when it is None."""
    return lambda value: value if factor is None else value * factor
