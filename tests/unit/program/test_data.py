"""Inputs that are marked as those of one step, or of several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.program.data import MultiStepData, SingleStepData, first_step

SEVERAL = jnp.arange(12.0).reshape(4, 3)


def test_of_several_steps_the_first_is_kept():
    given = {
        'one': SingleStepData((SEVERAL, 2)),
        'several': MultiStepData({'a': SEVERAL, 'b': np.arange(4)}),
        'plain': [SEVERAL, 'word'],
    }
    found = first_step(given)
    assert found['one'][0] is SEVERAL
    assert found['one'][1] == 2
    np.testing.assert_array_equal(found['several']['a'], SEVERAL[0])
    assert found['several']['b'] == 0
    assert found['plain'] == [SEVERAL, 'word']


def test_shapes_alone():
    shape = jax.ShapeDtypeStruct((4, 3), jnp.float16)
    found = first_step(MultiStepData([shape]))
    assert found == [jax.ShapeDtypeStruct((3,), jnp.float16)]
    assert first_step(SingleStepData(shape)) is shape


@pytest.mark.parametrize('shape', [(), (0, 3)])
def test_nothing_has_no_first_step(shape):
    with pytest.raises(ValueError, match='MultiStepData'):
        first_step(MultiStepData(jnp.zeros(shape)))


@pytest.mark.parametrize('kind', [SingleStepData, MultiStepData])
def test_marks_are_pytrees(kind):
    doubled = jax.jit(lambda d: jax.tree.map(lambda x: 2 * x, d))(kind([SEVERAL]))
    assert type(doubled) is kind
    np.testing.assert_array_equal(doubled.data[0], 2 * SEVERAL)
