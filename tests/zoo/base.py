"""What a case is, and the few helpers that keep each one short."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np

Path = tuple
Group = frozenset  # of paths


@dataclass(frozen=True)
class Case:
    """One model of one time step, and what a person would draw of it by hand.

    `build()` gives a fresh model, its states initialised, and example inputs of `model.update`.
    `groups` are sets of hidden-state paths. `sites` maps each parameter leaf to the groups it reaches
    by a path that keeps positions, `credit` to 'exact', 'local', 'instantaneous' or 'none'.
    A leaf's path is its state's path followed by the keys inside the state's value; a quantity is one leaf.
    """

    name: str
    build: Callable[[], tuple[brainstate.nn.Module, tuple]]
    groups: tuple[Group, ...]
    sites: dict[Path, frozenset[Group]]
    credit: dict[Path, str]
    family: str
    x64: bool = False
    note: str = ''


CASES: dict[str, Case] = {}
REFUSED: dict[str, Callable[[], tuple[brainstate.nn.Module, tuple]]] = {}
"""Models that cannot work, and say why."""
SEED = 3  # draws that put units on both sides of threshold
_random = np.random.default_rng(SEED)


def seed():
    """Start the draws of `array` and of brainstate again."""
    global _random
    _random = np.random.default_rng(SEED)
    brainstate.random.seed(SEED)


def path(text: str | Path) -> Path:
    """'layers/0/w' -> ('layers', 0, 'w'); a path stays as it is."""
    if isinstance(text, tuple):
        return text
    return tuple(int(key) if key.isdigit() else key for key in text.split('/'))


def case(
    groups: Sequence[str | Sequence[Path]],
    leaves: dict[str, str],
    x64: bool = False,
    note: str = '',
):
    """Register the decorated builder under its own name.

    `groups` lists each group's paths, separated by spaces (or as tuples, where a key is odd).
    `leaves` gives each parameter leaf its credit, followed by the numbers of the groups it has a site in:
    'local 0 1', 'exact 0', 'exact', 'none'.
    """
    group_sets = tuple(
        frozenset(path(p) for p in (g.split() if isinstance(g, str) else g))
        for g in groups
    )

    def register(builder):
        name = builder.__name__.strip('_')

        def build():
            seed()
            return builder()

        words = {path(leaf): answer.split() for leaf, answer in leaves.items()}
        if name in CASES:
            raise ValueError(f'two cases are called {name!r}')
        CASES[name] = Case(
            name=name,
            build=build,
            groups=group_sets,
            sites={
                leaf: frozenset(group_sets[int(n)] for n in w[1:])
                for leaf, w in words.items()
            },
            credit={leaf: w[0] for leaf, w in words.items()},
            family=builder.__module__.rpartition('.')[2],
            x64=x64,
            note=note,
        )
        return builder

    return register


class Step(brainstate.nn.Module):
    """A model given by its parts (states and modules) and the function that advances them."""

    def __init__(self, step, **parts):
        super().__init__()
        self.step = step
        for name, part in parts.items():
            setattr(self, name, part)

    def update(self, *inputs):
        return self.step(self, *inputs)


def array(*shape, mean=0.0, scale=0.5, dtype=None):
    """Normal draws, the same at every build of a case, in brainstate's precision."""
    dtype = brainstate.environ.dftype() if dtype is None else dtype
    return jnp.asarray(mean + scale * _random.standard_normal(shape), dtype)


def weight(*shape, **options):
    return brainstate.ParamState(array(*shape, **options))


def hidden(*shape, **options):
    return brainstate.HiddenState(array(*shape, **options))


def other(value):
    return brainstate.ShortTermState(value)


def linear(n_in, n_out, **options):
    """A `brainstate.nn.Linear` with a bias that is not zero."""
    layer = brainstate.nn.Linear(n_in, n_out, **options)
    params = layer.weight.value
    if 'bias' in params:
        layer.weight.value = {**params, 'bias': params['bias'] + 0.1 * array(n_out)}
    return layer


def shake(model, scale=0.5):
    """Move every float hidden state of the model off its initial value."""
    for state in model.states(brainstate.HiddenState).values():
        state.value = jax.tree.map(
            lambda v: v + array(*v.shape, scale=scale, dtype=v.dtype), state.value
        )
    return model


def cell(cell_type, *sizes, batch=None, **options):
    """An unmodified brainstate cell with random states."""
    model = cell_type(*sizes, **options)
    model.init_state(batch)
    return shake(model)


def leaky(op, shape=(2, 4), **parts):
    """`h' = 0.9 h + tanh(op(model, *inputs))`: a clean carrier for whatever `op` does to its weights."""

    def step(m, *inputs):
        m.h.value = 0.9 * m.h.value + jnp.tanh(op(m, *inputs))
        return m.h.value

    return Step(step, h=hidden(*shape), **parts)


spike = (
    braintools.surrogate.sigmoid
)  # never a zero derivative, wherever the membrane sits
B, I, H = 2, 3, 4  # batch, inputs, units  # noqa: E741
