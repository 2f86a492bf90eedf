"""Switches of the engine and of the compiler."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(
    seeded(Net),
    'd_rtrl',
    xs[0],
    batch_size=xs.shape[1],
    fast_solve=True,
    chunked_trace=False,
    control_flow=braintrace.ControlFlowPolicy(scan_unroll_limit=4),
)
losses, gradient = train(learner, xs, ys)
