"""Conversion between graphs of the package ``nir`` and models."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import brainstate
import numpy as np

from ..errors import one_of, three_parts
from ..files import replacing
from ..networks import fire
from .model import Model, Wiring
from .neurons import DELAY_BYTES, IF, LI, LIF, CubaLI, CubaLIF, Delay, I
from .nodes import (
    Affine,
    AvgPool2d,
    Conv1d,
    Conv2d,
    Flatten,
    Linear,
    Node,
    Scale,
    SumPool2d,
    Surrogate,
    Threshold,
    as_time_step,
)

NODES: dict[str, type[Node]] = {
    kind.__name__: kind
    for kind in (
        Affine,
        Linear,
        Scale,
        Conv1d,
        Conv2d,
        SumPool2d,
        AvgPool2d,
        Flatten,
        Threshold,
        I,
        IF,
        LI,
        LIF,
        CubaLI,
        CubaLIF,
        Delay,
    )
}
"""Nodes by the names of the specification."""

WEIGHTS = ('weight', 'bias', 'scale')
"""What is trained by default."""


def read(
    source: Any,
    dt: float | None = None,
    *,
    train: Collection[str] = WEIGHTS,
    surrogate: Surrogate = fire,
    dtype: Any = None,
    max_delay_bytes: float = DELAY_BYTES,
) -> Model:
    """Read a model of one time step from a NIR file, or from a graph of the package
    ``nir``.

    ``dt``: the time step, in the unit of the time constants and delays of the graph
    (seconds in the specification). A file that :func:`write` wrote contains it, so it
    may be omitted. ``train``: names of the arrays that are parameters
    (:class:`brainstate.ParamState`), e.g. ``('weight', 'tau')``. All others are
    constants. ``surrogate``: a step function of (v - threshold) / |threshold| with its
    own derivative. ``dtype``: the type of parameters and states.
    ``max_delay_bytes``: a node whose past inputs need more memory than this for one
    sample is an error.

    The equations are solved exactly, with an input that is constant during a step. A
    spike resets the potential to v_reset. Potentials start at zero.
    """
    if isinstance(source, (str, os.PathLike)):
        nir = _package()
        if not Path(source).exists():
            raise FileNotFoundError(
                three_parts(
                    f'nir.read({str(source)!r})',
                    'there is no such file',
                    'the path of a NIR file, or a graph of the package nir',
                )
            )
        source = _read_graph(nir, source)
    return from_graph(
        source,
        dt,
        train=train,
        surrogate=surrogate,
        dtype=dtype,
        max_delay_bytes=max_delay_bytes,
    )


def _read_graph(nir: Any, file: Any) -> Any:
    """The graph in a file."""
    try:
        # Its check of shapes refuses some graphs that are right: older ones, and
        # kernels that are not square.
        with contextlib.suppress(ValueError):
            return nir.read(file)
        return nir.read(file, type_check=False)
    except Exception as error:
        raise ValueError(
            three_parts(
                f'nir.read({str(file)!r})',
                f'it cannot be read: {type(error).__name__}: {error}',
                'a file that nir.write made',
            )
        ) from error


def from_graph(
    graph: Any,
    dt: float | None = None,
    *,
    train: Collection[str] = WEIGHTS,
    surrogate: Surrogate = fire,
    dtype: Any = None,
    max_delay_bytes: float = DELAY_BYTES,
) -> Model:
    """The same as :func:`read`, from a graph of the package ``nir``."""
    nodes, edges = (getattr(graph, name, None) for name in ('nodes', 'edges'))
    if not (isinstance(nodes, Mapping) and isinstance(edges, Iterable)):
        raise TypeError(
            three_parts(
                f'nir.read of a {type(graph).__name__}',
                'it has no nodes and edges',
                'the path of a NIR file, or a graph of the package nir',
            )
        )
    dt = _time_step(graph, dt)
    trainable = [kind for kind in NODES.values() if kind is not Delay]
    known = {name for kind in trainable for name in kind.arrays}
    if isinstance(train, str) or not isinstance(train, Collection):
        raise TypeError(
            three_parts(
                f'train={train!r}',
                'it names the arrays that are parameters',
                "a tuple of names: train=('weight', 'bias')",
            )
        )
    if not set(train) <= known:
        raise ValueError(
            three_parts(
                f'train={tuple(train)}',
                f'nodes have no {", ".join(sorted(set(train) - known))} to train',
                f'names among {", ".join(sorted(known))}',
            )
        )
    wiring, parts = Wiring(), {}
    options = {'dt': dt, 'train': train, 'surrogate': surrogate, 'dtype': dtype}
    for name, node in _flat(graph, '', wiring).items():
        kind = NODES[type(node).__name__]
        fields = {n: getattr(node, n) for n in (*kind.arrays, *kind.settings)}
        if kind is Delay:
            fields['max_bytes'] = max_delay_bytes
        parts[name] = kind(**options, **fields)
    return Model(wiring, parts, dt)


def _time_step(graph: Any, dt: float | None) -> float:
    metadata = getattr(graph, 'metadata', None) or {}
    dt = metadata.get('dt') if dt is None else dt
    if dt is None:
        raise ValueError(
            three_parts(
                f'nir.read(..., dt={dt})',
                'a step model needs a time step, and the graph does not name one',
                'dt=1e-3, or another, in the unit of its time constants (seconds)',
            )
        )
    return as_time_step(dt)


def _flat(
    graph: Any, name: str, wiring: Wiring, within: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """The nodes of a graph and of those inside, by name; the rest goes to the wiring.

    ``within``: the graphs that it is inside of.
    """
    shown = f'a graph {name!r}' if name else 'a graph'
    if any(graph is outer for outer in within):
        raise ValueError(
            three_parts(
                f'{shown} that contains itself',
                'its step would need the result of the same step',
                'an edge that leads back: it passes on the value of the step before',
            )
        )
    found: dict[str, Any] = {}
    edges = [tuple(map(str, edge)) for edge in graph.edges]
    nodes = {str(own): node for own, node in graph.nodes.items()}
    for edge in edges:
        missing = [end for end in edge if end not in nodes]
        if missing or len(edge) != 2:
            raise ValueError(
                three_parts(
                    f'{shown} with an edge {edge}',
                    f'it has no node {missing[0]!r}'
                    if missing
                    else 'an edge leads from one node to another',
                    f'two of its nodes: {one_of(nodes, *missing[:1])}',
                )
            )
    wiring.graphs[name] = [(a, b) for a, b in edges]
    wiring.metadata[name] = dict(graph.metadata or {})
    for own, node in nodes.items():
        full = f'{name}/{own}' if name else own
        kind = type(node).__name__
        if kind == 'NIRGraph':
            found |= _flat(node, full, wiring, (*within, graph))
            continue
        if kind not in ('Input', 'Output', *NODES):
            raise ValueError(
                three_parts(
                    f'a node {full!r} of kind {kind}',
                    'there is no module for this kind',
                    f'nodes among {", ".join(NODES)}',
                )
            )
        wiring.kinds[full] = kind
        wiring.metadata[full] = dict(node.metadata or {})
        if kind in ('Input', 'Output'):
            (shape,) = node.output_type.values()
            wiring.shapes[full] = tuple(int(n) for n in shape)
        if kind not in ('Input', 'Output'):
            found[full] = node
    return found


# ------------------------------------------------------------ models as graphs


def write(path: str | os.PathLike, model: brainstate.nn.Module) -> None:
    """Write a model to a NIR file: a model that :func:`read` returned, or a chain of
    layers.

    Arrays are written with their current values. A chain is a
    :class:`brainstate.nn.Sequential` of linear layers and nodes of this module. The
    time step is stored in the metadata of the file.
    """
    if isinstance(path, brainstate.nn.Module):
        raise TypeError(
            three_parts(
                'nir.write(model, path)',
                'the path comes first, as in nir.write(path, graph)',
                'nir.write(path, model)',
            )
        )
    if hasattr(model, 'param_states'):
        raise TypeError(
            three_parts(
                f'nir.write of a {type(model).__name__} learner',
                'a file holds a model, without its rule and its traces',
                'nir.write(path, learner.model)',
            )
        )
    nir = _package()
    graph = to_graph(model)
    with replacing(Path(path)) as beside:
        nir.write(beside, graph)


def to_graph(model: brainstate.nn.Module) -> Any:
    """The graph of the package ``nir`` that :func:`write` writes."""
    nir = _package()
    if isinstance(model, Model):
        return _graph(nir, model, '')
    nodes = _chain(nir, model)
    times = {layer.dt for layer in _layers(model) if isinstance(layer, Node)}
    if len(times) > 1:
        raise ValueError(
            three_parts(
                f'a chain of nodes with time steps {sorted(times)}',
                'a file has one time step',
                'the same dt in all nodes',
            )
        )
    graph = nir.NIRGraph.from_list(*nodes)
    if times:
        graph.metadata = {'dt': times.pop()}
    return graph


def _graph(nir: Any, model: Model, name: str) -> Any:
    """A graph, with those inside."""
    wiring, nodes = model.wiring, {}
    inside = [n for n in (*wiring.kinds, *wiring.graphs) if n]
    for full in inside:
        graph, _, own = full.rpartition('/')
        if graph == name:
            nodes[own] = _node(nir, model, full)
    metadata = dict(wiring.metadata.get(name, {}))
    if not name:
        metadata['dt'] = model.dt
    edges = list(wiring.graphs[name])
    return nir.NIRGraph(nodes, edges, metadata=metadata, type_check=False)


def _node(nir: Any, model: Model, name: str) -> Any:
    if name in model.wiring.graphs:
        return _graph(nir, model, name)
    kind = model.wiring.kinds[name]
    if kind in ('Input', 'Output'):
        shape = np.array(model.wiring.shapes[name])
        made = getattr(nir, kind)(shape)
    else:
        made = getattr(nir, kind)(**model.parts[name].fields())
    made.metadata = dict(model.wiring.metadata.get(name, {}))
    return made


def _layers(model: Any) -> list[Any]:
    """The layers of a chain, of chains inside too."""
    if isinstance(model, brainstate.nn.Sequential):
        return [layer for part in model.layers for layer in _layers(part)]
    return [model]


def _chain(nir: Any, model: Any) -> list[Any]:
    return [_layer(nir, layer) for layer in _layers(model)]


def _layer(nir: Any, layer: Any) -> Any:
    """A node of a layer."""
    if isinstance(layer, Node):
        return getattr(nir, type(layer).__name__)(**layer.fields())
    is_plain = getattr(layer, 'w_mask', None) is None
    if isinstance(layer, brainstate.nn.Linear) and is_plain:
        return _linear(nir, layer.weight.value)
    raise ValueError(
        three_parts(
            f'nir.write of a {type(layer).__name__}',
            'it is not known how to say this layer in NIR',
            'a model of nir.read, or a brainstate.nn.Sequential of '
            'brainstate.nn.Linear '
            f'and of nodes: nir.{", nir.".join(NODES)}',
        )
    )


def _linear(nir: Any, params: Mapping[str, Any]) -> Any:
    weight = np.asarray(params['weight']).T
    if params.get('bias') is None:
        return nir.Linear(weight=weight)
    return nir.Affine(weight=weight, bias=np.asarray(params['bias']))


def _package() -> Any:
    try:
        import nir
    except ImportError as error:
        raise ImportError(
            three_parts(
                'a file of NIR',
                'the package nir is not installed',
                "pip install 'braintrace-online[nir]'",
            )
        ) from error
    return nir
