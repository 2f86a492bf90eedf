"""Which tests run, and how their programs are compiled.

    make test       the fixed daily share: all unit tests, and of tests with many cases a twenty-fourth
    make rotate     cases drawn by a seed, the commit's hash if none is given, until a time limit
    make zoo        everything

A test that is named on the command line always runs. Models are small, so most programs are compiled
fast rather than well; kernels, streams, devices and a quarter of all others are compiled as users have
them. OPTIMISED=all compiles every program like this, OPTIMISED=none none.
"""

import hashlib
import math
import os
import time
import zlib
from collections import defaultdict
from pathlib import Path

import brainstate
import jax
import pytest

import messages

TESTS = Path(__file__).parent
jax.config.update('jax_compilation_cache_dir', str(TESTS.parent / '.cache' / 'xla'))
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)

ALWAYS = ('unit', 'graph/test_interface.py', 'gradients/test_properties.py')
"""Of these every case runs daily."""

REFUSALS = {
    'test_a_bias_of_another_dimension_is_refused',
    'test_a_value_that_a_step_does_not_have',
    'test_advice_for_a_step_function',
    'test_bad_arguments_are_refused',
    'test_data_without_batches_are_refused',
    'test_inputs_unlike_the_compiled_example',
    'test_nothing_is_touched',
    'test_options_that_are_refused',
    'test_what_is_no_model',
    'test_what_is_refused',
}
"""Of these too: every case has a message of its own, which `messages.txt` holds."""

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

SMALLER = {'test_holds_here': 32, 'test_reference': 64}
"""Tests of very many cases, of which a smaller part than a twenty-fourth runs daily."""

FIRST = ('test_on_eight_devices', 'test_the_pages_are_built', 'test_nothing_grows')
"""Tests of a minute, begun first so that none is left for the end."""

OPTIMISED = ('kernels', 'devices', 'learner/test_streams.py')
"""Programs of these are compiled as users have them: buffers are donated, loops fused."""

ROTATION = os.environ.get('ROTATE')
UNTIL = 'ROTATE_UNTIL'


# ---------------------------------------------------------------- settings


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


@pytest.fixture(autouse=True)
def optimisation(request):
    jax.config.update('jax_disable_most_optimizations', not is_optimised(request.node))


def is_optimised(item):
    chosen = os.environ.get('OPTIMISED')
    if chosen in ('all', 'none'):
        return chosen == 'all'
    return is_in(item, OPTIMISED) or zlib.crc32(item.nodeid.encode()) % 4 == 0


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------- which tests run


def is_in(item, places):
    if not item.path.is_relative_to(TESTS):
        return False
    path = item.path.relative_to(TESTS).as_posix()
    return any(path == place or path.startswith(place + '/') for place in places)


def is_long(item):
    return bool({item.name, item.name.split('[')[0]} & LONG)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.name not in FIRST)
    named = config.option.keyword or any('::' in a for a in config.args)
    if ROTATION is not None:
        chosen = drawn(items, ROTATION)
    elif os.environ.get('ZOO') == 'all' or named:
        return
    else:
        chosen = daily(items)
    kept = {item.nodeid for item in chosen}
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in kept])
    items[:] = chosen


def daily(items):
    """The same share every day; of a test with three cases and more at least one."""
    cases = defaultdict(list)
    for item in items:
        test = item.nodeid.split('[')[0]
        if not is_in(item, ALWAYS) and test.rpartition('::')[2] not in REFUSALS:
            cases[test].append(item.nodeid)
    left_out = {item.nodeid for item in items if is_long(item)}
    for test, names in cases.items():
        part = SMALLER.get(test.rpartition('::')[2], 24)
        count = len(names) if len(names) < 3 else math.ceil(len(names) / part)
        in_order = sorted(names, key=lambda name: zlib.crc32(name.encode()))
        left_out.update(in_order[count:])
    return [item for item in items if item.nodeid not in left_out]


def drawn(items, seed):
    """Cases in an order drawn by the seed, as a weighted sample without replacement.

    A case of a test with n cases has the weight n^(-1/2): tests with many cases are drawn more often than
    others, but do not crowd them out.
    """
    items = [i for i in items if not is_long(i) and i.name not in FIRST]
    cases = defaultdict(int)
    for item in items:
        cases[item.nodeid.split('[')[0]] += 1

    def key(item):
        digest = hashlib.sha256(f'{seed} {item.nodeid}'.encode()).digest()
        uniform = (int.from_bytes(digest[:8], 'big') + 1) / 2**64
        # The largest u^(1/weight) first, by logarithms
        return -math.log(uniform) * math.sqrt(cases[item.nodeid.split('[')[0]])

    return sorted(items, key=key)


# ---------------------------------------------------------------- the rotating share


def pytest_configure(config):
    if messages.MODE:
        config.messages = messages.Messages()
        config.messages.install()
    if ROTATION is not None:  # workers start later and inherit it
        minutes = float(os.environ.get('MINUTES', '14'))
        os.environ.setdefault(UNTIL, str(time.time() + 60 * minutes))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """After the time limit no test is begun."""
    return True if time.time() > float(os.environ.get(UNTIL, 'inf')) else None


def pytest_terminal_summary(terminalreporter, config):
    if ROTATION is None or hasattr(config, 'workerinput'):
        return
    kinds = ('passed', 'failed', 'error', 'skipped')
    ran = sum(len(terminalreporter.stats.get(kind, ())) for kind in kinds)
    terminalreporter.write_line(
        f'{ran} cases drawn by the seed {ROTATION}. All again: make rotate SEED={ROTATION}\n'
        f'One of them: ZOO=all OPTIMISED=all SEEDS={os.environ.get("SEEDS")} '
        '.venv/bin/python -m pytest "the name of the case"'
    )


def pytest_sessionfinish(session):
    if messages.MODE == 'write':
        worker = getattr(session.config, 'workerinput', {}).get('workerid', 'main')
        session.config.messages.save(worker)
