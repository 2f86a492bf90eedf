"""Gradients and labels are those that were recorded (`tests/reference.py`).

Daily a part of the pairs is run, each in one way; with ``ZOO=all`` all of them in all
ways. `make reference` records them again and prints what changed.
"""

import os

import numpy as np
import pytest

import reference
from braintrace.rules import PRESETS
from reference import Entry, changes, chosen, distance, measure, pairs, projections

ALL = os.environ.get('ZOO') == 'all'
PAIRS = {f'{pair.model}-{pair.rule}': pair for pair in pairs()}


@pytest.fixture(scope='module')
def record():
    return reference.load()


@pytest.mark.parametrize('name', PAIRS)
def test_reference(name, record):
    pair = PAIRS[name]
    old = record.get((pair.model, pair.rule))
    if old is None:
        pytest.skip('not recorded yet')
    ways = None if ALL else chosen(pair.model, pair.rule, pair.ways, 1)
    found = list(changes(pair, measure(pair, ways), old))
    assert not found, (
        '\n'.join(f'{c.way} {c.name}: {c.text}' for c in found)
        + '\n(where it is meant to change: make reference)'
    )


def test_a_record_stays_as_it_is(tmp_path):
    """Recording numbers that differ by rounding leaves the file as it is, byte by byte;
    others are found and replace the recorded ones."""
    pair = PAIRS['two_compartments-d_rtrl']
    rng = np.random.default_rng(0)
    arrays = {
        'w': rng.normal(size=(3, 4)),
        'b': np.zeros(4),
        'lost': np.full(2, np.nan),
    }
    numbers = {name: projections(pair.model, name, x) for name, x in arrays.items()}
    ways = {'fresh': numbers, 'halves': numbers, 'stream': 'CompilationError'}
    old = Entry({'w': 'local; local'}, ways)
    key, file = (pair.model, pair.rule), tmp_path / 'record.npz'
    reference.save({key: old}, file)
    first = file.read_bytes()
    with np.load(file) as stored:
        assert len(stored['numbers']) == 3  # those of two ways are stored once
    (loaded,) = reference.load(file).values()
    assert loaded.labels == old.labels
    assert not list(changes(pair, old, loaded))

    moved = {name: x * (1 + 1e-13) for name, x in numbers.items()}
    near = Entry(old.labels, {**ways, 'halves': moved})
    assert not list(changes(pair, near, loaded))
    reference.save({key: reference.merged(pair, near, loaded)}, file)
    assert file.read_bytes() == first

    swapped = arrays['w'].copy()
    swapped[[0, 1]] = swapped[[1, 0]]  # of the same norm
    wrong = {**numbers, 'w': projections(pair.model, 'w', swapped)}
    far = Entry(
        {'w': 'exact; equal to BPTT'}, {**ways, 'halves': wrong, 'stream': wrong}
    )
    found = {(c.way, c.name): c for c in changes(pair, far, loaded)}
    assert found.keys() == {('', 'w'), ('halves', 'w'), ('stream', '')}
    true = np.linalg.norm(swapped - arrays['w']) / np.linalg.norm(arrays['w'])
    assert 0.5 * true < found['halves', 'w'].distance < 2 * true
    reference.save({key: reference.merged(pair, far, loaded)}, file)
    (again,) = reference.load(file).values()
    assert not list(changes(pair, far, again))


def test_what_is_none_differs_from_nothing():
    """NaN is equal to NaN alone, and what cancels to zero is compared with the size of
    the gradients beside it."""
    pair = PAIRS['two_compartments-d_rtrl']
    one, zero = np.ones(17), np.zeros(17)
    entry = lambda b: Entry({}, {'fresh': {'w': 10 * one, 'b': b}})
    assert not list(changes(pair, entry(1e-14 * one), entry(zero)))
    assert list(changes(pair, entry(1e-8 * one), entry(zero)))
    assert list(changes(pair, entry(np.nan * one), entry(zero)))
    assert not list(changes(pair, entry(np.nan * one), entry(np.nan * one)))
    assert distance(np.nan * one, zero) == np.inf


def test_draws_are_those_of_any_platform():
    """Of names alone: the words of the bit generator, written as numbers."""
    found = projections('model', 'w', np.eye(3)[1])
    wanted = [1.0, -0.8082591789181959, -0.7631403020050569, 0.6313952869898203]
    np.testing.assert_array_equal(found[:4], wanted)


def test_every_rule_and_way_is_recorded():
    ways = {way for pair in PAIRS.values() for way in pair.ways}
    assert ways == set(reference.WAYS)
    assert len(PAIRS) == len(list(pairs()))  # no name twice
    kinds = {pair.kind for pair in PAIRS.values()}
    titles = {preset.title for preset in PRESETS.values()}
    assert {kind.__name__ for kind in kinds} == titles
