"""The parameters of a learner as NumPy arrays, by path and by name, and in files of
safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, UnknownParameter, one_of, three_parts
from ..files import replacing
from ..program import Path
from ..program.step import path_name

States = Mapping[Path, brainstate.State]
Weights = dict[Path, Any]
"""The arrays of every parameter by its path: one array, or the structure of the
parameter with arrays in it."""


def selected(
    weights: Any, parameters: Mapping[Path, brainstate.State]
) -> dict[Any, Path]:
    """The paths of the parameters that were asked for, by the keys of their gradients.

    ``weights``: a list of paths or of states, one state, or a mapping of any keys to
    states, as ``learner.param_states``.
    """
    by_state = {id(state): path for path, state in parameters.items()}

    def path_of(x: Any) -> Any:
        if isinstance(x, brainstate.State):
            return by_state.get(id(x), x)
        return tuple(x) if isinstance(x, (tuple, list)) else (x,)

    if isinstance(weights, (brainstate.State, str)):
        weights = [weights]
    if isinstance(weights, Mapping):
        found = {key: path_of(value) for key, value in weights.items()}
    elif isinstance(weights, Sequence):
        found = {path: path for path in map(path_of, weights)}
    else:
        found = weights
    check_paths(
        'weights',
        list(found.values()) if isinstance(found, dict) else found,
        parameters,
    )
    return found


def check_paths(name: str, given: Any, parameters: Mapping[Path, Any]) -> None:
    """Raise unless these are paths of parameters."""
    listed = isinstance(given, (Mapping, list))
    unknown = [path for path in given if path not in parameters] if listed else given
    if isinstance(given, tuple) and any(isinstance(x, Mapping) for x in given):
        raise ArgumentError(
            three_parts(
                f'{name} in a tuple of {len(given)}',
                'etrace_grad(..., return_value=True) and has_aux=True return the '
                'gradients with the losses and other values',
                'the first of them: gradients, loss = learner.etrace_grad(...)',
            )
        )
    if not listed or unknown:
        # The text of a tree would show its arrays.
        is_short = isinstance(unknown, (list, str, int, float))
        shown = repr(unknown) if is_short else f'a {type(unknown).__name__}'
        some = f'some of {", ".join(map(repr, parameters))}'
        raise ArgumentError(
            three_parts(f'{name}={shown}', 'the model has no such parameters', some)
        )


def path_of_parameter(given: Any, parameters: Mapping[Path, brainstate.State]) -> Path:
    """The path of a parameter, from its path, its name or its state."""
    if isinstance(given, brainstate.State):
        found = [path for path, state in parameters.items() if state is given]
        shown = f'a {type(given).__name__}'  # its own text would show its arrays
    else:
        path = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        is_path = all(isinstance(key, (str, int)) for key in path)
        found = [path] if is_path and path in parameters else []
        shown = repr(given)
    if not found:
        raise UnknownParameter(
            three_parts(
                f'the traces of {shown}',
                'the model has no such parameter',
                f'one of {", ".join(map(repr, parameters))}, or its state',
            )
        )
    return found[0]


def read_weights(parameters: States) -> Weights:
    """Copies of all parameters as NumPy arrays."""
    copied = lambda state: jax.tree.map(np.array, state.value)
    return {path: copied(state) for path, state in parameters.items()}


def write_weights(parameters: States, weights: Mapping[Any, Any]) -> None:
    """Set parameters to the arrays given for them; all of them are checked first.

    A key is the path of a parameter, or the name of one of its arrays as in
    :func:`named_arrays`.
    """
    arrays = named_arrays({path: s.value for path, s in parameters.items()})
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            three_parts(
                f'set_weights with a {type(weights).__name__}',
                'arrays are set by the paths or the names of their parameters',
                f'a dictionary: {{{next(iter(arrays), "name")!r}: array}}, or what '
                'learner.weights() gives',
            )
        )
    given = _given_by_name(parameters, weights)
    if notes := _differences(given, arrays):
        unknown = next((name for name in given if name not in arrays), None)
        named = '' if unknown is None else f'; names: {one_of(arrays, unknown)}'
        raise ArgumentError(
            three_parts(
                'set_weights with the weights of another model',
                notes,
                f'the arrays that learner.weights() gives, some or all of them{named}',
            )
        )
    for name, x in given.items():
        _check_cast(name, x, jnp.result_type(arrays[name]))
    for path, state in parameters.items():
        leaves, structure = jax.tree.flatten(state.value)
        names = list(named_arrays({path: state.value}))
        new = [
            jnp.asarray(given[name], jnp.result_type(leaf)) if name in given else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        state.value = jax.tree.unflatten(structure, new)


def named_arrays(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Every array by the name that reports use.

    >>> named_arrays({('out', 'weight'): {'bias': 1, 'weight': 2}, ('gain',): 3})
    {'out.weight.bias': 1, 'out.weight.weight': 2, 'gain': 3}
    """
    found = {}
    for path, value in values.items():
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            found[path_name((*path, *map(_key, keys)))] = leaf
    return found


def _key(entry: Any) -> Any:
    """What leads from a structure to one of its parts: a key, a number or a name."""
    for attribute in ('key', 'idx', 'name'):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _given_by_name(parameters: States, weights: Mapping[Any, Any]) -> dict[str, Any]:
    """The arrays that were given, each by its name."""
    found: dict[str, Any] = {}
    for key, value in weights.items():
        path = key if isinstance(key, tuple) else (key,)
        if path in parameters or isinstance(key, tuple):
            found |= named_arrays({path: value})
        else:
            found[str(key)] = value
    return found


def _differences(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How the arrays that are given differ from those of a model, in words."""
    notes = [f'{name} is no parameter here' for name in given if name not in wanted]
    for name in given.keys() & wanted.keys():
        got, want = np.shape(given[name]), np.shape(wanted[name])
        if got != want:
            notes.append(f'{name} is {got}, not {want}')
    return '; '.join(sorted(notes)[:5])


def _check_cast(name: str, given: Any, dtype: Any) -> None:
    """Raise if the type of a parameter cannot hold the values given for it, but for
    rounding."""
    if getattr(given, 'dtype', None) == dtype:
        return
    values = np.asarray(given)
    kinds = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]
    kind, own = (
        [jnp.issubdtype(x, kind) for kind in kinds] for x in (values.dtype, dtype)
    )
    why = 'that type has other values'
    if any(kind) and kind.index(True) <= own.index(True):
        with np.errstate(over='ignore', invalid='ignore'):
            cast = values.astype(dtype).astype(values.dtype)
        changed = cast != values
        if jnp.issubdtype(values.dtype, jnp.inexact):
            changed = np.isfinite(values) & ~np.isfinite(cast)
        if not np.any(changed):
            return
        where = np.argmax(changed)
        why = f'{values.flat[where]} would become {cast.flat[where]}'
    raise ArgumentError(
        three_parts(
            f'values of {name} of type {values.dtype}',
            f'the parameter is of type {dtype}: {why}',
            f'values that {dtype} can hold',
        )
    )


# ------------------------------------------------------------ safetensors

_OTHER_FORMATS = (
    *('.npz', '.npy', '.pkl', '.pickle', '.pt', '.pth', '.ckpt'),
    *('.h5', '.hdf5', '.json', '.msgpack', '.nir', '.onnx'),
)
"""Endings by which programs know files of other formats."""


def write_safetensors(parameters: States, file: str | FilePath) -> None:
    """Write all parameters to a file, by name."""
    if (suffix := FilePath(file).suffix.lower()) in _OTHER_FORMATS:
        raise ArgumentError(
            three_parts(
                f'save_weights({str(file)!r})',
                f'it writes a file of safetensors, and {suffix} is another format',
                f'{str(FilePath(file).with_suffix(".safetensors"))!r}; for another '
                'format the arrays of learner.weights()',
            )
        )
    safetensors = _safetensors()
    arrays = named_arrays(read_weights(parameters))
    # Not ascontiguousarray, which gives a single number an axis.
    whole = {name: np.asarray(x, order='C') for name, x in arrays.items()}
    with replacing(file) as beside:
        safetensors.save_file(whole, beside, metadata={'format': 'np'})


def read_safetensors(parameters: States, file: str | FilePath) -> None:
    """Set all parameters to the arrays of a file."""
    safetensors = _safetensors()
    try:
        arrays = safetensors.load_file(file)
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError)
        raise (FileNotFoundError if is_missing else ArgumentError)(
            three_parts(
                f'weights from {str(file)!r}',
                f'it cannot be read: {type(error).__name__}: {error}',
                'a file that learner.save_weights wrote',
            )
        ) from error
    wanted = named_arrays({path: s.value for path, s in parameters.items()})
    missing = [f'no {name}' for name in wanted if name not in arrays]
    if notes := _differences(arrays, wanted) or '; '.join(missing[:5]):
        raise ArgumentError(
            three_parts(
                f'weights from {str(file)!r} for this model',
                f'it was written from another: {notes}',
                'the model that the file was written from',
            )
        )
    write_weights(parameters, arrays)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            three_parts(
                'weights in a file of safetensors',
                'the package safetensors is not installed',
                "pip install 'braintrace-online[safetensors]', or learner.weights() "
                'and '
                'numpy.savez',
            )
        ) from error
    return safetensors.numpy
