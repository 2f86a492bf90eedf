"""Scripts written for the published package, run on it and on ours.

    make published
    make published ARGS='batched windows'

The published package is installed into an environment of its own and called by its public
interface. Every script runs unchanged on both; the table says where it runs, whether the
losses are the same, and how far the gradient is from BPTT's. What its layers give goes to
tests/data/published.npz, with which the daily tests compare ours.
"""

import json
import os
import pathlib
import subprocess
import sys
from importlib.metadata import version

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PEER = ROOT / '.venv-published'
PUBLISHED = 'braintrace==0.2.6'
SHARED = (
    'jax',
    'jaxlib',
    'numpy',
    'brainstate',
    'braintools',
    'brainevent',
    'brainpy',
    'brainpy.state',
    'numba',
)
"""Packages that both sides have in the same version."""
MARK, END = '<!-- from published/results.md -->', '<!-- end -->'
HEAD = """# The same scripts on both packages

`make published` runs the scripts of `published/scripts` on this package (*here*) and on the
published package 0.2.6, and writes this table. `docs/from-published.md` explains the
columns.

"""
"""What stands around the table in docs/from-published.md."""
EQUAL = 1e-4
"""Losses with a smaller relative difference count as equal."""


def environment():
    """The interpreter of the published package's environment, made if there is none."""
    if given := os.environ.get('PUBLISHED_PYTHON'):
        return given
    wanted = ' '.join([PUBLISHED, *(f'{name}=={version(name)}' for name in SHARED)])
    ready, python = PEER / 'ready', PEER / 'bin' / 'python'
    if not ready.exists() or ready.read_text() != wanted:
        print(f'installing {PUBLISHED} into {PEER.name}', flush=True)
        subprocess.run([sys.executable, '-m', 'venv', '--clear', str(PEER)], check=True)
        install = [str(python), '-m', 'pip', 'install', '--quiet']
        subprocess.run([*install, *wanted.split()], check=True)
        ready.write_text(wanted)
    return str(python)


def run(python, *arguments, ours):
    """Run a file of this folder; its standard output."""
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    env.pop('PYTHONPATH', None)
    if ours:
        env['PYTHONPATH'] = str(ROOT / 'src')
    found = subprocess.run(
        [python, *arguments], env=env, stdout=subprocess.PIPE, text=True, cwd=HERE
    )
    return found.stdout


def results(python, scripts, ours):
    """What every script gave, by name."""
    lines = run(python, str(HERE / 'worker.py'), *scripts, ours=ours).splitlines()
    found = {}
    for line in lines:
        one = json.loads(line)
        found[one.pop('script')] = one
    missing = {'error': 'the process ended'}
    return {name: found.get(name, missing) for name in scripts}


def compared(here, there):
    """Losses of both: equal, or the first ones beside each other."""
    if 'error' in here or 'error' in there:
        return ''
    pairs = list(zip(here['losses'], there['losses'], strict=False))
    differ = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    if max(differ) < EQUAL:
        return 'equal'
    if differ[0] < EQUAL:
        return f'equal at first, then {pairs[-1][0]:.3g} : {pairs[-1][1]:.3g}'
    return f'{pairs[0][0]:.3g} : {pairs[0][1]:.3g}'


def row(name, here, there):
    """One line of the table."""
    error = lambda found: (
        f'{found["error to BPTT"]:.2g}' if 'error to BPTT' in found else ''
    )
    state = lambda found: 'yes' if 'error' not in found else found['error'][:60]
    distances = f'{error(here)} : {error(there)}' if error(here) else ''
    nearer = ''
    if 'error to BPTT' in here and 'error to BPTT' in there:
        a, b = here['error to BPTT'], there['error to BPTT']
        nearer = 'both' if abs(a - b) < 1e-3 * max(a, b, 1e-3) else 'ours'
        nearer = 'published' if nearer == 'ours' and a > b else nearer
    columns = (
        name,
        state(here),
        state(there),
        compared(here, there),
        distances,
        nearer,
    )
    return '| ' + ' | '.join(columns) + ' |'


def write(table):
    """Put the table into its file and into the page of what changes."""
    (HERE / 'results.md').write_text(HEAD + '\n'.join(table) + '\n')
    page = ROOT / 'docs' / 'from-published.md'
    text = page.read_text()
    start = text.index(MARK) + len(MARK)
    end = text.index(END, start)
    page.write_text(text[:start] + '\n' + '\n'.join(table) + '\n' + text[end:])


def main(scripts):
    """Run all, print the table, write the numbers of the layers."""
    every = sorted(
        p.stem for p in (HERE / 'scripts').glob('*.py') if p.stem != 'common'
    )
    scripts = scripts or every
    python = environment()
    print('on the published package ...', flush=True)
    there = results(python, scripts, ours=False)
    print('on ours ...', flush=True)
    here = results(sys.executable, scripts, ours=True)
    table = [
        '| script | runs here | runs on 0.2.6 | losses, here : 0.2.6 | error to BPTT, here : 0.2.6 | nearer to BPTT |',
        '| --- | --- | --- | --- | --- | --- |',
        *(row(name, here[name], there[name]) for name in scripts),
    ]
    print('\n'.join(table))
    if scripts == every:
        write(table)
        numbers = ROOT / 'tests' / 'data' / 'published.npz'
        run(python, str(HERE / 'layers.py'), str(numbers), ours=False)
    failed = [name for name in scripts if 'error' in here[name]]
    print(f'{len(scripts) - len(failed)} of {len(scripts)} run here', *failed)
    sys.exit(bool(failed))


if __name__ == '__main__':
    main(sys.argv[1:])
