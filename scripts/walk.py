"""The walk of a first gradient: the functions of the package, in the order in which
they are first entered.

    python scripts/walk.py             counts of functions, files, changes of both
    python scripts/walk.py --files     and the files in the order of the walk
    python scripts/walk.py --all       and every function

A GRU is compiled and one gradient of a sequence is taken. A function counts once, when
it is first entered; a change of file is a function of another file than the one before
it. Functions inside functions and lambdas count as the others; comprehensions do not.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections import Counter
from itertools import groupby, pairwise
from types import FrameType
from typing import Any

import brainstate
import jax.numpy as jnp

import braintrace
import braintrace._public  # importing is no part of the walk

COMPREHENSIONS = ('<genexpr>', '<listcomp>', '<dictcomp>', '<setcomp>', '<module>')
ROOT = pathlib.Path(braintrace.__file__).parent


def walk() -> list[tuple[str, str]]:
    """(file, function) of every function of the package, as they are first entered."""
    seen: dict[Any, tuple[str, str]] = {}

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == 'call' and code not in seen and code.co_name not in COMPREHENSIONS:
            file = pathlib.Path(code.co_filename)
            if file.is_relative_to(ROOT):
                name = getattr(code, 'co_qualname', code.co_name)
                seen[code] = (str(file.relative_to(ROOT)), name)

    inputs, targets = jnp.ones((20, 2, 3)), jnp.zeros((20, 2, 4))
    model = brainstate.nn.GRUCell(3, 4)
    sys.setprofile(enter)
    try:
        learner = braintrace.compile(model, 'd_rtrl', inputs[0], batch_size=2)
        step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        learner.etrace_grad(inputs, targets, step_fn=step_fn)
    finally:
        sys.setprofile(None)
    return list(seen.values())


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--files', action='store_true', help='the files in order')
    parser.add_argument('--all', action='store_true', help='every function in order')
    options = parser.parse_args()
    entered = walk()
    rooms = [(file, list(part)) for file, part in groupby(entered, lambda f: f[0])]
    if options.files or options.all:
        for file, functions in rooms:
            print(f'{file}  ({len(functions)})')
            for _, name in functions if options.all else ():
                print(f'    {name}')
    visits = Counter(file for file, _ in rooms)
    often = [f'{file} {n}' for file, n in visits.most_common() if n > 2]
    folders = [file.partition('/')[0] for file, _ in rooms]
    print(
        f'{len(entered)} functions, {len(visits)} files, '
        f'{len(rooms) - 1} changes of file, '
        f'{sum(a != b for a, b in pairwise(folders))} of folder'
    )
    print(f'entered more than twice: {", ".join(often) or "none"}')


if __name__ == '__main__':
    main()
