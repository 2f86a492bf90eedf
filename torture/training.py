"""A small training that draws noise, and everything that it moves."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.checkpoint import states_of
from braintrace.errors import is_explained
from braintrace.history import History

UPDATES, STEPS, BATCH, INPUTS = 4, 5, 2, 3


class Noisy(brainstate.nn.Module):
    """A recurrent layer with noise from brainstate's generator."""

    def __init__(self, units: int):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(INPUTS, units)
        self.readout = brainstate.nn.Linear(units, 1)

    def update(self, x: jax.Array) -> jax.Array:
        noise = brainstate.random.normal(size=x.shape)
        return self.readout(self.cell(x + 0.1 * noise))


class Failing(Noisy):
    """The same with a call of Python, which raises an error while ``fails``."""

    fails = False

    def update(self, x: jax.Array) -> jax.Array:
        x = jax.pure_callback(self._called, x, x, vmap_method='sequential')
        return super().update(x)

    def _called(self, x: np.ndarray) -> np.ndarray:
        if self.fails:
            raise RuntimeError('a callback failed')
        return np.asarray(x)


class Training:
    """A learner that can be put back to its start, and its training.

    It is always the same one: two processes that make it get the same numbers.
    """

    def __init__(
        self,
        units: int = 4,
        rule: str = 'd_rtrl',
        update_every: int = 1,
        model: type[Noisy] = Noisy,
    ):
        brainstate.random.seed(7)
        example = jnp.zeros((BATCH, INPUTS))
        self.learner = braintrace.compile(model(units), rule, example, batch_size=BATCH)
        self.optimizer = optax.adam(0.02)
        self.update_every = update_every
        self.states = states_of(self.learner, self.optimizer)
        self._start = {name: state.value for name, state in self.states.items()}

    def step_fn(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The loss of a step."""
        return jnp.mean((self.learner(x) - y) ** 2)

    @staticmethod
    def batches(update: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequences of an update."""
        rng = np.random.default_rng(update)
        xs = rng.normal(size=(STEPS, BATCH, INPUTS)).astype('float32')
        return xs, np.cumsum(xs, 0)[..., :1]

    def reset(self) -> None:
        """Everything as it was at the start."""
        for name, state in self.states.items():
            state.value = jax.tree.map(_copy, self._start[name])

    def fit(self, out: Path | None, resume: bool = False, **options: Any) -> History:
        """Train from the start, or from what the folder holds."""
        self.reset()
        given = {'updates': UPDATES, 'save_every': 1, 'show': False, **options}
        return braintrace.fit(
            self.learner,
            self.batches,
            step_fn=self.step_fn,
            optimizer=self.optimizer,
            update_every=self.update_every,
            out=out,
            resume=resume,
            **given,
        )

    def values(self) -> dict[str, list[np.ndarray]]:
        """All that training moves."""
        return {
            name: [_plain(x) for x in jax.tree.leaves(state.value)]
            for name, state in self.states.items()
        }

    @functools.cached_property
    def reference(self) -> tuple[dict[str, list[np.ndarray]], dict[int, float]]:
        """What an uninterrupted training gives: all values, and losses by update."""
        return self.after(UPDATES)

    @functools.cache  # noqa: B019 - lives as long as the process
    def after(self, updates: int) -> tuple[dict, dict[int, float]]:
        """Values and losses after so many updates without interruption."""
        history = self.fit(None, updates=updates)
        return self.values(), losses(history)

    def resume_or_start(self, out: Path, updates: int = UPDATES) -> str:
        """Go on with a folder, or start in it if nothing began there; the result must
        be that of an uninterrupted run, bit for bit."""
        kind = 'resumed'
        try:
            history = self.fit(out, resume=True, updates=updates, save_every=100)
        except FileNotFoundError as error:
            check_explained(error)
            kind = 'started'
            history = self.fit(out, updates=updates, save_every=100)
        values, by_update = self.after_unmoved(updates)
        check_same(self.values(), values)
        assert history.updates == updates
        found = losses(history)
        assert found == {n: by_update[n] for n in found}, (found, by_update)
        return kind

    def after_unmoved(self, updates: int) -> tuple[dict, dict[int, float]]:
        """The reference, with all states left as they are now."""
        now = {name: state.value for name, state in self.states.items()}
        found = self.after(updates)
        for name, state in self.states.items():
            state.value = now[name]
        return found


def losses(history: History) -> dict[int, float]:
    """Losses by update."""
    return {int(record['update']): record['loss'] for record in history.records}


def check_same(found: dict, wanted: dict) -> None:
    """Raise unless all arrays are equal bit for bit."""
    assert found.keys() == wanted.keys()
    for name, arrays in wanted.items():
        for a, b in zip(found[name], arrays, strict=True):
            assert a.dtype == b.dtype, name
            assert a.tobytes() == b.tobytes(), f'{name} differs'


def check_explained(error: Exception) -> None:
    """Raise unless an error is told in three parts."""
    if not is_explained(error):
        raise AssertionError('an error that is not explained') from error


def _plain(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


@functools.cache
def training(units: int = 4, rule: str = 'd_rtrl') -> Training:
    """The training of this process."""
    return Training(units, rule)
