"""The command: every part as a user calls it, at small size."""

import json
import textwrap

import numpy as np
import pytest

import braintrace
from braintrace.cli import look, main, parser, runs

SMALL = ['--batch', '4', '--units', '6', '--task-option', 'length=2', '--task-option', 'lag=2']
MODEL = """
    import brainstate
    import jax.numpy as jnp

    class Net(brainstate.nn.Module):
        def __init__(self, inputs=3, outputs=2):
            super().__init__()
            self.cell = brainstate.nn.GRUCell(inputs, 5)
            self.readout = brainstate.nn.Linear(5, outputs)

        def update(self, x):
            return self.readout(self.cell(x))

    def make():
        return Net(), jnp.ones((4, 3))

    def needs(size):
        return Net(size)

    def small(inputs, outputs, extra=0):
        return Net(inputs, outputs + extra)

    def nil():
        return None

    net = Net()

    def broken():
        return None.missing
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text(textwrap.dedent(MODEL))
    return tmp_path


def run(capsys, *words):
    """Exit code, what was printed as JSON or text, and what was said meanwhile."""
    code = main(words)
    printed, said = capsys.readouterr()
    return code, json.loads(printed) if '--json' in words and printed else printed, said


def test_training_writes_all_and_goes_on_exactly(here, capsys):
    code, result, said = run(capsys, 'train', 'copying', '--updates', '3', *SMALL, '--json')
    assert code == 0
    assert result['updates'] == 3
    assert 'update 3/3' in said
    assert 'gradients: 4 local, 2 equal to BPTT (report.txt)' in said
    (here / 'out/early/checkpoints').mkdir(parents=True)  # what a training stopped before its first update leaves
    code, again, _ = run(capsys, 'train', 'copying', '--updates', '1', *SMALL, '--out', 'out/early', '--json')
    assert (code, again['updates']) == (0, 1)
    out = here / result['out']
    names = {'config.json', 'metrics.jsonl', 'checkpoints', 'report.txt', 'report.html', 'result.json'}
    names |= {'learning.png', 'activity.png', 'traces.png'}
    assert names <= {p.name for p in out.iterdir()}
    assert json.loads((out / 'config.json').read_text())['task_options'] == {'length': 2, 'lag': 2}
    code, resumed, _ = run(capsys, 'train', '--resume', str(out), '--updates', '5', '--json')
    assert (code, resumed['updates']) == (0, 5)
    code, _, said = run(capsys, 'train', '--resume', str(out), '--json')
    assert (code, 'nothing to train: update 5 is reached' in said) == (0, True)
    run(capsys, 'train', '--resume', str(out), '--updates', '2')
    assert json.loads((out / 'config.json').read_text())['updates'] == 5
    code, _, said = run(capsys, 'train', '--resume', str(out), '--lr', '0.5', '--seed', '2')
    assert (code, '--resume with --lr, --seed' in said) == (2, True)
    learner, supervised, optimizer = runs._prepare(runs.Config(**json.loads((out / 'config.json').read_text())))
    whole = braintrace.fit(learner, **supervised.parts(), optimizer=optimizer, updates=5, show=False)
    losses = [json.loads(line)['loss'] for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert losses == whole['loss'].tolist()
    assert runs._held_out(supervised) == resumed['held_out']
    code, _, said = run(capsys, 'train', 'copying', '--updates', '5', *SMALL, '--out', str(out))
    assert code == 2
    assert 'what to write instead' in said


def test_own_model_and_comparison(here, capsys):
    words = ['--batch', '2', '--task-option', 'length=2', '--task-option', 'lag=1', '--updates', '2']
    code, result, _ = run(
        capsys, 'compare', 'copying', '--model', 'mine.py:Net', '--rules', 'd_rtrl,bptt', *words, '--json'
    )
    assert code == 0
    assert {rule: len(v) for rule, v in result['rules'].items()} == {'d_rtrl': 1, 'bptt': 1}
    assert (here / result['out'] / 'compare.png').stat().st_size > 1000


def test_explaining(here, capsys):
    arguments = parser().parse_args(['explain', 'brainstate.nn:GRUCell(3, 4)', '--input', '2,3'])
    code, text, _ = run(capsys, 'explain', 'mine.py:make', '--steps', '5', '--html', 'page.html')
    assert code == 0
    assert 'readout.weight.weight' in text
    assert 'memory for 5 steps' in text
    assert '</html>' in (here / 'page.html').read_text()
    assert np.array_equal(*(look.compiled(arguments, 'd_rtrl')[0].model.Wh.weight.value['weight'] for _ in range(2)))
    code, text, _ = run(capsys, 'explain', 'mine.py:net', '--input', '2,3')
    assert (code, 'cell.h' in text) == (0, True)
    code, found, _ = run(capsys, 'explain', 'brainstate.nn:GRUCell(3, num_out=4)', '--input', '2,3', '--json')
    assert found['groups'] == [{'states': ['h'], 'positions': [2, 4]}]
    assert {p['name']: p['gradient'] for p in found['parameters']}['Wh.weight.weight'] == 'local'
    words = ['explain', 'brainstate.nn:GRUCell(3, num_out=4)', '--input', '2,3', '--rule', 'pp_prop', '--json']
    code, found, _ = run(capsys, *words)
    assert (code, {p['gradient'] for p in found['parameters']}) == (0, {'approximate'})
    assert found['memory']['bptt'] > 0


def test_checking_and_timing(here, capsys):
    words = ['mine.py:make', '--steps', '6', '--rules', 'd_rtrl,rtrl']
    code, found, _ = run(capsys, 'check', *words, '--plot', 'check.png', '--json')
    assert code == 0
    assert found['RTRL']['cosine'] == pytest.approx(1, abs=1e-5)
    assert found['D_RTRL']['parameters']['readout.weight.weight']['cosine'] == pytest.approx(1, abs=1e-5)
    assert (here / 'check.png').exists()
    code, text, _ = run(capsys, 'bench', 'mine.py:make', '--steps', '5', '--rounds', '2', '--rules', 'd_rtrl')
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()[2:]] == ['forward', 'bptt', 'd_rtrl']


@pytest.mark.parametrize(
    ('words', 'told'),
    [
        (['train', 'nothing'], 'none by this name'),
        (['train'], 'train TASK, or train --resume DIR'),
        (['train', '--resume', 'nowhere'], 'no config.json'),
        (['train', 'copying', '--resume', 'nowhere'], 'both copying and --resume'),
        (['train', 'copying', '--model', 'mine.py:make'], 'numbers of inputs and outputs'),
        (['explain', 'mine.py:needs'], 'needs no more arguments'),
        (['train', 'copying', '--task-option', 'speed=3'], 'options among'),
        (['train', 'copying', '--model', 'nothing'], 'one of'),
        (['train', 'copying', '--rule', 'nothing'], 'd_rtrl'),
        (['train', 'shd', '--task-option', 'file=nowhere.h5', '--batch', '2'], 'no file of SHD'),
        (['explain', 'mine.py'], 'module:name'),
        (['explain', 'mine.py:Net'], '--input 8,3'),
        (['explain', 'mine.py:nothing'], "has no 'nothing'"),
        (['explain', 'nowhere.py:f'], 'no such file'),
        (['explain', 'no_such_module:f'], 'file.py'),
        (['explain', 'mine.py:make(1 +)'], 'cannot be read'),
        (['check', 'mine.py:make', '--rules', 'nothing'], 'd_rtrl'),
        (['bench'], 'make bench'),
        (['train', 'copying', '--task-option', 'lag=-3'], 'not a negative one'),
        (['train', 'copying', '--task-option', 'lag=abc'], 'a number'),
        (['train', 'copying', '--out', 'mine.py'], 'it is a file'),
        (['train', 'copying', '--rule', 'threefactor', *SMALL], 'modulator'),
        (['train', 'copying', '--model', 'mine.py:small', '--units', '3'], 'units=3'),
        (['train', 'copying', '--model', 'mine.py:small(extra=2)'], 'as many outputs as it is told'),
        (['compare', 'copying', '--rules', 'd_rtrl,nothing'], 'no such rule'),
        (['explain', 'mine.py:nil'], 'it gives None'),
        (['explain', 'brainstate.nn:GRUCel(3, 4)'], 'GRUCell'),
        (['explain', 'brainstate.nn:GRUCell(3, foo)'], 'literals in brackets'),
        (['check', 'mine.py:make', '--plot', 'rules.xyz'], '.svg or .pdf'),
    ],
)
def test_what_cannot_work_is_told_in_three_parts(here, capsys, words, told):
    code, _, said = run(capsys, *words)
    assert code == 2
    assert told in said
    assert 'why it cannot work' in said


def test_errors_of_the_users_own_code_are_shown_whole(here):
    with pytest.raises(AttributeError, match='missing'):
        main(['explain', 'mine.py:broken'])


def test_help_and_bad_words(capsys):
    for words, code in [(['--help'], 0), (['--version'], 0), (['nothing'], 2), (['train', 'x', '--batch', '0'], 2)]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == code
    printed, said = capsys.readouterr()
    assert 'braintrace train evidence' in printed
    assert braintrace.__version__ in printed
    assert '0 is less than 1' in said


def test_a_rule_without_traces_in_a_folder_of_its_own(here, capsys):
    (here / 'out' / 'copying').mkdir(parents=True)
    code, result, _ = run(capsys, 'train', 'copying', '--updates', '1', *SMALL, '--json', '--rule', 'bptt')
    assert (code, result['out']) == (0, 'out/copying-2')
    assert not (here / 'out' / 'copying-2' / 'traces.png').exists()
