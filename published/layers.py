"""The layers of `braintrace.nn` on fixed numbers: outputs and gradients of whole sequences.

The same file runs on both packages, each in its own environment:

    python published/layers.py out.npz

`make published` writes what the published package gives to tests/data/published.npz, and
tests/published/test_published.py compares ours with it. Every parameter is filled with numbers drawn
from its own path, so both packages must also agree on names and shapes.
"""

import sys
import zlib

import brainevent
import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

SPARSE = np.array([[1.0, 0, 2, 0], [0, 3, 0, 0], [4, 0, 0, 5]], np.float32)

# name: (class, arguments, options, shape of one input)
LAYERS = {
    'ValinaRNNCell': ('ValinaRNNCell', (3, 4), {}, (3,)),
    'ValinaRNNCell tanh': ('ValinaRNNCell', (3, 4), {'activation': 'tanh'}, (3,)),
    'GRUCell': ('GRUCell', (), {'in_size': 3, 'out_size': 4}, (3,)),
    'MGUCell': ('MGUCell', (3, 4), {}, (3,)),
    'LSTMCell': ('LSTMCell', (3, 4), {}, (3,)),
    'URLSTMCell': ('URLSTMCell', (3, 4), {}, (3,)),
    'MinimalRNNCell': ('MinimalRNNCell', (3, 4), {}, (3,)),
    'MiniGRU': ('MiniGRU', (3, 4), {}, (3,)),
    'MiniLSTM': ('MiniLSTM', (3, 4), {}, (3,)),
    'LRUCell': ('LRUCell', (), {'d_model': 3, 'd_hidden': 4}, (3,)),
    'CFNCell': ('CFNCell', (3, 4), {}, (3,)),
    'LeakyRateReadout': ('LeakyRateReadout', (3, 4), {}, (3,)),
    'Linear': ('Linear', (3, 4), {}, (3,)),
    'SignedWLinear': ('SignedWLinear', (3, 4), {}, (3,)),
    'ScaledWSLinear': ('ScaledWSLinear', (3, 4), {}, (3,)),
    'GroupedLinear': ('GroupedLinear', (2, 3, 4), {}, (2, 3)),
    'LoRA': ('LoRA', (3, 2, 4), {}, (3,)),
    'SparseLinear': ('SparseLinear', (SPARSE,), {}, (3,)),
    'Embedding': ('Embedding', (5, 4), {}, ()),
    'Conv1d': ('Conv1d', ((5, 3), 4, 3), {}, (5, 3)),
    'Conv2d': ('Conv2d', ((4, 4, 2), 3, 3), {}, (4, 4, 2)),
    'Conv3d': ('Conv3d', ((3, 3, 3, 2), 2, 3), {}, (3, 3, 3, 2)),
}
STEPS, BATCH = 4, 2


def numbers(name, shape, scale=0.5):
    """Normal numbers that depend on a name alone."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    return jnp.asarray(scale * drawn, jnp.float32)


def layer(nn, kind, arguments):
    """A layer of a package's `nn`, its parameters filled with fixed numbers."""
    arguments, options = arguments
    if kind == 'SparseLinear':
        arguments = (brainevent.CSR.fromdense(jnp.asarray(arguments[0])),)
    made = getattr(nn, kind)(*arguments, **options)
    for path, state in made.states(brainstate.ParamState).items():
        name = '.'.join(map(str, path))
        leaves, structure = jax.tree.flatten_with_path(state.value)
        state.value = jax.tree.unflatten(
            structure,
            [numbers(name + jax.tree_util.keystr(key), x.shape) for key, x in leaves],
        )
    return made


def inputs(kind, shape):
    """A short sequence, time and batch first."""
    if kind == 'Embedding':
        drawn = np.random.default_rng(0).integers(0, 5, (STEPS, BATCH))
        return jnp.asarray(drawn)
    return numbers('inputs', (STEPS, BATCH, *shape), 1.0)


def results(nn):
    """Outputs and gradients of every layer, by layer and parameter."""
    found = {}
    with brainstate.environ.context(dt=1.0 * u.ms):
        for name, (kind, arguments, options, shape) in LAYERS.items():
            module = layer(nn, kind, (arguments, options))
            brainstate.nn.init_all_states(module, batch_size=BATCH)
            xs = inputs(kind, shape)
            parameters = module.states(brainstate.ParamState)

            def loss(module=module, xs=xs):
                ys = jnp.stack([module(x) for x in xs])
                return jnp.sum(jnp.sin(ys)), ys

            gradients, ys = brainstate.transform.grad(loss, parameters, has_aux=True)()
            found[f'{name}|output'] = np.asarray(ys)
            for path, gradient in gradients.items():
                where = f'{name}|{".".join(map(str, path))}'
                for key, x in jax.tree.leaves_with_path(gradient):
                    found[where + jax.tree_util.keystr(key)] = np.asarray(x)
    return found


if __name__ == '__main__':
    import braintrace

    np.savez_compressed(sys.argv[1], **results(braintrace.nn))
