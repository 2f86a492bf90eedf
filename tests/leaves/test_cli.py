"""The command: every part as a user calls it, at small size."""

import io
import json
import shutil
import textwrap
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest

import braintrace
from braintrace.checkpoint import Checkpoints
from braintrace.cli import look, main, parser, runs, settings
from braintrace.files import alone_in

SMALL = [
    '--batch',
    '4',
    '--units',
    '6',
    '--task-option',
    'length=2',
    '--task-option',
    'lag=2',
]
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

    def named():
        net = Net()
        setattr(net, 'bad\\x1b[31m\\nname', net.__dict__.pop('cell'))
        net.update = lambda x: net.readout(getattr(net, 'bad\\x1b[31m\\nname')(x))
        return net, jnp.ones((4, 3))

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
    code, result, said = run(
        capsys, 'train', 'copying', '--updates', '3', *SMALL, '--json'
    )
    assert code == 0
    assert result['updates'] == 3
    assert 'update 3/3' in said
    assert 'gradients: 4 local, 2 equal to BPTT (report.txt)' in said
    (here / 'out/early/checkpoints').mkdir(
        parents=True
    )  # what a training stopped before its first update leaves
    code, again, _ = run(
        capsys,
        'train',
        'copying',
        '--updates',
        '1',
        *SMALL,
        '--out',
        'out/early',
        '--json',
    )
    assert (code, again['updates']) == (0, 1)
    out = here / result['out']
    names = {
        'config.json',
        'metrics.jsonl',
        'checkpoints',
        'report.txt',
        'report.html',
        'result.json',
    }
    names |= {'overview.png', 'overview-dark.png'}
    names |= {'learning.png', 'activity.png', 'traces.png'}
    assert names <= {p.name for p in out.iterdir()}
    assert json.loads((out / 'config.json').read_text())['task_options'] == {
        'length': 2,
        'lag': 2,
    }
    code, resumed, _ = run(
        capsys, 'train', '--resume', str(out), '--updates', '5', '--json'
    )
    assert (code, resumed['updates']) == (0, 5)
    code, _, said = run(capsys, 'train', '--resume', str(out), '--json')
    assert (code, 'nothing to train: update 5 is reached' in said) == (0, True)
    run(capsys, 'train', '--resume', str(out), '--updates', '2')
    assert json.loads((out / 'config.json').read_text())['updates'] == 5
    code, _, said = run(
        capsys,
        'train',
        '--resume',
        str(out),
        '--lr',
        '0.5',
        '--seed',
        '2',
        '--batch',
        '4',
    )
    assert (code, '--resume with --lr, --seed\n' in said) == (2, True)
    learner, supervised, optimizer = runs._prepare(settings.read(out))
    whole = braintrace.fit(
        learner, **supervised.parts(), optimizer=optimizer, updates=5, show=False
    )
    losses = [
        json.loads(line)['loss']
        for line in (out / 'metrics.jsonl').read_text().splitlines()
    ]
    assert losses == whole['loss'].tolist()
    assert runs._held_out(supervised) == resumed['held_out']
    code, _, said = run(
        capsys, 'train', 'copying', '--updates', '5', *SMALL, '--out', str(out)
    )
    assert code == 2
    assert 'Fix: ' in said


def test_the_main_job_has_the_credit_of_its_readout():
    config = lambda *words: runs._config(
        parser().parse_args(['train', 'evidence', *words])
    )
    assert config().rule_options == {'reach': 'readout'}
    assert config('--rule', 'pp_prop').rule_options == {}
    assert config('--model', 'gru').rule_options == {}
    local = config('--rule-option', 'reach=local')
    assert local.rule_options == {'reach': 'local'}
    with pytest.warns(braintrace.CreditWarning, match="reach='readout'"):
        runs._prepare(replace(local, units=6, batch=2))
    with warnings.catch_warnings():
        warnings.simplefilter('error', braintrace.CreditWarning)
        runs._prepare(replace(config(), units=6, batch=2))


def test_own_model_and_comparison(here, capsys):
    words = [
        '--batch',
        '2',
        '--task-option',
        'length=2',
        '--task-option',
        'lag=1',
        '--updates',
        '2',
    ]
    code, result, _ = run(
        capsys,
        'compare',
        'copying',
        '--model',
        'mine.py:Net',
        '--rules',
        'd_rtrl,bptt',
        *words,
        '--json',
    )
    assert code == 0
    assert {rule: len(v) for rule, v in result['rules'].items()} == {
        'd_rtrl': 1,
        'bptt': 1,
    }
    assert (here / result['out'] / 'compare.png').stat().st_size > 1000


def test_explaining(here, capsys):
    arguments = parser().parse_args(
        ['explain', 'brainstate.nn:GRUCell(3, 4)', '--input', '2,3']
    )
    code, text, _ = run(
        capsys, 'explain', 'mine.py:make', '--steps', '5', '--html', 'page.html'
    )
    assert code == 0
    assert 'readout.weight.weight' in text
    assert 'memory for 5 steps' in text
    assert '</html>' in (here / 'page.html').read_text()
    assert np.array_equal(
        *(
            look.compiled(arguments, 'd_rtrl')[0].model.Wh.weight.value['weight']
            for _ in range(2)
        )
    )
    code, text, _ = run(capsys, 'explain', 'mine.py:net', '--input', '2,3')
    assert (code, 'cell.h' in text) == (0, True)
    code, found, _ = run(
        capsys,
        'explain',
        'brainstate.nn:GRUCell(3, num_out=4)',
        '--input',
        '2,3',
        '--json',
    )
    assert found['groups'] == [{'states': ['h'], 'positions': [2, 4]}]
    assert {p['name']: p['gradient'] for p in found['parameters']}[
        'Wh.weight.weight'
    ] == 'local'
    words = [
        'explain',
        'brainstate.nn:GRUCell(3, num_out=4)',
        '--input',
        '2,3',
        '--rule',
        'pp_prop',
        '--json',
    ]
    code, found, _ = run(capsys, *words)
    assert (code, {p['gradient'] for p in found['parameters']}) == (0, {'approximate'})
    assert found['memory']['bptt'] > 0


def test_checking_and_timing(here, capsys):
    words = ['mine.py:make', '--steps', '6', '--rules', 'd_rtrl,rtrl']
    code, found, _ = run(capsys, 'check', *words, '--plot', 'check.png', '--json')
    assert code == 0
    assert found['RTRL']['cosine'] == pytest.approx(1, abs=1e-5)
    assert found['D_RTRL']['parameters']['readout.weight.weight'][
        'cosine'
    ] == pytest.approx(1, abs=1e-5)
    assert (here / 'check.png').exists()
    code, text, _ = run(
        capsys,
        'bench',
        'mine.py:make',
        '--steps',
        '5',
        '--rounds',
        '2',
        '--rules',
        'd_rtrl',
    )
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()[2:]] == [
        'forward',
        'bptt',
        'd_rtrl',
    ]


@pytest.mark.parametrize(
    ('words', 'told'),
    [
        (['train', 'nothing'], 'none by this name'),
        (['train'], 'train TASK, or train --resume DIR'),
        (['train', '--resume', 'nowhere'], 'no config.json'),
        (['train', 'copying', '--resume', 'nowhere'], 'both copying and --resume'),
        (
            ['train', 'copying', '--model', 'mine.py:make'],
            'numbers of inputs and outputs',
        ),
        (['explain', 'mine.py:needs'], 'a function without arguments, or '),
        (['train', 'copying', '--task-option', 'speed=3'], 'options among'),
        (['train', 'copying', '--model', 'nothing'], 'one of'),
        (['train', 'copying', '--rule', 'nothing'], 'd_rtrl'),
        (
            ['train', 'shd', '--task-option', 'file=nowhere.h5', '--batch', '2'],
            'no file of SHD',
        ),
        (['explain', 'mine.py'], 'module:name'),
        (['explain', ':make'], 'neither the name of a module'),
        (['explain', '../mine:make'], 'neither the name of a module'),
        (['train', '--resume', ''], 'no config.json'),
        (['explain', 'mine.py:make', '--input', '4,9'], 'Fix: '),
        (['explain', 'mine.py:Net'], '--input 8,3'),
        (['explain', 'mine.py:nothing'], "has no 'nothing'"),
        (['explain', 'nowhere.py:f'], 'no such file'),
        (['explain', 'no_such_module:f'], 'file.py'),
        (['explain', 'mine.py:make(1 +)'], 'cannot be read'),
        (['check', 'mine.py:make', '--rules', 'nothing'], 'd_rtrl'),
        (['explain', 'mine.py:make', '--dt', '1.2.3'], 'a number above 0'),
        (['explain', 'mine.py:make', '--dt', '0ms'], 'a number above 0'),
        (['train', 'copying', '--task-option', 'lag=-3'], 'not a negative one'),
        (['train', 'copying', '--task-option', 'lag=abc'], 'a number'),
        (['train', 'copying', '--out', 'mine.py'], 'it is a file'),
        (['train', 'copying', '--rule', 'threefactor', *SMALL], 'modulator'),
        (['train', 'copying', '--model', 'mine.py:small', '--units', '3'], 'units=3'),
        (
            ['train', 'copying', '--model', 'mine.py:small(extra=2)'],
            'second argument is the number of outputs',
        ),
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
    assert 'Why: ' in said


def test_errors_of_the_users_own_code_are_shown_whole(here):
    with pytest.raises(AttributeError, match='missing'):
        main(['explain', 'mine.py:broken'])


def test_help_and_bad_words(capsys):
    for words, code in [
        (['--help'], 0),
        (['--version'], 0),
        (['nothing'], 2),
        (['train', 'x', '--batch', '0'], 2),
        (['train', 'x', '--units', 'abc'], 2),
        (['train', 'x', '--lr', '-1'], 2),
        (['train', 'x', '--lr', 'nan'], 2),
        (['train', 'x', '--process', '-1'], 2),
        (['train', 'x', '--seed', 'x'], 2),
        (['explain', 'x', '--input', '8,-3'], 2),
        (['train', 'x', '--seed', f'{2**64}'], 2),
        (['compare', 'x', '--rules', ','], 2),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == code
    printed, said = capsys.readouterr()
    assert 'braintrace train evidence' in printed
    assert braintrace.__version__ in printed
    assert 'invalid ' not in said.replace('invalid choice', '')
    for told in (
        "--batch: '0' is not a whole number of at least 1",
        "--units: 'abc' is not a whole number of at least 1",
        "--lr: '-1' is not a number above 0",
        "--lr: 'nan' is not a number above 0",
        "--process: '-1' is not a whole number of at least 0",
        "--seed: 'x' is not a whole number of at least 0",
        "--input: '8,-3' is not a shape such as 8,3",
        f"--seed: '{2**64}' is not below {2**32}",
        "--rules: ',' has no names such as a,b,c",
    ):
        assert told in said


def test_no_code_of_the_current_folder_is_run_unless_it_is_named(here, capsys):
    script = here / 'benchmarks' / 'run.py'
    script.parent.mkdir()
    script.write_text('open("planted", "w").close()')
    with pytest.raises(SystemExit) as stopped:
        main(['bench'])
    assert stopped.value.code == 2
    assert not (here / 'planted').exists()
    assert 'required: model' in capsys.readouterr().err


def test_a_rule_without_traces_in_a_folder_of_its_own(here, capsys):
    (here / 'out' / 'copying').mkdir(parents=True)
    code, result, _ = run(
        capsys, 'train', 'copying', '--updates', '1', *SMALL, '--json', '--rule', 'bptt'
    )
    assert (code, result['out']) == (0, 'out/copying-2')
    assert not (here / 'out' / 'copying-2' / 'traces.png').exists()


class Killed(BaseException):
    """The end of a process, at any place."""


def test_a_training_killed_while_it_wrote_its_settings_is_resumed(here, capsys):
    words = ['train', 'copying', '--updates', '1', *SMALL]
    for out in ('whole', 'killed'):
        run(capsys, *words, '--out', out)
    for path in (here / 'killed').iterdir():
        if path.is_file():
            path.unlink()
    for path in (here / 'killed/checkpoints').iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    left = [p.name for p in (here / 'killed').rglob('*') if p.is_file()]
    assert left == ['config.json']
    code, result, said = run(capsys, 'train', '--resume', 'killed', '--json')
    assert (code, result['updates']) == (0, 1), said
    records = [
        json.loads((here / out / 'metrics.jsonl').read_text())['loss']
        for out in ('whole', 'killed')
    ]
    assert records[0] == records[1]
    assert (here / 'killed/config.json').exists()


def test_two_trainings_in_one_folder_are_refused(here, capsys):
    words = ['train', 'copying', '--updates', '1', *SMALL, '--out', 'a']
    with alone_in('a'):
        code, _, said = run(capsys, *words)
    assert code == 2
    assert 'another process is writing there' in said
    assert list((here / 'a').iterdir()) == []


def test_a_training_killed_in_its_first_checkpoint_goes_on_and_can_start_anew(
    here, capsys, monkeypatch
):
    words = [
        'train',
        'copying',
        '--updates',
        '2',
        '--save-every',
        '1',
        *SMALL,
        '--out',
        'a',
    ]

    def killed(checkpoints, update, states, background):
        unfinished = (
            checkpoints.folder
            / f'{update}.orbax-checkpoint-tmp'
            / 'default.orbax-checkpoint-tmp'
        )
        unfinished.mkdir(parents=True)
        (unfinished / 'manifest.ocdbt').write_text('x')
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, 'save', killed)
        with pytest.raises(Killed):
            main(words)
    shutil.copytree('a', 'b')
    code, resumed, said = run(capsys, 'train', '--resume', 'a', '--json')
    assert (code, resumed['updates']) == (0, 2)
    assert 'no checkpoint is complete, so training starts again at update 1' in said
    code, anew, said = run(capsys, *words[:-1], 'b', '--json')
    assert (code, anew['updates']) == (0, 2)
    assert 'b holds a training without a complete checkpoint' in said
    assert anew['held_out'] == resumed['held_out']
    assert {p.name for p in (here / 'a' / 'checkpoints').iterdir()} == {
        '1',
        '2',
        'config.json',
    }


@pytest.mark.parametrize(
    ('text', 'told'),
    [
        ('', 'the file is empty'),
        ('{"task": "cop', 'it cannot be read'),
        ('\0\0\0', 'it cannot be read'),
        ('[' * 100_000, 'it cannot be read'),
        ('[1]', 'it holds a list'),
        ('{}', 'it names no task'),
        ('{"task": "copying", "format": 99}', 'of a later version of braintrace'),
        ('{"task": "copying", "format": "one"}', "its format is 'one'"),
        ('{"task": "copying", "colour": 1}', 'not known: colour'),
        ('{"task": 3}', 'task is 3, not a text'),
        (
            '{"task": "copying", "batch": "4"}',
            "batch is '4', not a whole number of at least 1",
        ),
        ('{"task": "copying", "batch": true}', 'batch is True'),
        ('{"task": "copying", "lr": null}', 'lr is None, not a number'),
        (
            '{"task": "copying", "task_options": []}',
            'task_options is [], not options by name',
        ),
    ],
)
def test_settings_that_are_damaged_are_told_in_three_parts(here, capsys, text, told):
    settings.save(here / 'a', settings.Config('copying'))
    for file in ('a/config.json', 'a/checkpoints/config.json'):
        (here / file).write_text(text)
        code, _, said = run(capsys, 'train', '--resume', 'a')
        assert (code, told in said, 'Why: ' in said) == (2, True, True)
        # The copy is whole the first time, and then damaged as well.
        is_mended = 'cp a/checkpoints/config.json a/config.json' in said
        assert is_mended == (file == 'a/config.json' and 'later version' not in told)


def test_settings_that_were_edited_are_refused_by_name(here, capsys):
    before = settings.Config('copying', lr=0.002, task_options={'lag': 2})
    settings.save(here / 'a', before)
    edited = {**asdict(before), 'lr': 0.5, 'task_options': {'lag': 3}, 'updates': 7}
    (here / 'a' / 'config.json').write_text(json.dumps(edited))
    code, _, said = run(capsys, 'train', '--resume', 'a')
    assert code == 2
    assert 'lr is 0.5 and was 0.002, task_options is' in said
    assert 'updates is' not in said
    shutil.copy('a/checkpoints/config.json', 'a/config.json')  # as the message says
    assert settings.read(here / 'a') == before


class Terminal(io.StringIO):
    """A terminal where someone types."""

    def isatty(self):
        return True


def test_code_that_a_folder_names_is_run_only_when_trusted(here, capsys, monkeypatch):
    words = [
        'train',
        'copying',
        '--model',
        'mine.py:small',
        '--batch',
        '2',
        '--updates',
        '1',
        '--out',
        'a',
    ]
    more = ['--task-option', 'length=2', '--task-option', 'lag=1']
    code, _, _ = run(capsys, *words, *more)
    assert code == 0
    with (here / 'mine.py').open('a') as file:
        file.write("\nimport pathlib\npathlib.Path('ran').touch()\n")
    resume = ['train', '--resume', 'a', '--updates', '2', '--json']

    code, _, said = run(capsys, *resume)  # nobody to ask
    assert (code, 'there is no terminal' in said, 'Why: ' in said) == (
        2,
        True,
        True,
    )
    code, _, said = run(capsys, *resume, '--model', 'mine.py:other')
    assert (code, '--resume with --model\n' in said) == (2, True)
    for answer in ('n\n', '\n', ''):
        monkeypatch.setattr('sys.stdin', Terminal(answer))
        code, _, said = run(capsys, *resume)
        assert (code, 'you did not agree' in said) == (2, True)
        assert f'the file {here / "mine.py"} is run' in said
    assert not (here / 'ran').exists()

    monkeypatch.setattr('sys.stdin', io.StringIO())
    for trusted in (['--trust'], ['--model', 'mine.py:small']):
        out, config = runs._resumed(parser().parse_args([*resume, *trusted]))
        assert (str(out), config.model, config.updates) == ('a', 'mine.py:small', 2)
    monkeypatch.setattr('sys.stdin', Terminal('y\n'))
    code, result, _ = run(capsys, *resume)
    assert (code, result['updates']) == (0, 2)
    assert (here / 'ran').exists()

    module = replace(config, model='json:loads')
    monkeypatch.setattr('sys.stdin', io.StringIO('y'))
    with pytest.raises(PermissionError, match='module json'):
        settings.check_trust(module, out, trusted=False)
    settings.check_trust(
        replace(config, model='gru'), out, trusted=False
    )  # a network of this package


def test_a_picture_that_fails_loses_nothing(here, capsys, monkeypatch):
    def fails(*given):
        raise RuntimeError('no\nink')

    monkeypatch.setattr('braintrace.plots.activity', fails)
    monkeypatch.setattr('braintrace.report.CompilationReport.to_html', fails)
    code, result, said = run(
        capsys, 'train', 'copying', '--updates', '1', *SMALL, '--out', 'a', '--json'
    )
    assert code == 0
    assert 'activity.png was not made: RuntimeError: no ink\n' in said
    assert result.pop('failed_pictures') == {'activity.png': 'RuntimeError: no ink'}
    assert json.loads((here / 'a' / 'result.json').read_text()) == result
    assert (here / 'a' / 'traces.png').exists()
    monkeypatch.setattr('braintrace.plots.learning_curves', fails)
    words = ['--updates', '1', '--rules', 'bptt', *SMALL, '--out', 'b']
    code, text, said = run(capsys, 'compare', 'copying', *words)
    assert (code, 'compare.png was not made' in said, 'picture:' in text) == (
        0,
        True,
        False,
    )
    assert (here / 'b' / 'compare.json').exists()


def test_names_cannot_control_the_terminal(here, capsys):
    code, text, said = run(
        capsys, 'explain', 'mine.py:named', '--html', 'pa\x1bge.html'
    )
    assert code == 0
    assert '\x1b' not in text + said
    assert 'bad\\x1b[31m\\nname.h   positions 4×5' in text
    assert '\nname' not in text
    assert 'page: pa\\x1bge.html' in text
    assert (here / 'pa\x1bge.html').exists()
    code, _, said = run(capsys, 'explain', 'a\x1b[0m.py:f')
    assert (code, '\x1b' in said) == (2, False)
