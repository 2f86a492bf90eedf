"""Small checks as a user of the published package would write them, run by the package of
this environment.

    python published/check.py              # counts, and what fails
    python published/check.py --json out   # every result, by name
"""

import contextlib
import functools
import importlib
import io
import json
import pathlib
import re
import sys
import warnings

FOLDER = pathlib.Path(__file__).parent / 'checks'
sys.path.insert(0, str(FOLDER))


def load():
    """Every check by name; each has a time step of its own."""
    from checking import CHECKS, in_time_steps

    for file in sorted(FOLDER.glob('check_*.py')):
        before, topic = set(CHECKS), file.stem.removeprefix('check_')
        in_time_steps(importlib.import_module, file.stem)
        for name in set(CHECKS) - before:
            check = functools.partial(in_time_steps, CHECKS.pop(name))
            CHECKS[f'{topic}: {name}'] = check
    return CHECKS


def run(only=''):
    """The error of every check by name, None where it passes."""
    found = {}
    for name, check in sorted(load().items()):
        if not re.search(only, name):
            continue
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter('ignore')
                check()
            found[name] = None
        except Exception as error:
            text = str(error).strip().split('\n')
            found[name] = f'{type(error).__name__}: {text[0] if text else ""}'[:160]
    return found


if __name__ == '__main__':
    options = sys.argv[1:]
    file = options[options.index('--json') + 1] if '--json' in options else None
    only = options[0] if options and not options[0].startswith('--') else ''
    found = run(only)
    failed = {name: error for name, error in found.items() if error}
    for name, error in failed.items():
        print(f'{name}: {error}')
    print(f'{len(found) - len(failed)} of {len(found)} pass')
    if file:
        pathlib.Path(file).write_text(json.dumps(found, indent=0))
