"""Windows of states that read each other's new values: their traces have more components than single steps need."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace


def test_chunks_of_an_lstm(x64):
    with brainstate.environ.context(precision=64):
        brainstate.random.seed(0)
        xs = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 3)))
        cell = brainstate.nn.LSTMCell(3, 4)
        learner = braintrace.compile(cell, 'd_rtrl', xs[0], batch_size=2)
        step_fn = lambda x: jnp.mean(learner(braintrace.MultiStepData(x)) ** 2)
        run = lambda xs, size, **how: learner.etrace_grad(
            xs, step_fn=step_fn, chunk_size=size, reduction='sum', **how
        )

        def by_bptt():
            outputs = brainstate.transform.for_loop(cell, xs)
            return jnp.mean(outputs**2)

        weights = cell.states(brainstate.ParamState)
        wanted = dict(brainstate.transform.grad(by_bptt, weights)())
        jax.tree.map(np.testing.assert_allclose, run(xs, 6, fresh=True), wanted)
        whole = run(xs, 3, fresh=True)
        learner.reset_state()
        halves = jax.tree.map(jnp.add, run(xs[:3], 3), run(xs[3:], 3))
        jax.tree.map(np.testing.assert_allclose, halves, whole)
