"""One training on several cores, devices and processes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..errors import three_parts

_ADDRESS = 'JAX_COORDINATOR_ADDRESS'


def join(options: argparse.Namespace) -> Mesh | None:
    """Connect to the other processes of a training, if it has some; all devices, with
    samples split over them, or None if there is one."""
    parts = (options.coordinator, options.processes, options.process)
    if options.cores is not None:
        jax.config.update('jax_num_cpu_devices', options.cores)
    if any(part is not None for part in parts) or _ADDRESS in os.environ:
        _check(options, parts)
        jax.distributed.initialize(*parts)
    devices = jax.devices()
    if len(devices) == 1:
        return None
    return Mesh(np.array(devices), ('data',), axis_types=(AxisType.Auto,))


def _check(options: argparse.Namespace, parts: tuple[Any, ...]) -> None:
    names = ('--coordinator', '--processes', '--process')
    missing = [name for name, x in zip(names, parts, strict=True) if x is None]
    if missing and _ADDRESS not in os.environ:
        raise ValueError(
            three_parts(
                f'a training of several processes without {", ".join(missing)}',
                'each process says where the first one is, how many there are and '
                'which one it is',
                '--coordinator host:port --processes 2 --process 0, the same with '
                '--process 1, or the environment variables of jax.distributed',
            )
        )
    if options.resume is None and options.out is None:
        raise ValueError(
            three_parts(
                'a training of several processes without --out',
                'all of them use one folder',
                '--out DIR, where every process can read it',
            )
        )


def leave(code: int) -> None:
    """End now if there are other processes: they may never come to a common end."""
    if jax.process_count() > 1:
        sys.stderr.flush()
        os._exit(code)
