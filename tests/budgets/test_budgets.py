"""What calls cost does not grow unseen: ``scripts/budgets.py`` measures it without clocks.

``budgets.json`` has the numbers. A change that makes one larger by more than a few
percent fails here; a change that makes one smaller passes, and ``make budgets`` keeps
what was gained.
"""

import json

from scripts.budgets import FILE, measure

GROWTH = 1.03
OTHER_VERSIONS = (1.1, 2)
"""Factor and number that other versions of JAX, Python or brainstate may add."""


def complaints(recorded, measured):
    """A text for every number that grew, that is not recorded, or is no longer measured."""
    old, new = recorded['budgets'], measured['budgets']
    factor, extra = GROWTH, 0
    if recorded['versions'] != measured['versions']:
        factor, extra = OTHER_VERSIONS
    found = []
    for name in sorted(new):
        if name not in old:
            found.append(f'{name}: {new[name]}, which no budget states')
        elif new[name] > old[name] * factor + extra:
            percent = f', {new[name] / old[name] - 1:+.1%}' if old[name] else ''
            found.append(f'{name}: {new[name]}, budget {old[name]}{percent}')
    return found + [f'{name}: no longer measured' for name in sorted(old.keys() - new)]


def test_nothing_grows():
    recorded, measured = json.loads(FILE.read_text()), measure()
    found = complaints(recorded, measured)
    assert not found, (
        '\n'.join(['', *found])
        + '\nIf this is worth its price, `make budgets` writes the new numbers to '
        'tests/budgets/budgets.json; commit the file and say why in the message.'
        f'\nrecorded with {recorded["versions"]}\nmeasured with {measured["versions"]}'
    )


def test_growth_is_named():
    versions, other = {'jax': '1'}, {'jax': '2'}
    record = lambda versions, **budgets: {'versions': versions, 'budgets': budgets}
    before = record(versions, lines=1000, loops=3, programs=2)
    after = record(versions, lines=1031, loops=4, calls=5)
    assert complaints(before, after) == [
        'calls: 5, which no budget states',
        'lines: 1031, budget 1000, +3.1%',
        'loops: 4, budget 3, +33.3%',
        'programs: no longer measured',
    ]
    assert complaints(before, record(versions, lines=1029, loops=1, programs=2)) == []
    assert complaints(before, record(other, lines=1100, loops=4, programs=2)) == []
    assert complaints(before, record(other, lines=1103, loops=6, programs=2)) == [
        'lines: 1103, budget 1000, +10.3%',
        'loops: 6, budget 3, +100.0%',
    ]
    assert complaints(before, before) == []
