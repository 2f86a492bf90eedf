"""The modules in which the published package has its public names.

Code that imports a public name from one of them finds it: ``from
braintrace._algorithm.d_rtrl import D_RTRL``. Everything else in them is private there,
and not here.
"""

from __future__ import annotations

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDERS: dict[str, str] = {
    '_algorithm': '_common axes base d_rtrl dni e_prop graph_executor io_dim_vjp ostl '
    'param_dim_vjp pp_prop random_projection_vjp sequence snap_n three_factor uoro '
    'vjp_base vjp_graph_executor',
    '_compiler': 'canonicalize diagnostics graph hid_param_op hidden_group '
    'hidden_pertubation module_info report',
    '_legacy': '_ops _params',
    '_op': '_primitive _registries conv dense einsum elemwise embedding grouped lora '
    'sparse',
}
"""Its folders and the modules in each."""
FILES = ('_compile', '_grad_exponential', '_input_data', '_misc', '_version')
"""Its modules beside them."""
LAYERS = ('_conv', '_embedding', '_linear', '_readout', '_rnn')
"""Its modules of layers, in ``nn``."""

MODULES = {
    *FOLDERS,
    *(f'{folder}.{name}' for folder in FOLDERS for name in FOLDERS[folder].split()),
    *FILES,
    *(f'nn.{name}' for name in LAYERS),
}


def spec(name: str) -> ModuleSpec | None:
    """How to make a module of this package by its whole name; None if there is none."""
    short = name.partition('.')[2]
    if short not in MODULES:
        return None
    return ModuleSpec(name, _Public(), is_package=short in FOLDERS)


class _Public(Loader):
    """Makes modules that look their names up among the public ones."""

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it its way to find names."""
        package, short = module.__name__.split('.', 1)
        where = f'{package}.nn' if short.startswith('nn.') else package
        vars(module)['__getattr__'] = lambda name: _find(module.__name__, where, name)


def _find(module: str, where: str, name: str) -> Any:
    if spec(f'{module}.{name}'):
        return importlib.import_module(f'{module}.{name}')
    if name.startswith('__') and not name.startswith('__version'):
        raise AttributeError(f'module {module!r} has no attribute {name!r}')
    if '._op' in module:
        primitives = importlib.import_module('.primitives', __package__)
        if name in primitives.REGISTRIES:
            return primitives.REGISTRIES[name]
        if name.removesuffix('_p') in primitives.NAMED:
            return primitives.NAMED[name.removesuffix('_p')]
    try:
        return getattr(importlib.import_module(where), name)
    except AttributeError:
        text = f'{module} has the public names of {where} alone; {name!r} is none'
        raise AttributeError(text) from None
