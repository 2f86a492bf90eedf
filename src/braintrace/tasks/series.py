"""Chaotic series that are predicted one step ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import one_of, three_parts
from .trials import Trials


@dataclass(frozen=True)
class Series:
    """Predict the next value of a chaotic series with mean 0 and variance 1.

    Each sample is a different part of the series.
    """

    name: str = 'mackey_glass'
    steps: int = 1000

    inputs: ClassVar[int] = 1
    outputs: ClassVar[int] = 1
    kind: ClassVar[str] = 'values'
    reference: ClassVar[str] = (
        'mean squared error over variance (Mackey-Glass / Lorenz x / Hénon; tanh RNN '
        '64, 8 lanes, Adam 1e-3, updates '
        'at every of 15,000 steps): '
        'SnAp-1 .0050 / .0024 / .0052, RTRL .0180 / .0051 / .0052, RFLO .0572 / '
        '.0442 / .0704, '
        'TBPTT(25) .0080 / .0054 / .0311'
    )

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw stretches."""
        makers = {'mackey_glass': _mackey_glass, 'lorenz': _lorenz, 'henon': _henon}
        if self.name not in makers:
            raise ValueError(
                three_parts(
                    f'name={self.name!r}',
                    'there is no such series',
                    one_of(makers, self.name),
                )
            )
        values = makers[self.name](rng, self.steps + 1, size)
        values = ((values - values.mean(0)) / values.std(0)).astype(np.float32)[
            ..., None
        ]
        return Trials(values[:-1], values[1:], np.ones(self.steps, np.float32))


def _mackey_glass(
    rng: np.random.Generator, steps: int, size: int, tau: int = 17, inner: int = 10
) -> np.ndarray:
    """dx/dt = 0.2 x(t-τ)/(1 + x(t-τ)^10) - 0.1 x, one value a unit of time."""
    lag, dt, skip = tau * inner, 1 / inner, 300
    past = 1.2 + 0.2 * (rng.random((lag, size)) - 0.5)
    x, found = past[-1], []
    for i in range((steps + skip) * inner):
        old = past[i % lag]
        past[i % lag] = x = x + dt * (0.2 * old / (1 + old**10) - 0.1 * x)
        if i % inner == inner - 1:
            found.append(x)
    return np.array(found[skip:])


def _lorenz(
    rng: np.random.Generator, steps: int, size: int, dt: float = 0.01, inner: int = 5
) -> np.ndarray:
    """x of the Lorenz system, one value in 0.05 units of time."""
    state = rng.normal(size=(3, size)) + np.array([[1.0], [1.0], [20.0]])

    def slope(s: np.ndarray) -> np.ndarray:
        x, y, z = s
        return np.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    found = []
    for i in range((steps + 100) * inner):
        a = slope(state)
        b = slope(state + dt / 2 * a)
        c = slope(state + dt / 2 * b)
        state = state + dt / 6 * (a + 2 * b + 2 * c + slope(state + dt * c))
        if i % inner == inner - 1:
            found.append(state[0])
    return np.array(found[100:])


def _henon(rng: np.random.Generator, steps: int, size: int) -> np.ndarray:
    """x' = 1 - 1.4 x² + y, y' = 0.3 x."""
    x, y = 0.1 * rng.random((2, size))
    found = []
    for _ in range(steps + 100):
        x, y = 1 - 1.4 * x**2 + y, 0.3 * x
        found.append(x)
    return np.array(found[100:])
