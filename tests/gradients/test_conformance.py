"""Every rule on models of the zoo: finite, equal to BPTT where the report says so and nowhere else, halves are the
whole, a reset begins anew, traces are as planned.

By default one model is run, and some that a rule once failed on; `make conformance` runs them all, with ``RULE=rtrl``
by one rule.
"""

import os

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.learner.binding import StepBinding
from braintrace.learner.by_rule import RULES
from braintrace.learner.carried import trace_table
from braintrace.learner.sequences import solver_of
from braintrace.rules import PRESETS
from oracle import close_to, precision, sequence, total_of
from zoo import CASES

ALL = os.environ.get('ZOO') == 'all'
STEPS = 4
WHOLE = ('bptt', 'tbptt', 'dni')
"""Rules whose windows see the future: two halves are not the whole."""
UNSEEN = (
    'callback_on_the_path',
    'delayed_recurrence',
)
"""Models whose cut paths are closed to reverse mode as well, or take longer than the steps that are run."""


PLAIN = ('d_rtrl', 'eprop', 'ostlrecurrent', 'rtrl')
"""Rules whose traces are exact: what they do not call 'none' has a gradient."""

NEAR = {
    (
        'cond_of_brainstate',
        'w',
        'rflo',
    ),  # the branch that is taken leaks by 0.9, the other does not
    (
        'learnable_initial_state',
        'w',
        'rflo',
    ),  # the first step has another Jacobian, and no trace before it
    (
        'lif_hard_reset',
        'w',
        'ottt',
    ),  # units fire at all steps, and a reset leaves no memory, or never
    ('lif_hard_reset', 'w', 'pp_prop'),
    (
        'initial_state_by_flag',
        'h0',
        'pp_prop',
    ),  # the samples that read it are set to it at every step, so they keep no memory
    (
        'same_value_twice',
        'w',
        'rflo',
    ),  # two states, of which one is a copy of the other
}
"""(model, key, rule) where the report cannot know that these inputs make the rule equal to BPTT."""


def loss_of(learner):
    return lambda *xs: total_of(learner(*xs))


def is_random(model):
    """Whether the model keeps random numbers of its own, which no reset takes back."""
    return any(
        isinstance(s, brainstate.random.RandomState) for s in model.states().values()
    )


def is_finite(tree):
    return all(np.isfinite(np.asarray(x, complex)).all() for x in jax.tree.leaves(tree))


def by_bptt(model, inputs, xs):
    exact = braintrace.BPTT(model)
    exact.compile_graph(*inputs)
    return exact.etrace_grad(*xs, step_fn=loss_of(exact), reduction='sum', fresh=True)


NAMES = list(CASES) if ALL else ['two_compartments']
FAILED_ONCE = [
    ('bfloat16_spikes_in_float32_group', 'uoro'),
    ('mixed_bfloat16_and_float32', 'pp_prop'),
    *((name, 'rflo') for name in ('learnable_delay', 'state_passed_through')),
    *(
        (name, 'd_rtrl')
        for name in (
            'skip_connection_inside_a_branch',
            'gated_linear_recurrence_behind_a_convolution',
        )
    ),
    *(
        (name, 'rtrl')
        for name in (
            'matmul_in_custom_vjp',
            'spike_by_custom_vjp',
            'embedding_input',
            'lru_complex',
        )
    ),
]
"""Run every day; RTRL is compared with BPTT number by number."""
EVERY = (
    [os.environ['RULE']]
    if os.environ.get('RULE')
    else [name for name in RULES if name != 'es_d_rtrl']
)


def pairs():
    """Models and rules that are run."""
    yield from ((name, rule) for name in NAMES for rule in EVERY)
    yield from () if ALL else FAILED_ONCE


@pytest.mark.parametrize(('name', 'rule'), list(pairs()))
def test_conformance(name, rule):
    case = CASES[name]
    with precision(case):
        model, inputs = case.build()
        learner = RULES[rule](model, **(PRESETS[rule].check or {}))
        learner.compile_graph(*inputs)
        xs = jax.tree.map(lambda x: sequence(x, STEPS), inputs)
        loss, half = loss_of(learner), STEPS // 2
        run = lambda xs, **how: learner.etrace_grad(
            *xs, step_fn=loss, reduction='sum', **how
        )
        part = lambda a, b: jax.tree.map(lambda x: x[a:b], xs)
        key = jax.random.key_data(brainstate.random.DEFAULT.value)
        first, second = run(part(0, half)), run(part(half, STEPS))
        draws = np.any(key != jax.random.key_data(brainstate.random.DEFAULT.value))
        planned = {
            key: [shape for shape, _ in found]
            for key, found in _planned(learner, loss).items()
        }
        assert planned == {
            k: [x.shape for x in jax.tree.leaves(t.peek())]
            for k, t in learner.traces.items()
        }
        if not is_finite(
            (first, second)
        ):  # a derivative of the model itself is singular
            learner.reset_state()
            assert not is_finite(by_bptt(model, inputs, xs))
            return
        if draws or is_random(model):
            return
        same = lambda a, b: [
            close_to(x, y, case, scale=3.0)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        ]
        if rule != 'dni' and learner.rule_state is None:
            learner.reset_state()
            same(run(part(0, half)), first)
        if rule not in (*WHOLE, 'uoro'):
            learner.reset_state()
            same(jax.tree.map(jnp.add, first, second), run(xs))
        learner.reset_state()
        found = run(xs) if rule == 'bptt' else jax.tree.map(jnp.add, first, second)
        learner.reset_state()
        wanted = by_bptt(model, inputs, xs)
        for leaf in case.credit:
            given = learner.report.gradients['.'.join(map(str, leaf))]
            mine, true = at(found, leaf), at(wanted, leaf)
            if given.kind == 'equal to BPTT':
                same(mine, true)
            elif given.kind == 'none':
                assert not np.any(mine != 0)
            elif (
                np.any(true != 0)
                and is_finite(true)
                and name not in UNSEEN
                and (name, leaf[-1], rule) not in NEAR
            ):
                assert np.any(mine != 0) or rule not in PLAIN
                wide = lambda x: np.asarray(jax.tree.leaves(x)[0], complex)
                distance = np.linalg.norm(wide(mine) - wide(true))
                assert distance > 1e-5 * np.linalg.norm(wide(true)), (leaf, given)


def _planned(learner, loss):
    if not learner.rule.has_trace:
        return {}
    binding = StepBinding.of_step_fn(learner, loss, learner._example)
    return trace_table(solver_of(learner, binding, learner.rule, loss=True)).shapes


def at(gradients, leaf):
    """What a path of the zoo leads to: a state's path, then keys inside its value."""
    path = next(p for p in gradients if leaf[: len(p)] == p)
    found = gradients[path]
    for key in leaf[len(path) :]:
        found = found[key]
    return found
