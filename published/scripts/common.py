"""What the scripts share: a small network, data, and the gradient of BPTT."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

STEPS, BATCH, INPUTS, UNITS, OUTPUTS = 12, 4, 3, 8, 2


class Net(brainstate.nn.Module):
    """A recurrent cell and a linear read-out, both of `braintrace.nn`."""

    def __init__(self, cell='GRUCell', inputs=INPUTS, **options):
        super().__init__()
        self.rnn = getattr(braintrace.nn, cell)(inputs, UNITS, **options)
        self.out = braintrace.nn.Linear(UNITS, OUTPUTS)

    def update(self, x):
        return self.out(self.rnn(x))


def seeded(make, *args, **options):
    """A model whose weights depend on nothing but the seed."""
    brainstate.random.seed(1)
    return filled(make(*args, **options))


def filled(model):
    """The model with weights drawn from their names: the same in both packages."""
    for path, state in model.states(brainstate.ParamState).items():
        leaves, structure = jax.tree.flatten_with_path(state.value)
        new = []
        for key, x in leaves:
            name = '.'.join(map(str, path)) + jax.tree_util.keystr(key)
            rng = np.random.default_rng(list(name.encode()))
            size = x.shape[0] ** 0.5 if x.ndim else 1.0
            new.append(jnp.asarray(rng.normal(size=x.shape) / size, x.dtype))
        state.value = jax.tree.unflatten(structure, new)
    return model


def data(inputs=INPUTS, outputs=OUTPUTS, steps=STEPS, seed=0):
    """Inputs, and targets that depend on their running mean."""
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(steps, BATCH, inputs)).astype('float32')
    ys = np.tanh(np.cumsum(xs, 0)[..., :1] * np.ones(outputs)) / 2
    return jnp.asarray(xs), jnp.asarray(ys, 'float32')


def bptt(model, xs, ys, weights=None):
    """The gradient of the mean loss by backpropagation through time, from fresh states."""
    brainstate.nn.init_all_states(model, batch_size=xs.shape[1])
    states = model.states(brainstate.ParamState) if weights is None else weights

    def loss():
        pairs = zip(xs, ys, strict=True)
        return jnp.mean(jnp.stack([jnp.mean((model(x) - y) ** 2) for x, y in pairs]))

    return dict(brainstate.transform.grad(loss, states)())


def descend(states, gradients, rate=0.1):
    """Plain gradient descent."""
    for path, gradient in gradients.items():
        step = lambda w, g: w - rate * g
        states[path].value = jax.tree.map(step, states[path].value, gradient)


def train(learner, xs, ys, updates=4, **options):
    """Losses of a few updates by whole sequences, and the first gradient."""
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    losses, first = [], None
    for _ in range(updates):
        brainstate.nn.reset_all_states(learner, batch_size=xs.shape[1])
        gradients, values = learner.etrace_grad(
            xs, ys, step_fn=step, return_value=True, **options
        )
        first = gradients if first is None else first
        losses.append(float(jnp.mean(values)))
        descend(learner.param_states, gradients)
    return losses, first
