"""What operations know of several devices: how arrays are split over them.

Programs are global and JAX's partitioner splits them. Loops over samples and kernels
that it cannot see into run on every device for its own samples and neurons
(:meth:`Split.on_each_device`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec


@dataclass(frozen=True)
class Split:
    """Axes of a mesh that samples and neurons are split over; () for none."""

    mesh: AbstractMesh
    batch: tuple[str, ...] = ()
    neurons: tuple[str, ...] = ()

    @property
    def shares(self) -> int:
        """Devices that samples are split over."""
        return self._count(self.batch)

    def by_share(self, terms: jax.Array) -> jax.Array:
        """One term for each share of the samples (n, *w), each held where these samples
        are; w may be split over neurons along its last axis."""
        spec: list[Any] = [self.batch, *(None,) * (terms.ndim - 1)]
        if terms.ndim > 1:
            spec[-1] = self.of_neurons(terms.shape[-1]) or None
        return jax.lax.with_sharding_constraint(terms, PartitionSpec(*spec))

    def of_samples(self, size: int) -> tuple[str, ...]:
        """Axes of the mesh for an axis of samples: none if devices do not divide it."""
        return self._dividing(self.batch, size)

    def of_neurons(self, size: int) -> tuple[str, ...]:
        """The same for an axis of neurons or synapses."""
        return self._dividing(self.neurons, size)

    def _dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        return axes if size and size % self._count(axes) == 0 else ()

    def _count(self, axes: tuple[str, ...]) -> int:
        return int(np.prod([self.mesh.shape[axis] for axis in axes]))

    def on_each_device(
        self, function: Callable[..., Any], given: Any, found: Any
    ) -> Callable[..., Any]:
        """A function that every device runs on its own parts of the arguments.

        ``given``, ``found``: how arguments and results are split, as partition specs.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=found, check_vma=False
        )


_current: ContextVar[Split | None] = ContextVar('split', default=None)


@contextlib.contextmanager
def splitting(split: Split) -> Iterator[None]:
    """Around programs that are traced for a mesh."""
    with jax.sharding.use_abstract_mesh(split.mesh):
        before = _current.set(split)
        try:
            yield
        finally:
            _current.reset(before)


def runs_on_mesh() -> bool:
    """Whether the code that is traced now will be split over devices; not inside of
    :meth:`Split.on_each_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.manual_axes


def current_split() -> Split | None:
    """How arrays of the code that is traced now are split, if they are and it is
    known."""
    return _current.get() if runs_on_mesh() else None


def spec_of(letters: str, axes: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """The partition of an array with one letter for each axis, by the axes of the mesh
    for some of the letters."""
    return PartitionSpec(*(axes.get(letter) or None for letter in letters))


def summed_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over devices along axes of the mesh."""
    return jax.lax.psum(x, axes) if axes else x
