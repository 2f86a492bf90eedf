"""The record between compiler and solver: one time step as pure functions on arrays.

The compiler (``lowering``) fills it in, the solver runs it, and neither reads anything
else of the other. Arrays are kept in :class:`Values`, dictionaries whose keys the
solver never looks into, so a step can be written by hand with strings as keys.

Letters used in the solver: t steps of a block, b samples, h positions of a group, s
states (components) of a position, y elements of a site's result, w elements of a
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Key = Any
"""Names a value; anything that can be a key of a dictionary."""
Components = dict[int, jax.Array]
"""Values of some states of a group's positions, by number; each has the positions'
shape."""
Jacobian = dict[tuple[int, int], jax.Array]
"""``[i, j] = ∂new_i/∂old_j`` at every position; entries that are zero by structure are
missing."""
Operands = dict[int, Any]
"""Some operands of an operation, by number."""
Feedback = Mapping[tuple[int, int], Any]
"""Arrays that replace weights in derivatives, by (equation, operand)."""
Box = tuple[slice, ...]
"""A rectangular part of an array."""


class Values(dict[Key, Any]):
    """Arrays by key; a pytree whose leaves keep the order in which they were put in."""

    def __or__(self, other: Any) -> Values:  # type: ignore[override]
        return Values({**self, **other})

    def pick(self, keys: Iterable[Key]) -> Values:
        """Just these keys, in this order."""
        return Values((key, self[key]) for key in keys)


jax.tree_util.register_pytree_node(
    Values,
    lambda values: (tuple(values.values()), tuple(values)),
    lambda keys, leaves: Values(zip(keys, leaves, strict=True)),
)


class Shares(NamedTuple):
    """A gradient as one term (n, *w) for each of n devices that samples are split over.
    The terms are summed once, after all blocks."""

    terms: jax.Array


class LossTerms(NamedTuple):
    """A loss as a function of a sum over samples.

    ``of_step(constants, values)`` gives one term (b,) for each sample,
    ``total(constants, terms)`` the loss.
    """

    of_step: Callable[[Values, Values], jax.Array]
    total: Callable[[Values, jax.Array], jax.Array]


class TraceLayout(Protocol):
    """How the trace ε = ∂h/∂w of one site is stored between blocks, one array a
    component."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each component's array."""
        ...

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        """The trace after a block, P_0 ε_0 + Σ_t P_t ∂h_t/∂w, and γ_0 · ε_0 in the
        shape of w.

        ``rows[s]`` (t, y) = P_t ∂h_t/∂y, ``product`` = P_0, ``credit`` = γ_0. ``fixed``
        are the operands that stay the same, the weight among them; ``steps`` are
        stacked over t.
        """
        ...


@runtime_checkable
class SummingLayout(TraceLayout, Protocol):
    """A layout whose visit after a block can sum the one-step gradients as well."""

    def sums_steps(self, dtype: Any, length: int) -> bool:
        """Whether the visit sums them, for traces stored in a type and so many steps."""
        ...

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
        y_bars: jax.Array | None = None,
    ) -> tuple[Components, jax.Array]:
        """As :meth:`TraceLayout.solve`; with Σ_t x_t ȳ_t added if ``y_bars`` (t, y) are
        given."""
        ...


class WeightUse(Protocol):
    """One use of a weight, y = op(x, w): what the solver needs to know of the
    operation."""

    @property
    def operand(self) -> int:
        """The number of the operand that is the weight."""
        ...

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        """Shape and type of the weight."""
        ...

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Shape and type of y."""
        ...

    @property
    def trace_dtype(self) -> Any:
        """Type of ε: the precision of y; complex if the weight is."""
        ...

    @property
    def input(self) -> int | None:
        """The operand x if y is linear in both x and w; None otherwise."""
        ...

    @property
    def factorises(self) -> bool:
        """Whether ∂h/∂w can be written as a product of an input and a state part."""
        ...

    @property
    def adds(self) -> bool:
        """Whether y is a sum with w."""
        ...

    @property
    def sample_axes(self) -> tuple[int | None, ...] | None:
        """The axis of samples of every operand, None for those without, and of y; None
        if there is no such axis, or w has it."""
        ...

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Shape of one operand."""
        ...

    def slopes(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """∂y/∂w (t, y) of an element-wise use."""
        ...

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array:
        """Σ_t of y_bars[t] · ∂y_t/∂w in the shape of w; ``box``: the part that
        ``y_bars`` holds."""
        ...

    def gradient_by_share(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array | Shares:
        """The same before the sum over devices, where samples are split over some."""
        ...

    def gradient_of_factors(
        self, fixed: Operands, steps: Operands, y_bars: jax.Array, box: Box
    ) -> jax.Array:
        """The same for values that a loop over steps has written, so that each step is
        laid out in memory as x and y are."""
        ...

    def spread(self, y_bar: jax.Array) -> jax.Array:
        """Sum, for each element of an element-wise w, over the elements of y that share
        it."""
        ...

    def spread_by_share(self, y_bar: jax.Array) -> jax.Array | Shares:
        """The same before the sum over devices, where samples are split over some."""
        ...

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        """The storage of its trace; ``positions``: the position that each element of y
        reaches, ``shape``: the shape of the group."""
        ...


@dataclass(frozen=True)
class CompiledSite:
    """One use of a weight whose result reaches the positions of one group: one trace.

    ``enters``: the last sum that y enters unchanged; sites with the same one share
    ∂h/∂y. ``factorises``: whether the trace can be held as an input part and a state
    part.
    """

    weight: Key
    result: Key
    group: int
    use: WeightUse
    positions: np.ndarray
    enters: Key
    factorises: bool


@dataclass(frozen=True)
class Tap:
    """A place where weights meet data. Derivative programs start at its results.

    ``operands(constants, values)`` gives the operands that stay the same and those
    stacked over t. ``gradients(fixed, steps, y_bars, boxes)`` gives the gradient of
    each weight, summed over t, as an array or as :class:`Shares`; ``cut_gradients[g]``
    does so for paths into group g where these differ. ``by_sample``: the first axis of
    every operand of a step and of y counts the same samples. ``parameters``,
    ``by_weight``, ``operation``, ``source``, ``marked``: names for reports and for
    choosing what is traced.
    """

    weights: tuple[Key, ...]
    results: tuple[Key, ...]
    sites: tuple[CompiledSite, ...]
    operands: Callable[[Values, Values], tuple[Operands, Operands]]
    gradients: Callable[
        [Operands, Operands, Mapping[Key, Any], Mapping[Key, Box | None]], Values
    ]
    cut_gradients: Mapping[int, Callable[..., Values]]
    parameters: tuple[Any, ...] = ()
    by_weight: Mapping[Key, tuple[Any, ...]] = field(default_factory=dict)
    operation: str = ''
    source: str = ''
    marked: bool = False
    by_sample: bool = False


@dataclass(frozen=True)
class Memory:
    """A component of traces that is no state of the model: m_t = κ m_{t-1} + u_t, where
    u is a function of the states of a group, position by position.

    ``states`` and ``old_states``: the components that u depends on, new and old ones.
    """

    kappa: float
    states: tuple[int, ...]
    old_states: tuple[int, ...] = ()


Slopes = tuple[dict[int, Any], dict[int, Any]]
"""(U, V) of a memory: ∂u_t/∂h_t and ∂u_t/∂h_{t-1} by component; None stands for 1."""


@dataclass(frozen=True)
class CompiledGroup:
    """Hidden states of one shape that depend on each other position by position.

    ``pattern``: (i, j) where the new component i can depend on the old component j.
    ``inner``: (i, j) where it can depend on the new component j of another state.
    ``signalled``: components of the new states that can have a signal. ``direct``:
    components of old states that a target reads without any new state
    between. ``reached``: the components of the new states that each tap result can
    reach. ``shared``: tap results of which one element reaches several positions; in
    their sites y has one element for each position. ``components(values)`` splits the
    old states among ``values`` into real arrays of the positions' shape, and
    ``states(components)`` puts them together again. ``memories``: further components,
    numbered after those of the states. ``filtered``: there is one for each state, which
    signals read in its place.
    """

    name: Any
    shape: tuple[int, ...]
    dtypes: tuple[Any, ...]
    pattern: frozenset[tuple[int, int]]
    inner: frozenset[tuple[int, int]]
    signalled: frozenset[int]
    direct: frozenset[int]
    reached: Mapping[Key, tuple[int, ...]]
    components: Callable[[Mapping[Key, Any]], list[jax.Array]]
    states: Callable[[Sequence[jax.Array]], Values]
    shared: frozenset[Key] = frozenset()
    memories: tuple[Memory, ...] = ()
    filtered: bool = False

    @property
    def size(self) -> int:
        """States of a position; memories not counted."""
        return len(self.dtypes)


@dataclass(frozen=True)
class CompiledStep:
    """One time step as pure functions on arrays, and what the solver must know of
    shapes.

    ``values`` always means all that is known of one step: inputs, old states, what
    ``project``, ``advance`` and ``complete`` added, new states under their own keys.
    ``constants`` depend on parameters and on states that are never written.
    """

    parameters: Mapping[Key, jax.ShapeDtypeStruct]
    names: Mapping[Key, str]
    """Names of the parameters."""
    states: Mapping[Key, jax.ShapeDtypeStruct]
    inputs: Mapping[Key, jax.ShapeDtypeStruct]
    carried: tuple[tuple[Key, Key], ...]
    """(old, new) keys of the states that the step writes; the others are constants."""
    hidden: tuple[tuple[Key, Key], ...]
    """(old, new) keys of the hidden states."""
    targets: tuple[Key, ...]
    """What is differentiated, in the order of the cotangents: a loss, or outputs and
    new states."""
    is_loss: bool
    """Whether the only target is a loss, so that its cotangent is the weight of the
    step."""
    aux: tuple[Key, ...]
    """Further values that are returned for every step."""
    groups: tuple[CompiledGroup, ...]
    taps: tuple[Tap, ...]
    weights: tuple[Key, ...]
    """All values that gradients are summed for: weights of taps, and constant targets.
    """
    constant_targets: tuple[Key, ...]
    """Targets that no data reaches, as a penalty on weights alone."""
    kept_bytes: int
    """Bytes that a block keeps of one step: old hidden states, projections that
    derivatives read, and what ``advance`` keeps."""

    constants: Callable[[Values, Values], Values]
    """(parameters, states): everything that no data reaches."""
    project: Callable[[Values, Values], Values]
    """(constants, inputs): what inputs alone determine; batched over a block."""
    advance: Callable[[Values, Values], tuple[Values, Values]]
    """(constants, values): the next states, and values kept for derivatives; the time
    loop."""
    complete: Callable[[Values, Values], Values]
    """(constants, values): the values, with all that derivative programs read."""
    outputs: Callable[[Values, Values], Values]
    """(constants, values): targets and ``aux``."""
    local: Callable[..., list[jax.Array]]
    """(group, constants, values, old, delta, taps): components of the new states of a
    group from components of its old ones, a δ of each new state or None, and tap
    results; every path from one position to another is cut."""
    joint: Callable[..., list[jax.Array]]
    """(constants, values, old, delta, taps, feedback): the targets, nothing cut; by
    group, components of old states that targets read directly, and a δ that readers of
    the new states see. ``feedback[readout]`` replaces the weight of a read-out."""
    extend: Callable[[float | None, bool], CompiledStep]
    """(kappa, to_readouts): the step with memories: those of leaky read-outs, with κ in
    place of their own decays if it is given; or a filter κ of every state."""
    run: Callable[..., tuple[Values, list[Any], Values]]
    """(parameters, states, inputs, silent=None): new states, targets and ``aux`` of the
    whole step, uncut; where ``silent``, equations that only targets need send no
    gradient back."""
    run_deep: Callable[..., tuple[Values, list[Any], Values]]
    """The same with every path from one position of a group to another across time
    cut."""
    other_effects: Callable[[int, Key], Box | None]
    """(group, result): the part of y that acts on more than this group; None if nothing
    does."""
    pieces: Mapping[Key, tuple[Key, Box]] = field(default_factory=dict)
    """Weights that are parts of a parameter, without overlap: which parameter and
    part."""
    prepared: frozenset[Key] = frozenset()
    """Constants that only make a loop over many steps faster."""
    advance_once: Callable[[Values, Values], tuple[Values, Values]] | None = None
    """(constants, values): ``project`` and ``advance`` of a step that is run alone, if
    there is a faster way."""
    has_forward_mode: bool = True
    """Whether ``run`` can be differentiated forward."""
    find_readouts: Callable[[], Mapping[Any, Key]] = dict
    """Finds :attr:`readouts`, which few rules need."""
    find_loss_terms: Callable[[], LossTerms | None] = lambda: None
    """Finds :attr:`loss_terms`."""
    find_pattern: Callable[[Sequence[Key]], Mapping[Key, np.ndarray]] = lambda _: {}
    """(states): of each parameter and each of these states, (its elements, elements of
    all the new ones): whether the one can move the other within a step."""
    modulator: Callable[[Values, Values], jax.Array] | None = None
    """(constants, values): the modulator that the step itself computes, if it does."""
    memory_slopes: Callable[[Values, Values], list[list[Slopes]]] | None = None
    """(constants, values): (U, V) of every memory, by group; None for filters."""
    memory_signals: Callable[..., tuple[list[Components], list[Components]]] | None = (
        None
    )
    """(constants, values, results, signals, reads, feedback): what read-outs send back
    to memories, from the derivatives of tap results and of states."""

    @cached_property
    def readouts(self) -> Mapping[Any, Key]:
        """Products with weights between hidden states and targets, or between hidden
        states and a linear read-out that is a state itself: the weight of each."""
        return self.find_readouts()

    @cached_property
    def loss_terms(self) -> LossTerms | None:
        """The loss by sample, if it is a sum over samples or a function of one."""
        return self.find_loss_terms()

    @property
    def written(self) -> tuple[Key, ...]:
        """States that the step writes."""
        return tuple(old for old, _ in self.carried)

    @property
    def moving(self) -> tuple[Key, ...]:
        """Those of them that carry a derivative."""
        is_moving = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        return tuple(key for key in self.written if is_moving(self.states[key]))
