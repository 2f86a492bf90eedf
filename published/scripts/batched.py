"""A batched learner, whole sequences by etrace_grad."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(
    seeded(Net), braintrace.D_RTRL, xs[0], batch_size=xs.shape[1]
)
losses, gradient = train(learner, xs, ys)
