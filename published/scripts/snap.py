"""SnAp, whose usual reach is two steps."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net, 'ValinaRNNCell', activation='tanh'), xs, ys)
learner = braintrace.compile(
    seeded(Net, 'ValinaRNNCell', activation='tanh'),
    braintrace.SnAp,
    xs[0],
    batch_size=xs.shape[1],
)
assert learner.n == 2
losses, gradient = train(learner, xs, ys)
