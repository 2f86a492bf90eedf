"""Run scripts with the package of this environment and print what each gave, as JSON lines.

    python published/worker.py batched windows

A script leaves `losses`, and `gradient` beside `exact`, that of BPTT, where it compares
them.
"""

import contextlib
import io
import json
import pathlib
import runpy
import sys
import time
import warnings

import numpy as np

SCRIPTS = pathlib.Path(__file__).parent / 'scripts'


def flat(tree):
    """All numbers of gradients by path, in the order of the paths."""
    import jax

    leaves = [
        np.ravel(np.asarray(leaf, float))
        for path in sorted(tree, key=str)
        for leaf in jax.tree.leaves(tree[path])
    ]
    return np.concatenate(leaves)


def run(name):
    """What one script gave."""
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            left = runpy.run_path(str(SCRIPTS / f'{name}.py'))
    except Exception as error:
        first = str(error).strip().split('\n')[0]
        return {'error': f'{type(error).__name__}: {first}'[:120]}
    found = {'losses': [float(x) for x in left['losses']]}
    if 'exact' in left:
        exact, gradient = flat(left['exact']), flat(left['gradient'])
        distance = np.linalg.norm(gradient - exact) / np.linalg.norm(exact)
        found['error to BPTT'] = float(distance)
    found['seconds'] = time.perf_counter() - started
    return found


if __name__ == '__main__':
    sys.path.insert(0, str(SCRIPTS))
    for script in sys.argv[1:]:
        print(json.dumps({'script': script, **run(script)}), flush=True)
