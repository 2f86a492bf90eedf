"""One hook chooses the kernel of a platform; operations without one run as plain JAX."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.operations import computed_once, kernels
from braintrace.operations.kernels import cpu

X = jnp.arange(6.0)


def doubled(**options):
    """A program of an operation, compiled anew."""
    plain = lambda x: x + x
    return jax.jit(lambda x: kernels.run('doubled', x, plain=plain, **options))


def test_an_operation_without_a_kernel_runs_as_plain_jax():
    assert not hasattr(cpu, 'doubled')
    np.testing.assert_array_equal(doubled()(X), 2 * X)


def test_a_function_in_the_file_of_a_platform_is_its_kernel(monkeypatch):
    monkeypatch.setattr(cpu, 'doubled', lambda x: 20 * x, raising=False)
    np.testing.assert_array_equal(doubled()(X), 20 * X)
    # Programs for other platforms have the plain operation.
    exported = jax.export.export(doubled(), platforms=['cuda'])(X)
    assert '2.000000e+01' not in exported.mlir_module()


def test_arguments_may_be_laid_out_for_a_kernel(monkeypatch):
    monkeypatch.setattr(cpu, 'doubled', lambda x: 20 * x, raising=False)
    run = doubled(by=lambda kernel, x: -kernel(x))
    np.testing.assert_array_equal(run(X), -20 * X)


@pytest.mark.parametrize('backends', [{}, {'cpu': 'a_package_that_is_not_there'}])
def test_without_the_file_or_its_package_there_are_no_kernels(monkeypatch, backends):
    monkeypatch.setattr(cpu, 'doubled', lambda x: 20 * x, raising=False)
    monkeypatch.setattr(kernels, 'BACKENDS', backends)
    assert not kernels.are_available()
    assert not kernels.fit(jnp.float32)
    np.testing.assert_array_equal(doubled()(X), 2 * X)
    values = [X, X + 1]
    assert computed_once.computed_once(values) == values


def test_types_that_kernels_take():
    assert kernels.fit(jnp.float32, jnp.float32)
    assert kernels.fit(jnp.float64)
    assert not kernels.fit(jnp.float32, jnp.float64)
    assert not kernels.fit(jnp.float16)
    assert not kernels.fit(jnp.complex64)


def test_variables_of_loops_and_branches():
    """Sums of the numbers above one, and of the others: the generator by itself."""
    from braintrace.operations.kernels.cpu.llvm import call

    def emit(code, operands, results):
        (x,), (y,) = operands, results
        above = code.variable(code.zeros(x.number, 1))
        others = code.variable(code.zeros(x.number, 1))
        for n in code.loop(0, x.size(0)):
            value = x.load(n)
            for holds in code.either(value > 1):
                if holds:
                    above.value = above.value + value
                else:
                    others.value = others.value + value
        y.store(above.value, 0)
        y.store(others.value, 1)

    out = jax.ShapeDtypeStruct((2,), X.dtype)
    run = jax.jit(lambda x: call('test_of_variables', emit, [x], [out])[0])
    np.testing.assert_array_equal(run(X), [2 + 3 + 4 + 5, 0 + 1])
    np.testing.assert_array_equal(run(X[:0]), [0, 0])


def test_parts_take_the_largest_sizes_that_fit():
    from braintrace.operations.kernels.cpu.llvm import SMALL, call

    def emit(code, operands, results):
        (out,) = results
        for at, size in code.parts(out.size(0), (4, 2, 1), 1):
            out.store(code.constant(size, SMALL).repeated(size), at)
        out.store(code.constant(9, SMALL), 0)

    out = jax.ShapeDtypeStruct((12,), jnp.int32)
    run = jax.jit(lambda x: call('test_of_parts', emit, [x], [out])[0])
    np.testing.assert_array_equal(run(X), [9, *[4] * 8, *[2] * 2, 1])
