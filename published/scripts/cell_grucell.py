"""GRUCell under D_RTRL."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net, 'GRUCell'), xs, ys)
learner = braintrace.compile(
    seeded(Net, 'GRUCell'), 'd_rtrl', xs[0], batch_size=xs.shape[1]
)
losses, gradient = train(learner, xs, ys)
