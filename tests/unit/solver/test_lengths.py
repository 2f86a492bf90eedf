"""How many steps are solved together, and how many pass between two visits of traces."""

import jax.numpy as jnp

import braintrace
from braintrace.analysis.analysed import analyse
from braintrace.arrays import bytes_of
from braintrace.lowering import Stages, lower
from braintrace.solver import BlockSolver, JacobianRecursion, Traces
from graph.test_executor import Weighted

PRIME = 10007


class Leaky(Weighted):
    def update(self, x):
        self.h.value = 0.9 * self.h.value + jnp.tanh(x @ self.w.value)
        return jnp.sum(self.h.value**2)


def solver_of(samples, inputs, units, decay):
    model = Leaky({'w': (inputs, units)}, {'h': (samples, units)})
    info = braintrace.extract_module_info(model, jnp.zeros((samples, inputs)))
    step = lower(Stages(analyse(info.program), info.program.outputs[:1]))
    return BlockSolver(step, Traces(step, JacobianRecursion(), decay))


def test_a_block_keeps_what_fits_the_cache():
    solver = solver_of(4, 1024, 128, (0.9, 0.9))
    kept = solver.kept_bytes
    traces = 4 * 4 * (1024 + 128)
    assert traces <= bytes_of(solver.trace_shapes) < traces + 100  # and a count
    room = 1024 * 128 * 4 // 4 + bytes_of(solver.trace_shapes) // 2
    assert 2**17 < room < 50 * kept
    assert solver.block_length(PRIME, carried=True) == room // kept
    assert solver.block_length(PRIME, carried=False) == 50
    assert solver.block_length(60, carried=False) == 30  # divides the steps
    assert solver.block_length(7, carried=False) == 7


def test_a_span_keeps_no_more_than_the_traces_take():
    solver = solver_of(2, 64, 128, None)
    traces = 4 * 2 * 64 * 128
    assert bytes_of(solver.trace_shapes) == traces
    driven = 4 * 2 * (128 + 64)
    assert solver.traces.driven_bytes == driven
    most = traces // (solver.kept_bytes + driven)
    assert solver.span_length(200 * (most // 2), 2) == 2 * (most // 2)
    assert solver.span_length(1000, 50) == 50  # never less than a block
    assert solver.block_length(PRIME, carried=True) == 50
    by_factors = solver_of(2, 64, 128, (0.9, 0.9))
    assert by_factors.span_length(1000, 10) == 10


def test_arrays_of_many_samples_leave_a_cache():
    for samples, is_large in [(16, False), (512, True)]:
        solver = solver_of(samples, 2, 1024, (0.9, 0.9))
        (site,) = solver.traces.sites
        assert site.layout.is_large == is_large  # more than a MiB
