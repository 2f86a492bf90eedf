"""pp_prop by a decay and by a rank, with its trace factors."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.pp_prop(seeded(Net), 0.9)
assert learner.decay == 0.9
for option in (0.9, 19, (0.9, 0.5)):
    learner = braintrace.compile(
        seeded(Net), 'pp_prop', xs[0], batch_size=xs.shape[1], decay_or_rank=option
    )
    losses, gradient = train(learner, xs, ys)
    assert isinstance(learner, braintrace.IODimVjpAlgorithm)
