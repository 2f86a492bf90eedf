"""How an equation is shown to its user: the name of its operation, the user's own line
and the layer of a library."""

from __future__ import annotations

import functools
import linecache
import os
import traceback
from collections.abc import Sequence
from typing import Any

from .compat import Equation, defined_in, frames_of

_TOOLS = ('jax', 'jaxlib', 'numpy', 'saiunit', 'brainunit', 'brainevent')
_MODELS = (
    'brainstate',
    'brainpy',
    'brainpy_state',
    'braintools',
    'flax',
    'equinox',
    'optax',
)
_CONTAINERS = os.path.join('brainstate', 'nn', '_module.py')
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRONTENDS = _HERE + 'frontends'
_STDLIB = os.path.dirname(functools.__file__) + os.sep


def _is_tool(file: str) -> bool:
    """True for files of the standard library and of packages that no model is written
    in."""
    return (
        file.startswith('<frozen')
        or _is_of(file, _TOOLS)
        or (file.startswith(_STDLIB) and '-packages' not in file)
    )


def _is_of(file: str, packages: Sequence[str]) -> bool:
    return '-packages' in file and any(
        f'{os.sep}{name}{os.sep}' in file for name in packages
    )


def _own_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """``file:line`` of the first frame that is the user's, else of the first of a
    library of models."""
    frames = [f for f in frames if not _is_tool(f[0])]
    models = [f for f in frames if _in_library(f[0])]
    own = [f for f in frames if f not in models]
    return next((f'{file}:{line}' for file, line in own + models), None)


_NAMES = {'dot_general': 'matmul', 'conv_general_dilated': 'conv'}


def operation_name(primitive: str) -> str:
    """A primitive under the name that people know it by.

    >>> operation_name('dot_general'), operation_name('add')
    ('matmul', 'add')
    """
    return _NAMES.get(primitive, primitive)


def use_name(primitive: str) -> str:
    """An operation by which a parameter is used.

    >>> use_name('mul'), use_name('dot_general')
    ('scale', 'matmul')
    """
    return 'scale' if primitive == 'mul' else operation_name(primitive)


def described(eqn: Equation) -> str:
    """An operation and the line of the user's that it comes from."""
    return f'{operation_name(eqn.primitive.name)} ({source_text(eqn)})'


def source_line(eqn: Equation) -> str:
    """``file:line`` of the user's own code that made this equation.

    Where no frame is the user's, that of the library the model comes from.
    """
    own, library = _places(eqn)
    return own or library or 'unknown source'


def library_line(eqn: Equation) -> str | None:
    """``file:line`` of the layer of a library that made this equation, where the user's
    own code called one."""
    own, library = _places(eqn)
    return library if own else None


def source_text(eqn: Equation) -> str:
    """The place where an equation was written, shortened: the user's own line, and that
    of the layer it calls."""
    own, library = short_source(source_line(eqn)), library_line(eqn)
    return own if library is None else f'{short_source(library)}, called at {own}'


def _places(eqn: Equation) -> tuple[str | None, str | None]:
    """``file:line`` of the user's innermost frame, and of the layer of a library that
    it called; either may be None."""
    frames = frames_of(eqn)
    first = [i for i, f in enumerate(frames) if f.file_name.startswith(_FRONTENDS)]
    frames = [
        f for f in frames[: min(first, default=None)] if not _is_tool(f.file_name)
    ]
    users = [i for i, f in enumerate(frames) if not _in_library(f.file_name)]
    inside = frames[: users[0]] if users else frames
    # The frame nearest to the user's is the layer's own; those further inside, such as
    # that of a linear map, are the same for many layers.
    layers = [f for f in inside if _is_layer(f)] or ([] if users else inside[:1])
    line = lambda f: f'{f.file_name}:{f.line_num}'
    own = line(frames[users[0]]) if users else None
    return own, line(layers[-1]) if layers else None


def _in_library(file: str) -> bool:
    """Whether a file is of a library of layers, this package's included; its ready-made
    networks are models."""
    if file.startswith(_HERE):
        return not file.startswith(_HERE + 'networks')
    return _is_of(file, _MODELS)


def _is_machinery(file: str) -> bool:
    """Whether a file of this package holds no layers and no models."""
    models = tuple(_HERE + name for name in ('nn', 'networks', 'nir'))
    return file.startswith(_HERE) and not file.startswith(models)


def _is_layer(frame: Any) -> bool:
    """Whether a frame of a library is in the code of a layer."""
    file = frame.file_name
    if frame.function_name.rpartition('.')[2] == '__call__':
        return not _is_of(file, ('brainstate',))  # its modules define update
    if file.endswith(_CONTAINERS):
        return False  # Sequential calls every layer at one line
    if file.startswith(_HERE):
        return file.startswith(_HERE + 'nn')
    whole = _is_of(file, ('brainstate', 'flax', 'equinox'))
    return not whole or f'{os.sep}nn{os.sep}' in file


def short_source(source: str) -> str:
    """A place in a file, shortened: from its package, or from the working folder, if it
    is in one of them."""
    *_, rest = source.rpartition('-packages' + os.sep)
    rest = rest.removeprefix(os.path.dirname(_HERE.rstrip(os.sep)) + os.sep)
    return rest.removeprefix(os.getcwd() + os.sep)


def failing_line(error: BaseException) -> str:
    """The user's own line in which an error arose, to be added to a message; empty if
    none is known."""
    frames = [
        (f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)
    ]
    calls = [i for i, (file, _) in enumerate(frames) if file.startswith(_FRONTENDS)]
    inside = frames[max(calls, default=-1) + 1 :][::-1]
    place = _own_line([f for f in inside if not _is_machinery(f[0])])
    if place is None:
        return ''
    file, _, number = place.rpartition(':')
    code = linecache.getline(file, int(number)).strip()
    return f'\n    at {place}' + (f': {code}' if code else '')


def from_library(jaxpr: Any) -> bool:
    """True for the program of a function that JAX, a library of models or this package
    defines.

    JAX caches these programs with the source line of their first caller.
    """
    file = defined_in(jaxpr)
    return _is_tool(file) or _is_of(file, _MODELS) or file.startswith(_HERE)
