"""A task with a learner, as arguments of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import three_parts
from .learner import Learner


def _no_task(given: Any) -> str:
    """The error of a name or a class in place of a task."""
    is_class = isinstance(given, type)
    shown = given.__name__ if is_class else repr(given)
    make = f'{shown}(...)' if is_class else f'braintrace.tasks.task({shown})'
    return three_parts(
        f'Supervised(learner, {shown}, ...)',
        'a task is an object that draws trials, and this is '
        + ('its class' if is_class else 'a name'),
        f'Supervised(learner, {make}, ...)',
    )


class Supervised:
    """A task for a learner, with the arguments that :func:`fit` needs: :meth:`batches`,
    :meth:`step_fn` and :meth:`metrics`.

    ``penalty``: a function that is called after each step. Its value is added to the
    loss. An example is the penalty of a :class:`braintrace.nn.FiringRate`.

    >>> import braintrace, jax.numpy as jnp, optax
    >>> task = braintrace.tasks.Copying(length=2, lag=3)
    >>> net = braintrace.networks.network('gru', task.inputs, task.outputs, units=8)
    >>> x = jnp.zeros((4, task.inputs))
    >>> learner = braintrace.compile(net, 'd_rtrl', x, batch_size=4)
    >>> parts = Supervised(learner, task, 4)
    >>> adam = optax.adam(0.01)
    >>> history = braintrace.fit(
    ...     learner, **parts.parts(), optimizer=adam, updates=2, show=False
    ... )
    >>> sorted(history.records[0])
    ['accuracy', 'loss', 'seconds', 'update']
    """

    def __init__(
        self,
        learner: Learner,
        task: Any,
        batch_size: int,
        *,
        seed: int = 0,
        penalty: Callable[[], jax.Array] | None = None,
    ):
        if isinstance(task, (str, type)):
            raise TypeError(_no_task(task))
        if missing := [name for name in ('kind', 'batch') if not hasattr(task, name)]:
            raise TypeError(
                three_parts(
                    f'a task of type {type(task).__name__}',
                    f'it has no {" and no ".join(missing)}',
                    'an object with inputs, outputs, steps, kind and batch(rng, size)',
                )
            )
        self.learner, self.task, self.batch_size, self.seed, self.penalty = (
            learner,
            task,
            batch_size,
            seed,
            penalty,
        )

    def parts(self) -> dict[str, Any]:
        """The arguments of :func:`fit`."""
        return {
            'batches': self.batches,
            'step_fn': self.step_fn,
            'metrics': self.metrics,
        }

    def batches(self, update: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and weights of one update. The mean of the weights is 1."""
        inputs, targets, weights = self.task.batch(
            np.random.default_rng([self.seed, update]), self.batch_size
        )
        # Batches can be drawn without a learner too.
        own = getattr(self.learner, 'own_samples', slice(None))
        return inputs[:, own], targets[:, own], weights / weights.mean()

    def step_fn(
        self, x: jax.Array, y: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Loss and outputs of one step: cross-entropy for classes, squared error for
        values."""
        outputs = self.learner(x)
        if self.task.kind == 'values':
            loss = jnp.mean((outputs - y) ** 2)
        else:
            loss = -jnp.mean(
                jnp.take_along_axis(jax.nn.log_softmax(outputs), y[..., None], -1)
            )
        return weight * loss + (
            0.0 if self.penalty is None else self.penalty()
        ), outputs

    def metrics(
        self, outputs: jax.Array, inputs: Any, targets: Any, weights: Any
    ) -> dict[str, jax.Array]:
        """Accuracy for classes, squared error divided by the variance for values."""
        mean = lambda x: jnp.average(x, axis=0, weights=weights)
        if self.task.kind == 'values':
            squares = mean(
                jnp.square(outputs - targets).reshape(len(targets), -1)
            ).mean()
            return {'error': squares / jnp.var(targets[jnp.asarray(weights) > 0])}
        if self.task.kind == 'decision':
            return {'accuracy': jnp.mean(mean(outputs).argmax(-1) == targets[-1])}
        return {'accuracy': mean((outputs.argmax(-1) == targets).mean(1))}
