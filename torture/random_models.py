"""Random models of real, complex and mixed types, against ``jax.grad``.

The grammar is that of the tests. In every other case the solver is checked as there, by
an interpreter and against the dense recursion; in the others a learner is compiled: RTRL
is BPTT, and halves, single steps, blocks and passes change nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import braintrace

from .progress import ROOT, random_of

sys.path.insert(0, str(ROOT / 'tests'))
sys.path.insert(0, str(ROOT / 'tests' / 'gradients'))
from oracle import total_of
from programs import Program, draw_position_program, draw_program
from test_random_programs import (
    STEPS,
    WAYS,
    check,
    compare,
    is_narrow,
    values_of,
)

TITLE = 'random models of real, complex and mixed types against `jax.grad`'
CASES = 10_000


def drawn(rng: Random) -> Program:
    """A program with parameters and a hidden state."""
    while True:
        draw = rng.choice([draw_program, draw_program, draw_position_program])
        program = draw(rng.choice)
        if program.parameters and any(k != 'other' for k in program.kinds.values()):
            return program


class Model:
    """A program as a plain function, with values."""

    def __init__(self, program: Program):
        self.program, self.step = program, program.step
        given = lambda shapes, seed: jax.tree.map(
            jnp.asarray, values_of(shapes, seed, program.dtypes)
        )
        self.states = given(program.states, 0)
        self.parameters = given(program.parameters, 1)
        steps = [given(program.inputs, 2 + t) for t in range(STEPS)]
        self.xs = jax.tree.map(lambda *x: jnp.stack(x), *steps)

    def plain(self) -> dict[str, np.ndarray]:
        """The gradient of the sum of losses, by JAX alone."""

        def loss(p: dict) -> jax.Array:
            def step(s: dict, x: dict) -> tuple:
                s, out = self.step(p, s, x)
                return s, total_of(out)

            return jnp.sum(jax.lax.scan(step, self.states, self.xs)[1])

        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(self.parameters))

    def learner(self, rule: str, **options: Any) -> Any:
        """A learner of the function."""
        first = jax.tree.map(lambda x: x[0], self.xs)
        given = (self.parameters, self.states, first)
        return braintrace.compile(self.step, rule, *given, **options)

    def gradients(self, learner: Any, parts: int, fresh: bool = True) -> dict:
        """The sum over parts of the sequence; more than one carry traces on."""
        step = lambda x: total_of(learner(x))
        size = STEPS // parts
        total: Any = None
        for i in range(parts):
            xs = jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], self.xs)
            found = learner.etrace_grad(
                xs, step_fn=step, reduction='sum', fresh=fresh and parts == 1
            )
            add = lambda a, b: a + b
            total = found if total is None else jax.tree.map(add, total, found)
        return jax.tree.map(np.asarray, total)


def by_learner(program: Program, rng: Random) -> str:
    """A learner against JAX, or against itself in another way."""
    model = Model(program)
    way = rng.choice(['whole', 'halves', 'single steps', 'bptt', 'blocks', 'passes'])
    if way in ('blocks', 'passes'):
        first = {'block': rng.choice([1, 2, 3])} if way == 'blocks' else {'passes': 1}
        second = {'block': STEPS} if way == 'blocks' else {'passes': 2}
        wanted = model.gradients(model.learner('d_rtrl', **second), 1)
        found = model.gradients(model.learner('d_rtrl', **first), 1)
        what = f'D-RTRL: the same in other {way}'
    else:
        rule = 'bptt' if way == 'bptt' else 'rtrl'
        parts = {'halves': 2, 'single steps': STEPS}.get(way, 1)
        wanted, found = model.plain(), model.gradients(model.learner(rule), parts)
        what = 'BPTT = jax.grad' if way == 'bptt' else f'RTRL = jax.grad, {way}'
    for name, value in wanted.items():
        compare(is_narrow(program), found[name], value, f'{name}: {what}')
    return what


@contextlib.contextmanager
def compiled_for_once() -> Iterator[None]:
    """Programs that are used once are not kept, in memory or on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update('jax_enable_compilation_cache', False)
    try:
        yield
    finally:
        jax.config.update('jax_enable_compilation_cache', before)
        jax.clear_caches()


def case(seed: int, number: int) -> str:
    """One program."""
    rng = random_of('random_models', seed, number)
    with jax.enable_x64(True), compiled_for_once():
        program = drawn(rng)
        try:
            if number % 2:
                found = by_learner(program, rng)
            else:
                check(program, [rng.choice(WAYS)])
                found = 'solver = dense recursion'
        except BaseException:
            print(program)
            raise
    return found
