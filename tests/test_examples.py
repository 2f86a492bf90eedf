"""Every example runs, small, and learns."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / 'examples'
EXAMPLES = sorted(FOLDER.glob('*.py'))
SMALL = {
    'gru_copy': {'updates': 60, 'units': 24, 'batch': 32, 'lag': 1},
    'evidence': {
        'updates': 25,
        'units': 20,
        'cues': 1,
        'cue': 20,
        'every': 20,
        'delay': 10,
        'recall': 10,
    },
    'brainpy_units': {'updates': 40, 'units': 24, 'batch': 16, 'steps': 30},
    'conv_snn': {'updates': 50, 'side': 5, 'channels': 6, 'steps': 8, 'batch': 16},
    'sparse_ei': {'updates': 40, 'units': 200, 'synapses': 5, 'lr': 0.02},
    'own_neuron': {'updates': 30, 'units': 16, 'batch': 16, 'steps': 40},
    'own_op': {'updates': 60, 'units': 12, 'steps': 20, 'batch': 8},
    'own_rule': {'updates': 60, 'units': 16, 'steps': 100, 'others': ('rflo',)},
    'online_control': {'steps': 2000, 'units': 8},
    'flax_nnx': {'updates': 60},
    'equinox_cell': {'updates': 60},
}
ERRORS = ('own_op', 'own_rule', 'flax_nnx', 'equinox_cell')
"""Those that give an error before and after; the others an accuracy."""


def run(file, **options):
    """What ``main`` of an example gives."""
    spec = importlib.util.spec_from_file_location(f'example_{file.stem}', file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(**options)


@pytest.mark.parametrize('file', EXAMPLES, ids=lambda f: f.stem)
def test_example(file, capsys):
    found = run(file, **SMALL.get(file.stem, {}))
    assert np.all(np.isfinite(np.asarray(found, float)))
    assert capsys.readouterr().out
    if file.stem == 'online_control':
        alone, learned = found
        assert np.all(learned < alone / 2)
    elif file.stem in SMALL:
        before, after = found
        assert after < 0.8 * before if file.stem in ERRORS else after > before + 0.15
