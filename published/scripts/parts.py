"""Filters, feedback and running means as objects."""

import jax
import jax.numpy as jnp

import braintrace

kappa = braintrace.KappaFilter(jnp.zeros(3), 0.5)
kappa.update(jnp.ones(3))
feedback = braintrace.FixedRandomFeedback(2, 4, jax.random.PRNGKey(0))
mean = braintrace.GradExpon({'w': jnp.zeros(3)}, 0.5)
mean.update({'w': jnp.ones(3)})
mean.update({'w': jnp.ones(3)})
losses = [
    float(kappa.value.sum()),
    float(feedback.project(jnp.ones((5, 2))).sum()),
    float(mean.gradients.value['w'].sum()),
]
