"""``reach='deep'`` over the zoo: in one call the report is right about every parameter."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from oracle import sequence, total_of
from zoo import CASES

STEPS = 5
DRAWS = {'noisy_membrane', 'dropout_on_the_op', 'drop_connect'}
"""Models whose two runs draw different numbers."""
NEAR = {
    'callback_on_the_path',  # its cut paths are closed to reverse mode as well
    'delayed_recurrence',  # its cut paths are longer than the call
    'skip_connection_inside_a_branch',  # cuts inside a branch are taken for paths of old states
}
"""Models of which the report cannot know that they are equal to BPTT here."""


def gradients(rule, case, **options):
    """The learner, and its gradient of a fresh sequence as a function of a path of the zoo."""
    model, inputs = case.build()
    learner = rule(model, **options)
    learner.compile_graph(*inputs)
    found = learner.etrace_grad(
        *jax.tree.map(lambda x: sequence(x, STEPS), inputs),
        step_fn=lambda *inputs: total_of(learner(*inputs)),
        reduction='sum',
        fresh=True,
    )

    def at(leaf):
        path = next(p for p in found if leaf[: len(p)] == p)
        (array,) = jax.tree.leaves(
            functools.reduce(operator.getitem, leaf[len(path) :], found[path])
        )
        return np.asarray(array, complex if jnp.iscomplexobj(array) else float)

    return learner, at


@pytest.mark.parametrize('name', [name for name in CASES if name not in DRAWS])
def test_the_report_of_a_window_is_true(name):
    case = CASES[name]
    with jax.enable_x64(case.x64):
        _, by_bptt = gradients(braintrace.BPTT, case)
        learner, by_deep = gradients(braintrace.D_RTRL, case, reach='deep')
    tolerance = 1e-9 if case.x64 else 0.05 if 'float16' in name else 1e-4
    for leaf in case.credit:
        given = learner.report.gradients['.'.join(map(str, leaf))]
        mine, true = by_deep(leaf), by_bptt(leaf)
        if not np.isfinite(true).all():  # the model's own derivative is singular
            continue
        is_equal = np.linalg.norm(mine - true) <= tolerance * np.linalg.norm(true)
        if given.kind == 'equal to BPTT':
            assert is_equal, (leaf, given)
        elif given.kind == 'none':
            assert not mine.any(), (leaf, given)
        elif true.any() and name not in NEAR:
            assert mine.any(), (leaf, given)
            assert not is_equal, (leaf, given)
