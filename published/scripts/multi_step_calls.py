"""A multi-step learner called step by step: windows of one."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(
    seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1], vjp_method='multi-step'
)
losses, gradient = train(learner, xs, ys, chunk_size=1)
