"""Several learners in several threads, and one learner from several threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

from .progress import random_of

TITLE = 'several learners in threads, and one learner from several threads'
CASES = 1000
RULES = ('d_rtrl', 'pp_prop', 'eprop', 'rtrl')
XS = np.random.default_rng(0).normal(size=(12, 2, 3)).astype('float32')


class User:
    """A learner, its loss, and calls of every kind on it."""

    def __init__(self, seed: int, rule: str, model: Any = None):
        brainstate.random.seed(seed)
        model = model or brainstate.nn.GRUCell(3, 5)
        self.learner = braintrace.compile(model, rule, XS[0], batch_size=2)
        self.optimizer = optax.sgd(0.01)

    def step(self, x: jax.Array) -> jax.Array:
        """The loss of a step."""
        return jnp.mean((self.learner(x) - 0.1) ** 2)

    def fresh(self) -> Any:
        """Gradients of a whole sequence."""
        return self.learner.etrace_grad(XS, step_fn=self.step, fresh=True)

    def carried(self) -> Any:
        """Gradients of a sequence that goes on."""
        return self.learner.etrace_grad(XS, step_fn=self.step)

    def evolve(self) -> Any:
        """No gradients."""
        return self.learner.etrace_evolve(XS)

    def online(self) -> Any:
        """Weights change."""
        given = {'step_fn': self.step, 'optimizer': self.optimizer}
        return self.learner.etrace_online(XS, **given)

    def evaluate(self) -> Any:
        """Nothing changes."""
        return self.learner.evaluate(XS)

    def values(self) -> list[np.ndarray]:
        """Weights, states and traces."""
        states = self.learner.states().values()
        return [np.array(x) for s in states for x in jax.tree.leaves(s.value)]


CALLS = ('fresh', 'carried', 'evolve', 'online', 'evaluate')


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that run at the same time."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(i: int) -> None:
        try:
            start.wait()
            results[i] = works[i]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), 'a thread does not return'
    if errors:
        raise errors[0]
    return results


def equal(a: Any, b: Any) -> bool:
    """Bit for bit."""
    same = jax.tree.map(np.array_equal, a, b)
    return all(jax.tree.leaves(same))


def several(seed: int, calls: list[str], rules: list[str]) -> str:
    """Learners of different models, compiled and used at the same time."""
    # The weights are drawn here: brainstate has one generator for all threads.
    models = []
    for i in range(len(rules)):
        brainstate.random.seed(seed + i)
        models.append(brainstate.nn.GRUCell(3, 5))

    def work(i: int) -> Any:
        user = User(seed, rules[i], models[i])
        return [getattr(user, call)() for call in calls], user.values()

    found = together([functools.partial(work, i) for i in range(len(rules))])
    for i, result in enumerate(found):
        brainstate.random.seed(seed + i)
        user = User(seed, rules[i], brainstate.nn.GRUCell(3, 5))
        wanted = [getattr(user, call)() for call in calls], user.values()
        assert equal(result, wanted), f'learner {i} ({rules[i]}) differs'
    return 'several learners: as one after another'


@functools.cache
def shared(rule: str, name: str = '') -> User:
    """One learner for many cases."""
    return User(3, rule)


def one(calls: list[str], rule: str, threads: int) -> str:
    """One learner: the same calls from every thread leave what they leave one after
    another, and measurements are those of some moment in between."""
    user = shared(rule)
    user.learner.reset_state()
    start = {id(s): s.value for s in user.learner.param_states.values()}
    moving = [call for call in calls if call != 'evaluate']

    def work() -> None:
        for call in calls:
            getattr(user, call)()

    # Whatever the order, the number of calls of the same kind is the same.
    if len(set(moving)) <= 1:
        together([work] * threads)
        found = user.values()
        for state in user.learner.param_states.values():
            state.value = start[id(state)]
        user.learner.reset_state()
        for _ in range(threads * len(moving)):
            getattr(user, moving[0])()
        assert equal(found, user.values()), 'states differ'
        return 'one learner, calls of one kind: as one after another'
    together([work] * threads)
    assert all(np.isfinite(x).all() for x in user.values() if x.dtype.kind == 'f')
    gradients = user.fresh()
    again = shared(rule, 'another')
    for path, state in again.learner.param_states.items():
        state.value = user.learner.param_states[path].value
    assert equal(gradients, again.fresh()), 'gradients differ afterwards'
    return 'one learner, calls of several kinds: the next call is exact'


def case(seed: int, number: int) -> str:
    """Some threads, some calls."""
    rng = random_of('threads', seed, number)
    if number % 8 == 0:
        rules = [rng.choice(RULES) for _ in range(rng.randint(2, 4))]
        return several(seed + number, rng.choices(CALLS, k=3), rules)
    if number % 2:
        kind = rng.choice(CALLS[:4])
        calls = [kind] * 3 + ['evaluate'] * rng.randint(0, 2)
    else:
        calls = rng.choices(CALLS, k=4)
    return one(calls, rng.choice(RULES), rng.randint(2, 6))
