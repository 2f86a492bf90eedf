"""What holds for every rule on any model, without an oracle: gradients of random step programs against themselves.

A program of `programs.py` is written for one sample and mapped over a batch, so that samples never meet. Everything
goes through public calls of a learner. They are traced and run in NumPy (`interpreter.py`), for tiny programs are not
worth compiling; `test_by_xla` compiles some. By default two programs a rule; ``SEEDS=7:8`` draws others,
``PROGRAMS=10`` more, `ZOO=all` many.
"""

import functools
import os

import brainstate
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume

import braintrace
from braintrace.learner.by_rule import RULES
from braintrace.rules import PRESETS
from gradients.test_random_programs import compare, examples, is_narrow, values_of
from interpreter import traced
from oracle import total_of
from programs import draw_program

STEPS, BATCH = 4, 3
ALL = os.environ.get('ZOO') == 'all'
SEEDS = range(*map(int, os.environ.get('SEEDS', '0:1').split(':')))
PROGRAMS = int(os.environ.get('PROGRAMS', 30 if ALL else 2))
"""How many a seed and rule; the first is the simplest there is."""
EVERY = [name for name in RULES if name != 'es_d_rtrl']

AHEAD = ('bptt', 'tbptt', 'dni')
"""Rules whose windows see the future: parts of a sequence are not the whole."""
FACTORISED = ('pp_prop', 'ostlfeedforward', 'ottt')
"""Rules that keep a trace of inputs, masked steps included."""


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""


def in_numpy(function, *args):
    """What a function gives that reads and writes states, run in NumPy; states stay as they are."""
    stateful = brainstate.transform.StatefulFunction(function)
    stateful.make_jaxpr(*args)
    values = [s.value for s in stateful.get_states(*args)]
    # Values of states are constants of the program: NumPy has no random keys.
    return traced(lambda *args: stateful.jaxpr_call(values, *args)[1], *args)(*args)


def part_of(tree, a, b):
    return jax.tree.map(lambda x: x[a:b], tree)


def sum_of(gradients):
    return jax.tree.map(lambda *g: sum(g), *gradients)


class Case:
    """A program on a batch, with values, and learners of it by a rule."""

    def __init__(self, program, rule):
        self.program, self.rule = program, rule
        batched = lambda shapes: {k: (BATCH, *shape) for k, shape in shapes.items()}
        of = functools.partial(values_of, dtypes=program.dtypes)
        self.parameters = of(program.parameters, 1)
        self.states = of(batched(program.states), 0)
        steps = [of(batched(program.inputs), 2 + t) for t in range(STEPS)]
        self.xs = jax.tree.map(lambda *x: np.stack(x), *steps)
        self.scales, self.others = np.random.default_rng(0).normal(size=(2, STEPS, 2))

    def learner(self, gaps=False, **options):
        """A learner; with gaps, steps that are not on leave the states as they are."""

        def step(p, s, x):
            x, is_on = x if gaps else (x, True)
            new, out = jax.vmap(self.program.step, (None, 0, 0))(p, s, x)
            kept = lambda new, old: jnp.where(is_on, new, old)
            return jax.tree.map(kept, new, s) if gaps else new, out

        x = jax.tree.map(lambda x: x[0], self.xs)
        x = (x, np.asarray(True)) if gaps else x
        options = (PRESETS[self.rule].check or {}) | options
        given = (self.parameters, self.states, x)
        return Calls(braintrace.compile(step, self.rule, *given, **options))

    @functools.cached_property
    def calls(self):
        return self.learner()

    @functools.cached_property
    def wanted(self):
        """The gradient of a sequence with traces carried."""
        return in_numpy(self.calls.carried, self.xs, self.scales)

    def same(self, found, wanted, what='the gradient'):
        for name in self.parameters:
            text = f'{self.rule}, {name}: {what}'
            compare(is_narrow(self.program), found[name], wanted[name], text)


class Calls:
    """A learner, and gradients of two losses of each step, with a factor for each."""

    def __init__(self, learner):
        self.learner = learner
        self.signs = None if learner.rule_state is None else learner.rule_state.value

    def loss(self, x, scales):
        out = self.learner(x)
        sizes = jax.vmap(total_of)(out)
        return scales[0] * jnp.sum(sizes) + scales[1] * jnp.sum(jnp.sin(sizes))

    def start(self):
        """Take everything back to where it was compiled."""
        self.learner.reset_state()
        if self.signs is not None:
            self.learner.rule_state.value = self.signs

    def part(self, xs, scales, **how):
        how = {'step_fn': self.loss, 'reduction': 'sum'} | how
        return self.learner.etrace_grad(xs, scales, **how)

    def carried(self, xs, scales, **how):
        self.start()
        return self.part(xs, scales, **how)


# ---------------------------------------------------------------- properties


def linear_in_the_cotangents(case):
    """Losses that are scaled and summed scale and sum the gradients, at every step."""
    carried, xs = case.calls.carried, case.xs
    a, b = case.scales, case.others
    found = in_numpy(carried, xs, 2 * a - 0.5 * b)
    wanted = lambda g, h: 2 * g - 0.5 * h
    case.same(found, jax.tree.map(wanted, case.wanted, in_numpy(carried, xs, b)))


def parts_are_the_whole(case):
    """Halves and single steps."""

    def in_parts(length, xs, scales):
        case.calls.start()
        starts = range(0, STEPS, length)
        cut = lambda t: (part_of(xs, t, t + length), scales[t : t + length])
        return sum_of([case.calls.part(*cut(t)) for t in starts])

    for length in (2, 1):
        run = functools.partial(in_parts, length)
        found = in_numpy(run, case.xs, case.scales)
        case.same(found, case.wanted, f'in parts of {length}')


def blocks_do_not_matter(case):
    """The steps that are solved together, with traces carried and without."""
    for block in (1, 3):
        calls = case.learner(block=block)
        for fresh in (True, False):
            run = functools.partial(calls.carried, fresh=fresh)
            found = in_numpy(run, case.xs, case.scales)
            case.same(found, case.wanted, f'{block=}, {fresh=}')


def fresh_is_carried_from_a_reset(case):
    found = in_numpy(
        functools.partial(case.calls.carried, fresh=True), case.xs, case.scales
    )
    case.same(found, case.wanted)


def samples_may_be_in_any_order(case):
    """The gradient stays, and the states are those of the samples."""
    order, states = np.array([2, 0, 1]), jax.tree.map(np.asarray, case.states)

    def run(states, xs, scales):
        case.calls.start()
        case.calls.learner.state = states
        return case.calls.part(xs, scales), case.calls.learner.state

    moved = lambda x: x[order]
    later = lambda x: x[:, order]
    _, after = in_numpy(run, states, case.xs, case.scales)
    given = (jax.tree.map(moved, states), jax.tree.map(later, case.xs), case.scales)
    found, other = in_numpy(run, *given)
    case.same(found, case.wanted)
    for name in states:
        compare(is_narrow(case.program), other[name], after[name][order], name)


def spoilt(xs, at, bad):
    """Real inputs with something else at some steps."""

    def put(x):
        if not np.issubdtype(x.dtype, np.inexact):
            return x
        return np.where(at.reshape(-1, *(1,) * (x.ndim - 1)), x.dtype.type(bad), x)

    return jax.tree.map(put, xs)


BAD = (np.nan, np.inf, -np.inf)


def padding_changes_nothing(case):
    """Masked steps at the end, whatever they hold."""
    end = np.array([False, False, False, True])
    run = functools.partial(case.calls.carried, mask=1.0 - end)
    wanted = in_numpy(run, case.xs, case.scales)
    if case.rule != 'dni':  # which predicts what comes after the end
        short = (part_of(case.xs, 0, 3), case.scales[:3])
        case.same(wanted, in_numpy(case.calls.carried, *short), 'the end left out')
    for bad in BAD:
        found = in_numpy(run, spoilt(case.xs, end, bad), case.scales)
        case.same(found, wanted, f'{bad} at the end')


def gaps_change_nothing(case):
    """Masked steps that leave the states as they are, whatever they hold."""
    gaps = np.array([False, True, False, False])
    calls = case.learner(gaps=True)
    run = functools.partial(calls.carried, mask=1.0 - gaps)
    wanted = in_numpy(run, (case.xs, ~gaps), case.scales)
    for bad in (*BAD, 0.3):
        found = in_numpy(run, (spoilt(case.xs, gaps, bad), ~gaps), case.scales)
        case.same(found, wanted, f'{bad} in a gap')


def seeds_may_be_mapped(case):
    """`vmap` over several sets of parameters."""

    def run(parameters, xs, scales):
        return case.calls.part(xs, scales, fresh=True, params=parameters)

    every = jax.tree.map(lambda x: np.stack([x, 0.5 * x]), case.parameters)
    mapped = jax.vmap(run, (0, None, None))
    found = in_numpy(mapped, every, case.xs, case.scales)
    for i in range(2):
        at = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        wanted = in_numpy(run, at(every), case.xs, case.scales)
        case.same(at(found), wanted, f'parameters {i}')


PROPERTIES = {
    # A predictor has its own scale, and a modulator takes the place of the loss.
    linear_in_the_cotangents: ('dni', 'threefactor'),
    parts_are_the_whole: (*AHEAD, 'uoro'),  # random signs for every call
    blocks_do_not_matter: (),
    fresh_is_carried_from_a_reset: (),
    samples_may_be_in_any_order: ('uoro',),  # random signs for every position
    padding_changes_nothing: (),
    gaps_change_nothing: FACTORISED,
    seeds_may_be_mapped: (),
}
"""And the rules of which they are not true."""


def checked(rule, seed, programs, check):
    """Check random programs by a rule; the smallest that fails is shown as Python."""

    @examples(1000 * seed + EVERY.index(rule), programs)
    def run(data):
        program = draw_program(lambda options: data.draw(st.sampled_from(options)))
        assume(program.parameters and program.states)
        hypothesis.note(f'{program}\n# by {rule}')
        case = Case(program, rule)
        sizes = [np.abs(g).max(initial=0) for g in case.wanted.values()]
        assume(np.isfinite(sizes).all() and max(sizes) < 1e8)  # rounding alone
        check(case)

    run()


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('rule', EVERY)
def test_properties(rule, seed):
    def check(case):
        for holds, others in PROPERTIES.items():
            if rule not in others:
                hypothesis.note(holds.__name__)
                holds(case)

    checked(rule, seed, PROGRAMS, check)


@pytest.mark.parametrize('rule', EVERY if ALL else ['d_rtrl', 'pp_prop'])
def test_by_xla(rule):
    """Calls alone, under `jit`, and in NumPy give the same gradients and states."""

    def check(case):
        calls, given = case.calls, (case.xs, case.scales)
        case.same(calls.carried(*given), case.wanted, 'a call alone')
        states = calls.learner.state
        jitted = brainstate.transform.jit(calls.carried)
        for what in ('the first call under jit', 'the second'):
            case.same(jitted(*given), case.wanted, what)
        for name, value in calls.learner.state.items():
            compare(is_narrow(case.program), value, states[name], name)

    checked(rule, SEEDS[0], PROGRAMS, check)


@pytest.mark.parametrize(
    ('rule', 'step'),
    [
        pytest.param('bptt', lambda p, s, x: 0.8 * s + x @ p, id='bptt'),
        pytest.param('d_rtrl', lambda p, s, x: 0.8 * s + (s @ p) * x, id='d_rtrl'),
    ],
)
def test_infinite_inputs_in_a_gap(rule, step):
    """Found by random programs: 0 · inf in a gap was NaN."""
    is_on = np.array([True, False, True])

    def guarded(p, s, x):
        x, is_on = x
        return jnp.where(is_on, step(p, s, x), s), s

    start = (np.full((2, 2), 0.4), np.full(2, 0.3), (np.ones(2), np.asarray(True)))
    learner = braintrace.compile(guarded, rule, *start)
    loss = lambda x: jnp.sum(learner(x) ** 2)

    def run(bad):
        learner.reset_state()
        xs = np.where(is_on[:, None], np.full((3, 2), 0.5), bad)
        return learner.etrace_grad((xs, is_on), step_fn=loss, mask=1.0 * is_on)

    wanted = run(0.0)
    np.testing.assert_allclose(run(np.nan), wanted)
    np.testing.assert_allclose(run(np.inf), wanted)
