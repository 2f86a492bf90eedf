"""Rules as configurations."""

from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
factors = braintrace.ETraceConfig(
    trace_factorization='io_factorized',
    temporal_recursion=('scalar_leak', 'jacobian'),
    decay=(0.9, 0.8),
)
assert factors.decay_f == 0.8
assert factors.is_factorized
assert (
    braintrace.ETraceConfig(trace_filter='kappa', kappa=0.0)
    == braintrace.ETraceConfig()
)
plain = braintrace.ETraceConfig()
for config in (factors, plain.replace(temporal_recursion='none'), plain):
    learner = braintrace.compile(seeded(Net), config, xs[0], batch_size=xs.shape[1])
    assert learner.config == config
    losses, gradient = train(learner, xs, ys)
