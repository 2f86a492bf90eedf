"""Weights of half precision by every rule: a model that computes in single precision is the same as one with these
weights in single precision. Complex numbers are cases of `test_table`."""

import os

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.learner.by_rule import RULES

B, I, H, O, T = 2, 3, 4, 2, 6  # batch, inputs, units, outputs, steps  # noqa: E741
OPTIONS = {'tbptt': {'k': 4}, 'snap': {'n': 1}}
BY_TRACE = [name for name in RULES if name not in ('es_d_rtrl', 'bptt', 'tbptt', 'dni')]
"""Those of windows differentiate by JAX alone."""


def gradient_of(rule, model, xs, **options):
    learner = RULES[rule](model, **OPTIONS.get(rule, {}), block=4, **options)
    learner.compile_graph(jax.tree.map(lambda x: x[0], xs))
    scale = np.sin(1.0 + np.arange(O))

    def loss(x):
        return jnp.sum(scale * learner(x).astype(jnp.result_type(float)) ** 2)

    found = [
        learner.etrace_grad(xs, step_fn=loss, reduction='sum', fresh=fresh)
        for fresh in (False, True)
    ]
    return [
        {path[-1]: np.asarray(x, np.float64) for path, x in g.items()} for g in found
    ]


class Half(brainstate.nn.Module):
    """Weights of any precision that act in float32."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.kind, rng = kind, np.random.default_rng(0)
        shape = {
            'dense': (I, H),
            'heads': (1, I, H),
            'filter': (H, 1, 1),
            'gain': (H,),
            'rows': (5, H),
        }[kind]
        values = lambda *shape: jnp.asarray(
            0.4 * rng.standard_normal(shape), jnp.bfloat16
        ).astype(dtype)
        self.weight, self.out = (
            brainstate.ParamState(values(*shape)),
            brainstate.ParamState(values(H, O)),
        )
        self.h = brainstate.HiddenState(jnp.zeros((B, H), jnp.float32))

    def drive(self, x):
        weight = self.weight.value
        narrow = x.astype(weight.dtype)  # inputs are given so that this loses nothing
        exact = {'preferred_element_type': jnp.float32}
        if self.kind == 'dense':
            return jnp.matmul(narrow, weight, **exact)
        if self.kind == 'heads':
            return jnp.einsum('bij,ijk->bik', narrow[:, None], weight, **exact)[:, 0]
        if self.kind == 'filter':
            image = narrow[:, None, :1]
            return jax.lax.conv_general_dilated(image, weight, (1,), 'SAME', **exact)[
                :, :, 0
            ]
        if self.kind == 'gain':
            return x[:, :1] * weight.astype(jnp.float32)
        return weight[(jnp.abs(x[:, 0]) * 3).astype(int) % 5].astype(jnp.float32)

    def update(self, x):
        self.h.value = jnp.tanh(0.7 * self.h.value + self.drive(x))
        return jnp.matmul(
            self.h.value, self.out.value, preferred_element_type=jnp.float32
        )


KINDS = ['dense', 'heads', 'filter', 'gain', 'rows']
HALF = [
    (kind, rule, dtype)
    for r, (rule, dtype) in enumerate(
        [*((r, 'bfloat16') for r in BY_TRACE), ('d_rtrl', 'float16')]
    )
    for k, kind in enumerate(KINDS)
    # By default each rule meets one kind; `make zoo` runs all pairs.
    if os.environ.get('ZOO') == 'all' or (r + k) % len(KINDS) == 0
]


@pytest.mark.parametrize(('kind', 'rule', 'dtype'), HALF)
def test_half_precision_weights(kind, rule, dtype):
    """Gradients are sums over steps, rounded to the weight's type once, at their end.

    So they are the rounded gradients of the wide weights, but for numbers that lie between two and are moved by the
    last bits of float32. Where influences are those of all parameters, and of rows that are picked, whose values are
    of half precision too, a step's own gradient is rounded already: by half an eps at most.
    """
    xs = np.asarray(
        jnp.asarray(np.random.default_rng(1).standard_normal((40, B, I)), jnp.bfloat16),
        np.float32,
    )
    wide, narrow = (gradient_of(rule, Half(kind, d), xs) for d in (jnp.float32, dtype))
    eps = float(jnp.finfo(dtype).eps)
    for found, wanted in zip(narrow, wide, strict=True):
        for name, x in wanted.items():
            size = np.abs(x).max()
            np.testing.assert_allclose(
                found[name], x, rtol=eps, atol=eps * size, err_msg=name
            )
            if rule not in ('rtrl', 'snap', 'uoro') and (kind, name) != (
                'rows',
                'weight',
            ):
                rounded = np.asarray(jnp.asarray(x, dtype), np.float64)
                np.testing.assert_allclose(
                    found[name], rounded, rtol=eps, atol=1e-5 * size, err_msg=name
                )
                assert np.mean(found[name] == rounded) > 0.8, name
