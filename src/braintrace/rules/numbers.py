"""Numbers that a user gives: checked, and made Python's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ArgumentError, three_parts


def _plain(value: Any) -> Any:
    """A number of NumPy or JAX as one of Python's; anything else as it is, but True and
    False as no number."""
    if getattr(value, 'ndim', None) == 0 and not jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        value = value.item()
    return None if isinstance(value, bool) else value


def _refused(name: str, value: Any, why: str, fix: str) -> ArgumentError:
    return ArgumentError(three_parts(f'{name}={value!r}', why, fix))


def set_fields(record: Any, **values: Any) -> None:
    """Write fields of a frozen record while it is made."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def as_decays(name: str, value: Any) -> tuple[float, float]:
    """The decays of both sides, from one, a rank, or a pair."""
    pair = tuple(
        map(_plain, value if isinstance(value, (tuple, list)) else (value, value))
    )
    fits = lambda d: (
        isinstance(d, (int, float)) and (d >= 1 if isinstance(d, int) else 0 <= d < 1)
    )
    if len(pair) != 2 or not all(map(fits, pair)):
        raise _refused(
            name,
            value,
            'a decay lies between 0 and 1, a rank is a whole number from 1',
            f'{name}=0.9, {name}=19, or a pair (x side, f side)',
        )
    x, f = ((d - 1) / (d + 1) if isinstance(d, int) else d for d in pair)
    return x, f


def as_decay(name: str, value: Any) -> float:
    """A decay from 0 to below 1."""
    found = _plain(value)
    if not isinstance(found, (int, float)) or not 0 <= found < 1:
        raise _refused(name, value, 'a decay lies between 0 and 1', f'{name}=0.9')
    return found


def as_positive(name: str, value: Any) -> float:
    """A number that scales."""
    found = _plain(value)
    if not isinstance(found, (int, float)) or not 0 < found < float('inf'):
        raise _refused(name, value, 'it is a scale: positive and finite', f'{name}=0.1')
    return found


def as_count(name: str, value: Any) -> int:
    """A whole number from 1."""
    found = _plain(value)
    if not isinstance(found, int) or found < 1:
        raise _refused(
            name, value, 'it is a count', f'a whole number from 1, as {name}=20'
        )
    return found


def as_seed(name: str, value: Any) -> int:
    """A seed from a whole number or a key of JAX."""
    found = _plain(value)
    if hasattr(found, 'dtype') and jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        found = jax.random.key_data(found)
    if getattr(found, 'dtype', None) == jnp.uint32 and found.size:
        found = int(found.ravel()[-1])
    if not isinstance(found, int):
        raise _refused(
            name,
            value,
            'it is the seed of random numbers',
            f'a whole number, as {name}=0',
        )
    return found
