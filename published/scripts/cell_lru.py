"""LRUCell under D_RTRL, with a read-out."""

import brainstate
from common import INPUTS, OUTPUTS, bptt, data, seeded, train

import braintrace


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = braintrace.nn.LRUCell(INPUTS, 6)
        self.out = braintrace.nn.Linear(INPUTS, OUTPUTS)

    def update(self, x):
        return self.out(self.rnn(x))


xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
losses, gradient = train(learner, xs, ys)
