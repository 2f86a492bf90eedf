"""A leaky read-out above recurrent units."""

import brainstate
import brainunit as u
from common import INPUTS, OUTPUTS, UNITS, bptt, data, seeded, train

import braintrace

brainstate.environ.set(dt=1.0 * u.ms)


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = braintrace.nn.GRUCell(in_size=INPUTS, out_size=UNITS)
        self.out = braintrace.nn.LeakyRateReadout(UNITS, OUTPUTS, tau=10.0 * u.ms)

    def update(self, x):
        return self.out(self.rnn(x))


xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
losses, gradient = train(learner, xs, ys)
