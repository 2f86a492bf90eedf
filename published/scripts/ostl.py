"""Both rules of OSTL."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
compiled = lambda rule: braintrace.compile(
    seeded(Net), rule, xs[0], batch_size=xs.shape[1]
)
forward = compiled('ostl_feedforward')
assert forward.regime == 'without-H'
train(forward, xs, ys)
recurrent = compiled(braintrace.OSTLRecurrent)
assert recurrent.regime == 'with-H'
losses, gradient = train(recurrent, xs, ys)
