"""Small models, so compile fast rather than well, and never the same thing twice."""

import math
import os
import zlib
from collections import defaultdict
from pathlib import Path

import brainstate
import jax
import pytest

jax.config.update('jax_disable_most_optimizations', True)
jax.config.update(
    'jax_compilation_cache_dir', str(Path(__file__).parent.parent / '.cache' / 'xla')
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


@pytest.fixture(autouse=True)
def settings():
    """Settings of brainstate that a test makes, or a page that it runs, end with it."""
    before = brainstate.environ.all()
    yield
    for name in ('fit', 'dt'):
        if name in before:
            brainstate.environ.set(**{name: before[name]})
        else:
            brainstate.environ.pop(name, None)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


CHEAP = {
    'test_architecture.py',
    'test_interface.py',
    'test_labels.py',
    'test_messages.py',
    'test_properties.py',
}
"""Files of which every case runs daily."""

LONG = {
    'test_a_network_learns',
    'test_a_synthesiser_learns_the_credit_of_the_future',
    'test_a_training_killed_in_its_first_checkpoint_goes_on_and_can_start_anew',
    'test_measuring_moves_nothing[dni]',
    'test_multi_step_factors_are_windows_of_one_step',
    'test_optimisers_of_a_synthesiser',
    'test_own_model_and_comparison',
    'test_rules_are_compared_on_the_users_own_model',
    'test_the_command_measures_it',
    'test_traces_grow_as_stated',
}
"""Tests of many seconds, beside which daily others do much of the same."""

SMALLER = {'test_holds_here': 22}
"""Tests of very many cases, of which a smaller part than a sixteenth runs daily."""


FIRST = ('test_on_eight_devices', 'test_the_pages_are_built', 'test_nothing_grows')
"""Tests of a minute, begun first so that none is left for the end."""


def pytest_collection_modifyitems(config, items):
    """Daily, tests with three cases and more run a sixteenth of them, at least one, the
    same ones every time, and some long tests do not run.

    A case that is chosen on the command line always runs; `ZOO=all` runs all.
    """
    items.sort(key=lambda item: item.name not in FIRST)
    named = config.option.keyword or any('::' in a for a in config.args)
    if os.environ.get('ZOO') == 'all' or named:
        return
    cases = defaultdict(list)
    for item in items:
        if item.path.name not in CHEAP:
            cases[item.nodeid.split('[')[0]].append(item.nodeid)
    left_out = {i.nodeid for i in items if {i.name, i.name.split('[')[0]} & LONG}
    for test, names in cases.items():
        part = SMALLER.get(test.rpartition('::')[2], 16)
        count = len(names) if len(names) < 3 else math.ceil(len(names) / part)
        in_order = sorted(names, key=lambda name: zlib.crc32(name.encode()))
        left_out.update(in_order[count:])
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
