"""Files are written whole, and never through a link that somebody else put there."""

import os

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.files import write_whole


def learner():
    return braintrace.compile(brainstate.nn.GRUCell(2, 3), 'd_rtrl', jnp.ones(2))


def write_nir(file):
    nir = braintrace.nir
    model = brainstate.nn.Sequential(
        brainstate.nn.Linear(2, 2),
        nir.LI(tau=np.ones(2), r=np.ones(2), v_leak=np.zeros(2)),
    )
    nir.write(file, model)


WRITERS = {
    'text': lambda file: write_whole(file, 'text'),
    'safetensors': lambda file: learner().save_weights(file),
    'nir': write_nir,
    'page': lambda file: learner().report.to_html(file),
}


def test_a_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / 'victim'
    victim.write_text('precious')
    for name, write in WRITERS.items():
        file = tmp_path / name / 'file'
        file.parent.mkdir()
        for planted in (file.with_name('.file.part'), file):
            planted.symlink_to(victim)
        write(file)
        assert victim.read_text() == 'precious', name
        assert file.is_file()
        assert not file.is_symlink()
        assert {p.name for p in file.parent.iterdir()} == {'.file.part', 'file'}


def test_a_file_may_be_read_as_others_of_its_user(tmp_path):
    file = tmp_path / 'file'
    write_whole(file, 'text')
    os.umask(mask := os.umask(0))
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_folder_in_the_way_or_missing_is_said_in_three_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in WRITERS.values():
        for file in ('missing/file', '.', tmp_path):
            with pytest.raises(OSError, match='Fix: '):
                write(file)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_of_weights_is_said_in_three_parts(tmp_path):
    with pytest.raises(FileNotFoundError, match='Fix: '):
        learner().load_weights(tmp_path / 'missing.safetensors')
