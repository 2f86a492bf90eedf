"""Several devices: how states, traces, weights and inputs are split over a mesh.

The local step keeps positions, so states and traces split over samples and over
neurons and never cross devices. What does: the activity that a recurrent product
reads, errors of the read-out, and weight gradients. Each device sums those of its own
samples over all blocks of a sequence; the sums of all devices are added at the end.

Programs stay those of one device. Arrays that go in are split, what comes out is kept
as it was split, and JAX's partitioner does the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..errors import three_parts
from ..frontends.module_states import module_states
from ..solver import Solver
from ..split import Split, splitting
from .arguments import check_choice

PARTS = ('batch', 'neurons')
"""What may be split, each over an axis of the mesh or several."""


@dataclass(frozen=True)
class Placement:
    """A mesh, and the axes of it that samples and neurons are split over.

    ``batch`` and ``neurons`` are names of axes of the mesh, or None. ``size``: the
    number of samples, None before anything is compiled.
    """

    mesh: Mesh
    batch: Any = None
    neurons: Any = None
    size: int | None = None

    @classmethod
    def of(cls, mesh: Any, shard: Mapping[str, Any] | None) -> Placement | None:
        """The placement for ``compile(mesh=..., shard=...)``."""
        if mesh is None:
            if shard is not None:
                why = 'it names axes of a mesh'
                raise ValueError(three_parts('shard without mesh', why, 'mesh=...'))
            return None
        if isinstance(mesh, str):
            check_choice('mesh', mesh, ('cores',))
            mesh = _mesh_of_cores()
        if not isinstance(mesh, Mesh):
            raise TypeError(
                three_parts(
                    f'mesh={mesh!r}',
                    'devices come in a mesh',
                    "jax.make_mesh((2, 4), ('data', 'model')), or 'cores'",
                )
            )
        names = mesh.axis_names
        if shard is None:
            shard = dict(zip(PARTS, names, strict=False))
        for part, axes in shard.items():
            check_choice('shard', part, PARTS)
            for axis in _names(axes):
                if axis not in names:
                    raise ValueError(
                        three_parts(
                            f'shard={dict(shard)!r}',
                            f'the mesh has no axis {axis!r}',
                            f'one of {", ".join(map(repr, names))}',
                        )
                    )
        return cls(_automatic(mesh), **shard)

    @classmethod
    def of_inputs(cls, inputs: Any, axis: int) -> Placement | None:
        """As inputs are split already, with samples at ``axis``; None if none is."""
        for x in jax.tree.leaves(inputs):
            found = getattr(x, 'sharding', None)
            if isinstance(found, NamedSharding) and len(found.device_set) > 1:
                spec = (*found.spec, *(None,) * jnp.ndim(x))
                mesh: Any = found.mesh
                return cls(_automatic(mesh), batch=spec[axis])
        return None

    def with_size(self, size: int | None) -> Placement:
        """The same for a number of samples."""
        if self.batch is not None:
            count = self.count(self.batch)
            if size is None:
                raise ValueError(
                    three_parts(
                        f'samples split over the mesh axis {self.batch!r}',
                        'the states of this model have no first axis of samples',
                        "compile with batch_size=..., or shard={'neurons': ...}",
                    )
                )
            if size % count:
                raise ValueError(
                    three_parts(
                        f'a batch of {size} on {count} devices',
                        'every device takes the same number of samples',
                        f'a batch size that {count} divides',
                    )
                )
        return Placement(self.mesh, self.batch, self.neurons, size)

    @property
    def device_count(self) -> int:
        """Devices that samples and neurons are split over."""
        return self.count(self.batch) * self.count(self.neurons)

    def count(self, axes: Any) -> int:
        """Devices along an axis of the mesh, or several; 1 for None."""
        return int(np.prod([self.mesh.shape[axis] for axis in _names(axes)]))

    def sharding(
        self, shape: Sequence[int], samples: int | None = None
    ) -> NamedSharding:
        """How an array is split: along its axis of samples and along its last other
        axis, if the devices divide it. ``samples``: that axis, -1 for none as weights
        have it; None for states, which have samples first."""
        spec: list[Any] = [None] * len(shape)
        at = self._sample_axis(shape) if samples is None else samples
        if at >= 0 and shape[at] % self.count(self.batch) == 0:
            spec[at] = self.batch
        others = [axis for axis in range(len(shape)) if axis != at]
        if others and self.neurons is not None and shape[others[-1]]:
            whole = shape[others[-1]] % self.count(self.neurons) == 0
            spec[others[-1]] = self.neurons if whole else None
        return self._named(spec)

    def _sample_axis(self, shape: Sequence[int]) -> int:
        """The axis of samples of a state or an influence, -1 for none: the first, also
        if it counts places of all samples; or the second of neurons and samples."""
        if not self.size or not shape:
            return -1
        if shape[0] == self.size:
            return 0
        if len(shape) == 2 and shape[1] == self.size:
            return 1
        return 0 if shape[0] and shape[0] % self.size == 0 else -1

    def _named(self, spec: list[Any]) -> NamedSharding:
        # As JAX writes it for results; another spelling would be another program.
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _of_samples(self, shape: Sequence[int], axis: int) -> NamedSharding:
        """How inputs are split: along their axis of samples only."""
        spec: list[Any] = [None] * len(shape)
        if len(shape) > axis and shape[axis] == self.size:
            spec[axis] = self.batch
        return self._named(spec)

    def put(self, tree: Any, axes: Any = None) -> Any:
        """Arrays on the devices they belong to; ``axes``: as :meth:`shardings` says."""
        return jax.tree.map(_put, tree, self.shardings(tree, axes))

    def shardings(self, tree: Any, axes: Any = None) -> Any:
        """How all arrays of a tree are split. ``axes``: the axis of samples of each, as a
        tree; or -1 if none has any; None for states, which have samples first."""
        if axes is None or axes == -1:
            return jax.tree.map(lambda x: self.sharding(jnp.shape(x), axes), tree)
        return jax.tree.map(lambda x, at: self.sharding(jnp.shape(x), at), tree, axes)

    def put_inputs(self, tree: Any, axis: int) -> Any:
        """Inputs of a step or of a sequence, with samples at ``axis``. Where several
        processes share the mesh, each brings its own samples."""

        def one(x: Any) -> Any:
            shape = list(jnp.shape(x))
            if self._is_share(x) and len(shape) > axis and self.size:
                own = len(range(*self.own_samples.indices(self.size)))
                if shape[axis] == own:
                    shape[axis] = self.size
                    sharding = self._of_samples(shape, axis)
                    make = jax.make_array_from_process_local_data
                    return make(sharding, np.asarray(x), tuple(shape))
                self._check_share(shape[axis], own)
            return _put(x, self._of_samples(shape, axis))

        return jax.tree.map(one, tree)

    @property
    def has_other_processes(self) -> bool:
        """Whether some devices of the mesh belong to other processes."""
        here = jax.process_index()
        return any(d.process_index != here for d in self.mesh.devices.flat)

    def _is_share(self, x: Any) -> bool:
        """Whether inputs are those of this process only."""
        if isinstance(x, jax.core.Tracer) or not self.has_other_processes:
            return False
        return getattr(x, 'is_fully_addressable', True)

    @property
    def own_samples(self) -> slice:
        """The samples on the devices of this process."""
        if not self.size or not self.has_other_processes:
            return slice(None)
        shape = (self.size,)
        places = self._of_samples(shape, 0).addressable_devices_indices_map(shape)
        length = self.size // self.count(self.batch)
        starts = sorted({at[0].start or 0 for at in places.values() if at})
        return slice(starts[0], starts[-1] + length)

    def _check_share(self, given: int, own: int) -> None:
        if given == self.size:
            raise ValueError(
                three_parts(
                    f'inputs of {given} samples in each of several processes',
                    f'together they have {self.size}, and each brings its own',
                    f'the {own} samples of this process (jax.process_index())',
                )
            )

    def split(self, tree: Any, axes: Any = None) -> Any:
        """Shapes of arrays with how they are split."""
        return jax.tree.map(_with_sharding, tree, self.shardings(tree, axes))

    def split_inputs(self, tree: Any, axis: int) -> Any:
        """Shapes of inputs with how they are split, samples at ``axis``."""
        one = lambda x: _with_sharding(x, self._of_samples(x.shape, axis))
        return jax.tree.map(one, tree)

    def present(self, x: Any) -> NamedSharding:
        """How an array is split now; one that is not is held by every device."""
        found = getattr(x, 'sharding', None)
        if isinstance(found, NamedSharding) and found.mesh == self.mesh:
            return found
        return NamedSharding(self.mesh, PartitionSpec())

    def pin(self, tree: Any, axes: Any = None) -> Any:
        """States or traces inside a program: split as they are outside of it."""
        hold = jax.lax.with_sharding_constraint
        return jax.tree.map(hold, tree, self.shardings(tree, axes))

    def everywhere(self, tree: Any) -> Any:
        """Values inside a program of which every device has all."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        hold = jax.lax.with_sharding_constraint
        return jax.tree.map(lambda x: hold(x, whole), tree)

    def put_states(self, model: brainstate.nn.Module) -> None:
        """All states of a model on the devices they belong to."""
        for state in module_states(model).values():
            is_weight = isinstance(state, brainstate.ParamState)
            state.value = self.put(state.value, -1 if is_weight else None)

    def active(self) -> contextlib.AbstractContextManager:
        """Around programs: they are traced for this mesh."""
        mesh = self.mesh.abstract_mesh
        return splitting(Split(mesh, _names(self.batch), _names(self.neurons)))


def on_mesh(placement: Placement | None) -> contextlib.AbstractContextManager:
    """Around programs, which are traced for the mesh if there is one."""
    return contextlib.nullcontext() if placement is None else placement.active()


def pinned(placement: Placement | None, tree: Any, axes: Any = None) -> Any:
    """States or traces inside a program, split as they are outside of it."""
    return tree if placement is None else placement.pin(tree, axes)


def trace_axes(solver: Solver) -> Any:
    """The axis of samples of each array of all traces; None for an influence."""
    return None if solver.traces is None else solver.traces.sample_axes


def _names(axes: Any) -> tuple:
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _with_sharding(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _put(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    if getattr(x, 'sharding', None) == sharding:
        return x
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return x
    if sharding.is_fully_addressable or not getattr(x, 'is_fully_addressable', True):
        return jax.device_put(x, sharding)
    # Every process knows all of it and keeps its own part.
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def _automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes that JAX splits programs over by itself."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _mesh_of_cores() -> Mesh:
    devices = jax.devices('cpu')
    if len(devices) < 2:
        raise ValueError(
            three_parts(
                "mesh='cores' with one CPU device",
                'JAX sees all cores as one device',
                "jax.config.update('jax_num_cpu_devices', 2) before anything else is "
                'computed, or JAX_NUM_CPU_DEVICES=2 in the environment',
            )
        )
    return Mesh(np.array(devices), ('data',), axis_types=(AxisType.Auto,))
