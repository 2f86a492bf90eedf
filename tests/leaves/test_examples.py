"""Every example runs, small, and learns."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / 'examples'
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
    't_maze': {'delay': 3, 'episodes': 400, 'units': 16, 'lr': 3e-3},
    'delayed_reward': {'trials': 300, 'delay': 5},
    'certificate': {'updates': 60, 'units': 16, 'steps': 60, 'long': 300},
    'flax_nnx': {'updates': 60},
    'equinox_cell': {'updates': 60},
    'connectome': {'neurons': 600, 'synapses': 9000, 'updates': 40},
}
ERRORS = (
    'own_op',
    'own_rule',
    'certificate',
    'flax_nnx',
    'equinox_cell',
    'connectome',
)
"""Those that give an error before and after; the others an accuracy."""


def loaded(file):
    spec = importlib.util.spec_from_file_location(f'example_{file.stem}', file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(file, **options):
    """What ``main`` of an example gives."""
    return loaded(file).main(**options)


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


def test_the_t_maze_needs_memory():
    maze = loaded(FOLDER / 't_maze.py')
    env = maze.TMaze(delay=4)

    def walk(turn, seed):
        first, _ = env.reset(seed=seed)
        seen, rewards = [], []
        for _ in range(4):
            x, reward, terminated, truncated, _ = env.step(maze.RIGHT)
            assert not terminated
            assert not truncated
            seen.append(x)
            rewards.append(reward)
        *_, reward, terminated, _, info = env.step(turn(first))
        assert terminated
        return first, np.array(seen), [*rewards, reward], info['success']

    by_cue = lambda x: maze.UP if x[0] else maze.DOWN
    walks = [walk(by_cue, seed) for seed in range(20)]
    assert all(success for *_, success in walks)
    assert {rewards[-1] for _, _, rewards, _ in walks} == {4.0}
    always_up = [walk(lambda x: maze.UP, seed)[3] for seed in range(20)]
    assert 0 < sum(always_up) < 20
    # After the first step both sides look the same, and a seed gives the same maze.
    assert all(np.array_equal(seen, walks[0][1]) for _, seen, _, _ in walks)
    assert np.array_equal(walk(by_cue, 3)[0], walks[3][0])


def test_the_t_maze_ends_and_charges_for_standing_still():
    maze = loaded(FOLDER / 't_maze.py')
    env = maze.TMaze(delay=4)
    env.reset(seed=0)
    steps = [env.step(maze.UP) for _ in range(3 * 4 + 10)]
    assert all(step[1] == -0.1 for step in steps)
    assert [step[3] for step in steps] == [False] * 21 + [True]
    assert steps[-1][4] == {'success': False}


def test_a_connectome_from_a_file(tmp_path):
    """Lines of a file are the synapses, whatever the names of neurons are."""
    connectome = loaded(FOLDER / 'connectome.py')
    file = tmp_path / 'edges.csv'
    first, second, third = 720575940600000001, 720575940600000003, 17
    file.write_text(
        f'pre,post,count\n{second},{third},5\n{first},{second},-2\n{first},{third},-1\n'
    )
    edges = connectome.load(str(file))
    # By name: 17, ...01, ...03.
    np.testing.assert_array_equal(edges.pre, [1, 1, 2])
    np.testing.assert_array_equal(edges.post, [0, 2, 0])
    np.testing.assert_array_equal(edges.strength, [1, 2, 5])
    np.testing.assert_array_equal(edges.signs, [1, -1, 1])
    net = connectome.Connectome(connectome.synthetic(50, 400), inputs=4, regions=2)
    np.testing.assert_array_equal(np.diff(net.starts).sum(), 400)
