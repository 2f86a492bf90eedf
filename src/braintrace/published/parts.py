"""Filters, feedback, running means and predictors with states, as in the published
package.

In this package, parts of a rule with the same names are records without states. The
arguments decide which of the two is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from ..errors import three_parts
from ..learner import by_rule
from ..learner.arguments import length_of
from ..learner.losses import in_windows
from ..learner.optimizers import update_by
from ..rules import parts
from ..rules.numbers import as_decay
from .learner import group_signal_shapes


class EitherKind(type(brainstate.nn.Module)):  # type: ignore[misc]
    """A name for two classes. The arguments decide which one is created.

    Its base is the type of modules, because a subclass of a name may become one.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if 'ours' in vars(cls):
            return cls.kind_for(*args, **options)(*args, **options)
        made = super().__call__(*args, **options)
        if not isinstance(made, (cls.ours, cls.with_states)):
            raise TypeError(
                three_parts(
                    f'{cls.__name__}.__init__ without super().__init__(...)',
                    f'its arguments decide whether it is a {cls.ours.__name__} of '
                    f'{cls.ours.__module__} or a {cls.with_states.__name__}',
                    'super().__init__(...), with the arguments of one of these',
                )
            )
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        if 'ours' in vars(cls):
            return isinstance(instance, (cls.ours, cls.with_states))
        return super().__instancecheck__(instance)


class OfEitherKind(metaclass=EitherKind):
    """Base of such names, and of the classes that users derive from them.

    ``ours`` and ``with_states``: the two classes. ``is_ours``: whether arguments are
    those of the first.
    """

    ours: type
    with_states: type
    is_ours: Callable[..., bool]

    @classmethod
    def kind_for(cls, *args: Any, **options: Any) -> type:
        """The class that takes these arguments."""
        return cls.ours if cls.is_ours(*args, **options) else cls.with_states

    def __init__(self, *args: Any, **options: Any):
        """Turn an object of a user's subclass into one of the class that its arguments
        choose: they are known only here, if the subclass has an ``__init__``."""
        kind: Any = self.kind_for(*args, **options)
        object.__setattr__(self, '__class__', _extending(type(self), kind))
        kind.__init__(self, *args, **options)


@cache
def _extending(subclass: type, kind: type) -> type:
    names = {name: getattr(subclass, name) for name in ('__module__', '__qualname__')}
    return type(subclass)(subclass.__name__, (subclass, kind), names)


# ---------------------------------------------------------------- κ


class KappaState(brainstate.ShortTermState):
    """The low-pass filter ``v = κ v + (1 - κ) x`` with its value."""

    def __init__(self, init_value: Any, kappa: float):
        super().__init__(jnp.asarray(init_value))
        self.kappa = as_decay('kappa', kappa)

    def update(self, x: Any) -> Any:
        """The value after x."""
        self.value = self.kappa * self.value + (1 - self.kappa) * x
        return self.value

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Start again from zero."""
        self.value = jax.tree.map(jnp.zeros_like, self.value)


class KappaFilter(OfEitherKind):
    """``KappaFilter(kappa)``: part of a rule. ``KappaFilter(init_value, kappa)``: a
    state."""

    ours, with_states = parts.KappaFilter, KappaState

    @staticmethod
    def is_ours(*args: Any, **options: Any) -> bool:
        return len(args) + len(options) < 2


# ---------------------------------------------------------------- random feedback


class ProjectingFeedback:
    """A fixed random matrix B (n_target, n_layer) and its product with errors."""

    def __init__(self, n_target: int, n_layer: int, key: Any, init_scale: float = 0.1):
        self.n_target, self.n_layer = n_target, n_layer
        self.B = init_scale * jax.random.normal(key, (n_target, n_layer))

    def project(self, y_target: Any) -> jax.Array:
        """``y_target @ B``."""
        return y_target @ self.B


class FixedRandomFeedback(OfEitherKind):
    """``FixedRandomFeedback(key, scale, align)``: part of a rule.
    ``FixedRandomFeedback(n_target, n_layer, key)``: a random matrix."""

    ours, with_states = parts.FixedRandomFeedback, ProjectingFeedback

    @staticmethod
    def is_ours(*args: Any, **options: Any) -> bool:
        sizes = 'n_target' in options or 'n_layer' in options
        third = len(args) > 2 and not isinstance(args[2], float | None)
        whole = len(args) > 1 and isinstance(args[1], int) and 'key' in options
        return not (sizes or third or whole)


# ---------------------------------------------------------------- means of gradients


class GradientMean(brainstate.nn.Module):
    """A running sum of gradients, ``g = decay * g + new``."""

    def __init__(self, grad_shape: Any, tau_or_decay: Any):
        super().__init__()
        zero = jax.tree.map(jnp.zeros_like, grad_shape)
        self.gradients = brainstate.LongTermState(zero)
        if isinstance(tau_or_decay, u.Quantity):
            dt = brainstate.environ.get_dt()
            self.decay: Any = jnp.exp(-u.maybe_decimal(dt / tau_or_decay))
        elif isinstance(tau_or_decay, float):
            self.decay = as_decay('tau_or_decay', tau_or_decay)
        else:
            raise TypeError(
                three_parts(
                    f'GradExpon(..., {tau_or_decay!r})',
                    'a decay lies between 0 and 1, and a time constant has a unit',
                    'GradExpon(gradients, 0.9) or GradExpon(gradients, 10 * u.ms)',
                )
            )

    def update(self, grads: Any) -> None:
        """Add gradients."""
        add = lambda old, new: self.decay * old + new
        self.gradients.value = jax.tree.map(add, self.gradients.value, grads)


class GradExpon(OfEitherKind):
    """``GradExpon(decay)``: a pure function. ``GradExpon(gradients, decay)``: a
    module."""

    ours, with_states = parts.GradExpon, GradientMean

    @staticmethod
    def is_ours(*args: Any, **options: Any) -> bool:
        return len(args) + len(options) < 2


# ---------------------------------------------------------------- synthetic gradients


PARTS = ('synth_w', 'synth_b')
"""Names of the matrix and the bias of a group among a predictor's states."""


class LinearSynthesizer(brainstate.nn.Module):
    """A linear map for each group, from its states to their credit from later steps.

    ``group_shapes``: the shapes of the credit of all groups, states last, as
    ``learner.group_signal_shapes()`` returns them. ``scale``: the scale of the initial
    weights; with 0 the prediction is zero.
    """

    def __init__(
        self,
        group_shapes: Mapping[int, tuple[int, ...]],
        hidden_width: int | None = None,
        scale: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        self.group_shapes = dict(group_shapes)
        self.weights: dict[int, brainstate.ParamState] = {}
        self.biases: dict[int, brainstate.ParamState] = {}
        for g, shape in self.group_shapes.items():
            key = jax.random.fold_in(jax.random.key(seed), g)
            n = shape[-2] * shape[-1] if len(shape) > 1 else shape[-1]
            drawn = scale * jax.random.normal(key, (n, n))
            self.weights[g] = brainstate.ParamState(drawn)
            self.biases[g] = brainstate.ParamState(jnp.zeros(n))

    def param_values(self) -> dict[str, dict[int, jax.Array]]:
        """All weights ('w') and biases ('b') by group."""
        values = lambda states: {g: state.value for g, state in states.items()}
        return {'w': values(self.weights), 'b': values(self.biases)}

    def states_dict(self) -> dict[tuple[str, int], brainstate.ParamState]:
        """The states that hold them."""
        weights = {('synth_w', g): state for g, state in self.weights.items()}
        return weights | {('synth_b', g): state for g, state in self.biases.items()}

    def apply(
        self, param_values: Mapping[str, Mapping], group_hiddens: Mapping[int, Any]
    ) -> dict[int, jax.Array]:
        """The credit of every group, from its states (..., units, states)."""
        found = {}
        for g, hidden in group_hiddens.items():
            flat = jnp.reshape(hidden, (*hidden.shape[:-2], -1))
            y = flat @ param_values['w'][g] + param_values['b'][g]
            found[g] = y.reshape(hidden.shape)
        return found

    # As a predictor at the end of a window: arrays in a list, states by group.

    def init(self, shapes: Any) -> list[jax.Array]:
        """The weights as a list: of every group its matrix and its bias."""
        values = self.param_values()
        return [x for g in self.group_shapes for x in (values['w'][g], values['b'][g])]

    def keep(self, weights: list[jax.Array]) -> None:
        """Put a list of weights back into the states."""
        for i, g in enumerate(self.group_shapes):
            self.weights[g].value, self.biases[g].value = weights[2 * i : 2 * i + 2]

    def _by_group(self, weights: Any) -> dict[str, dict[int, jax.Array]]:
        numbered = list(enumerate(self.group_shapes))
        return {
            'w': {g: weights[2 * i] for i, g in numbered},
            'b': {g: weights[2 * i + 1] for i, g in numbered},
        }

    def __call__(self, weights: Any, states: list[dict[int, jax.Array]]) -> list:  # type: ignore[override]
        """The credit of every state."""
        stacked = {
            g: jnp.stack([jnp.atleast_1d(x) for x in parts.values()], axis=-1)
            for g, parts in enumerate(states)
        }
        found = self.apply(self._by_group(weights), stacked)
        return [
            {i: found[g][..., k].reshape(x.shape) for k, (i, x) in enumerate(p.items())}
            for g, p in enumerate(states)
        ]

    def error_and_change(self, weights: Any, states: list, right: list) -> tuple:
        """Mean squared distance to the right credit, and no change: it is trained by
        :func:`train_synthetic_gradient` alone."""
        error = _distance(self(weights, states), right)
        return error, [jnp.zeros_like(x) for x in weights]


class SyntheticGradient(OfEitherKind):
    """``SyntheticGradient(width, rate, seed)``: a predictor with one hidden layer that
    learns during use. ``SyntheticGradient(group_shapes, ...)``: a linear predictor."""

    ours, with_states = parts.SyntheticGradient, LinearSynthesizer

    @staticmethod
    def is_ours(*args: Any, **options: Any) -> bool:
        given = isinstance(args[0], Mapping) if args else 'group_shapes' in options
        return not given


def train_synthetic_gradient(
    learner: Any,
    *inputs: Any,
    step_fn: Callable[..., Any] | None = None,
    updates: int = 100,
    chunk_size: int = 1,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    lr: float = 0.01,
    epochs: int = 1,
    reset: bool = True,
    batch_size: int | None = None,
) -> list[float]:
    """Train the predictor of a :class:`DNI` learner, without changing the weights of
    the model.

    With ``step_fn``: see :func:`braintrace.learner.train_synthetic_gradient`. Without
    ``step_fn``: ``inputs`` is a sequence, or a tuple of sequences, which is split into
    windows of ``chunk_size`` steps. ``loss_fn`` is a loss of the outputs of a window,
    by default the mean of their squares. The predictor learns the credit that the next
    window gives the states at its start, plus the prediction at the end of the next
    window. Returns the mean squared error in every epoch.
    """
    if step_fn is not None:
        return by_rule.train_synthetic_gradient(
            learner, *inputs, step_fn=step_fn, updates=updates
        )
    predictor = learner.rule.predictor
    if predictor is None:
        raise ValueError(
            three_parts(
                f'train_synthetic_gradient of {learner.rule.name}',
                'it has no predictor',
                "rule 'dni'",
            )
        )
    if not isinstance(predictor, LinearSynthesizer):
        predictor = LinearSynthesizer(group_signal_shapes(learner))
        learner.attach_synthesizer(predictor)
    whole = len(inputs) == 1 and isinstance(inputs[0], tuple)
    sequences = inputs[0] if whole else inputs
    windows = in_windows(sequences, length_of(sequences), chunk_size)
    loss_fn = loss_fn or (lambda outputs: jnp.mean(outputs**2))
    errors = []
    weights = predictor.init(None)
    change = None if optimizer is None else _update_of(optimizer, predictor)
    for _ in range(epochs):
        if reset:
            learner.reset_state(batch_size)
        distances = []
        for window in zip(*windows, strict=True):
            start, credit = _window_credit(learner, predictor, weights, window, loss_fn)

            def distance(weights: Any, start: Any = start, credit: Any = credit) -> Any:
                found = predictor.apply(predictor._by_group(weights), start)
                return _distance(found, credit)

            value, slope = jax.value_and_grad(distance)(weights)
            distances.append(float(value))
            if change is None:
                weights = [w - lr * d for w, d in zip(weights, slope, strict=True)]
                predictor.keep(weights)
            else:
                change(slope)
                weights = predictor.init(None)
        errors.append(sum(distances) / len(distances))
    learner.attach_synthesizer(predictor)
    return errors


def _distance(found: Any, right: Any) -> Any:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    return sum(jnp.mean((a - b) ** 2) for a, b in pairs)


def _update_of(
    optimizer: Any, predictor: LinearSynthesizer
) -> Callable[[list[jax.Array]], None]:
    """How an optimiser of braintools or an optax transformation changes a predictor,
    from gradients in the order of :meth:`LinearSynthesizer.init`."""
    if not hasattr(optimizer, 'update'):
        raise TypeError(
            three_parts(
                f'train_synthetic_gradient(optimizer={type(optimizer).__name__})',
                'it has no update of gradients',
                'an optimiser of braintools, an optax transformation, or lr=...',
            )
        )
    states: dict[Any, Any] = {**predictor.states_dict()}
    update = update_by(optimizer, states, {})
    order = [(part, g) for g in predictor.group_shapes for part in PARTS]

    def change(gradients: list[jax.Array]) -> None:
        update(dict(zip(order, gradients, strict=True)))

    return change


def _window_credit(
    learner: Any, predictor: Any, weights: Any, window: tuple, loss_fn: Callable
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """States at a window's start, and the credit that they get from it and what is
    expected beyond it. The model moves on to the window's end."""
    groups = learner.graph.hidden_groups
    hidden = learner.hidden_states
    before = {path: state.value for path, state in hidden.items()}
    stacked = lambda values: {
        group.index: group.concat_hidden([values[path] for path in group.hidden_paths])
        for group in groups
    }

    def end() -> Any:
        outputs = brainstate.transform.for_loop(learner._run_model, *window)
        after = stacked({path: state.value for path, state in hidden.items()})
        beyond = predictor.apply(predictor._by_group(weights), after)
        held = jax.lax.stop_gradient(beyond)
        return loss_fn(outputs) + sum(jnp.sum(held[g] * x) for g, x in after.items())

    credit = brainstate.transform.grad(end, hidden)()
    return stacked(before), stacked(credit)
