"""What teaches the traces: the true signal, errors sent back by fixed weights, or a modulator."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from ..analysis.families import TABLE
from ..compat import is_var
from ..errors import CompilationError, three_parts
from .block import Credit, signals_of
from .plan import Components, Plan, Values
from .recursion import Scheme

Taught = tuple[list[Components], list[Components]]
"""Signals to new states and direct reads of old ones, group by group, stacked over the steps of a block."""


def teaching_signals(
    plan: Plan,
    scheme: Scheme,
    const: Values,
    steps: Values,
    found: Credit,
    cotangents: Sequence[jax.Array],
    groups: Set[int],
) -> Taught:
    """The signals that a scheme's traces are read by; ``groups``: those that have any."""
    if scheme.signal == 'symmetric':
        return found.signals, found.reads
    if scheme.signal == 'modulatory':
        value = _standing(plan, const, steps, len(cotangents[0]))
        scale = cotangents[0] if plan.weighted else jnp.ones(len(cotangents[0]))
        return [
            {i: _spread(value, x[0].shape, scale).astype(x.dtype) for i, x in signals.items() if g in groups}
            for g, signals in enumerate(found.signals)
        ], [{} for _ in found.reads]
    weights = _weights_back(plan, scheme, const, steps)

    def one(step: Values, cotangents: list[jax.Array]) -> Taught:
        _, (_, signals, reads) = signals_of(plan, const | step, cotangents, weights)
        return signals, reads

    return jax.vmap(one)(steps, list(cotangents))


def _standing(plan: Plan, const: Values, steps: Values, length: int) -> jax.Array:
    """The learner's own value at each step."""
    (atom,) = plan.standing
    if is_var(atom) and atom in steps:
        return steps[atom]
    value = jnp.asarray(const[atom] if is_var(atom) else atom.val)
    return jnp.broadcast_to(value, (length, *value.shape))


def _spread(value: jax.Array, shape: tuple[int, ...], scale: jax.Array) -> jax.Array:
    """A modulator of every step at all positions: one number, one for each sample, for each neuron, or for both."""
    own = value.shape[1:]
    if len(own) == 1 and len(shape) > 1:
        if own == shape[:1] == shape[-1:]:
            raise _unclear(own, shape)
        own = (*own, *(1,) * (len(shape) - 1)) if own == shape[:1] else own
    if len(own) > len(shape) or any(a not in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False)):
        raise _unclear(own, shape)
    aligned = value.reshape(len(value), *(1,) * (len(shape) - len(own)), *own)
    scale = scale.reshape(-1, *(1,) * len(shape))
    scaled = jnp.where(scale == 0, 0, aligned) * scale  # a masked step may hold anything
    return jnp.broadcast_to(scaled, (len(value), *shape))


def _unclear(got: tuple, shape: tuple) -> CompilationError:
    return CompilationError(
        three_parts(
            f'a modulator of shape {got} for states of shape {shape}',
            'it is neither one number, nor clearly one for each sample, for each neuron, or for both',
            f'shape () or {shape}, or with ones: {(shape[0], *(1,) * (len(shape) - 1))}, {(1, *shape[1:])}; trace=... '
            'keeps the modulator from states whose parameters it does not choose',
        )
    )


def _weights_back(plan: Plan, scheme: Scheme, const: Values, steps: Values) -> dict[int, dict[int, Any]]:
    """Operands that take the weights' place on the way back, by equation: those of the read-outs' products."""
    found: dict[int, dict[int, Any]] = {}
    for i in plan.needed(plan.targets, plan.ends):
        tap, family = plan.taps.get(i), TABLE.get(plan.equations[i].primitive.name)
        if not (tap and tap.data and family and family.kind == 'product'):
            continue
        for k in tap.weights:
            weight = const[tap.equation.invars[k]]
            fixed = scheme.feedback(len(found), weight.shape, weight.dtype)
            if scheme.align is not None:
                left = scheme.align ** _standing(plan, const, steps, 1)[0]
                fixed = (1 - left) * weight + left * fixed
            found.setdefault(i, {})[k] = fixed.astype(weight.dtype)
    if not found:
        raise CompilationError(
            three_parts(
                'feedback by random weights without a read-out',
                'no product with weights lies between the states and the loss, by which errors could be sent back',
                "a read-out, as brainstate.nn.Linear, inside the model or the step_fn; or feedback='symmetric'",
            )
        )
    return found
