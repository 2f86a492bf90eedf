"""EProp with a filter, and with random feedback."""

import jax
from common import Net, bptt, data, seeded, train

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
compiled = lambda **options: braintrace.compile(
    seeded(Net), braintrace.EProp, xs[0], batch_size=xs.shape[1], **options
)
train(compiled(kappa_filter_decay=0.8), xs, ys)
key = jax.random.PRNGKey(0)
train(compiled(feedback='random', random_feedback_key=key), xs, ys)
train(compiled(kappa_filter_decay=0.8, vjp_method='multi-step'), xs, ys)
losses, gradient = train(compiled(kappa_filter_decay=0.0), xs, ys)
