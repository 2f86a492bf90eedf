"""A compiled learner beside other processes: spawn works, fork says that it does not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from typing import Any

import jax
import numpy as np

from braintrace.errors import NotSupportedError, is_explained

from .progress import SETTINGS, random_of
from .threads import CALLS, RULES, User, equal, shared

TITLE = 'learners in children by spawn, and their refusal after fork'
CASES = 200
SECONDS = 60


def spawned(rule: str, calls: list[str], results: Any) -> None:
    """A child: compile, call, send what came out."""
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    user = User(3, rule)
    found = [getattr(user, call)() for call in calls]
    results.put(([np.asarray(x) for x in jax.tree.leaves(found)], user.values()))


def by_spawn(rule: str, calls: list[str]) -> str:
    """The child's numbers are the parent's."""
    user = User(3, rule)  # compiled and used before the child starts
    found = [getattr(user, call)() for call in calls]
    wanted = [np.asarray(x) for x in jax.tree.leaves(found)], user.values()
    context = multiprocessing.get_context('spawn')
    results = context.Queue()
    child = context.Process(target=spawned, args=(rule, calls, results))
    child.start()
    try:
        assert equal(results.get(timeout=SECONDS), wanted), 'the child differs'
        child.join(SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    return 'spawn: the same numbers'


def by_fork(rule: str, call: str) -> str:
    """The child is told at once, in three parts."""
    user = shared(rule)
    user.fresh()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # JAX warns here; this is what it warns of
        child = os.fork()
    if child == 0:
        code = 1
        try:
            getattr(user, call)()
        except NotSupportedError as error:
            code = 0 if is_explained(error) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            assert code == 0, f'{call} in the child ended with {code}'
            user.fresh()  # the parent goes on
            return 'fork: refused in three parts'
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f'{call} after a fork does not return')


def case(seed: int, number: int) -> str:
    """One child."""
    rng = random_of('processes', seed, number)
    rule = rng.choice(RULES)
    if number % 4 == 0:
        return by_spawn(rule, rng.choices(CALLS, k=3))
    return by_fork(rule, CALLS[number % len(CALLS)])
