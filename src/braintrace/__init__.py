"""Online learning for recurrent and spiking networks, by eligibility traces compiled
from plain models.

Names of the package, JAX and brainstate are loaded when one of the names is first used.
"""

import sys as _sys
import typing as _typing
import warnings as _warnings
from importlib import import_module as _import_module
from importlib import metadata as _metadata
from importlib.util import find_spec as _find_spec

__version__ = '0.3.0'
__version_info__ = (0, 3, 0)


def _warn_of_another_package() -> None:
    """Say so if the published package of the same import name is installed as well."""
    try:
        found = _metadata.version('braintrace')
    except _metadata.PackageNotFoundError:
        return
    # The distribution of this package had that name up to its version 0.1.0.
    if found != '0.1.0':
        _warnings.warn(
            f'the packages braintrace {found} and braintrace-online {__version__} are '
            'both installed and share the folder braintrace: uninstall both, then '
            'install one',
            stacklevel=3,
        )


_warn_of_another_package()

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from .published.first import (
        ConvOp,
        ElemWiseOp,
        ElemWiseParam,
        ETraceOp,
        ETraceParam,
        FakeElemWiseParam,
        FakeETraceParam,
        LoraOp,
        MatMulOp,
        NonTempParam,
        SpMatMulOp,
    )
else:

    def __getattr__(name: str) -> _typing.Any:
        """A part of the package, a public name, or one of the published package."""
        # Python looks up many such names that no module has.
        if name.startswith('__') and name != '__all__':
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        if name != '__all__' and _find_spec(f'{__name__}.{name}'):
            return _outside_traces(name)
        if name.startswith('_') and name != '__all__':
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        return getattr(_load(), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_load().__all__})


class _PublishedModules:
    """Finds the modules of the published package's public names; asked last."""

    @staticmethod
    def find_spec(name: str, path: _typing.Any = None, target: object = None) -> object:
        """How to make a module; None for all others."""
        if not name.startswith((f'{__name__}._', f'{__name__}.nn._')):
            return None
        return _import_module('.published.modules', __name__).spec(name)


_sys.meta_path.append(_PublishedModules)  # type: ignore[arg-type]


def _load() -> _typing.Any:
    """The module of all public names, once; they are names of this one from then on."""
    public = _outside_traces('_public')
    # Names of the published package are found one by one; some of them warn.
    names = getattr(public, '__all__', ())  # none while it is being loaded
    found = {name: public.__dict__.get(name) for name in names}
    globals().update({name: x for name, x in found.items() if x is not None})
    return public


def _outside_traces(name: str) -> _typing.Any:
    """A module of the package.

    The first use may be inside a function that JAX traces, and arrays of modules that
    are imported there must not belong to that trace.
    """
    import jax

    with jax.ensure_compile_time_eval():
        return _import_module(f'.{name}', __name__)
