"""Batches for training, from functions, lists, iterators and loaders of other packages.

No package of loaders is imported. The code tests whether an object can be called,
indexed or iterated, and how its arrays can be converted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import three_parts

_FUNCTION, _ITEMS, _ITERABLE, _ITERATOR = 'function', 'items', 'iterable', 'iterator'


class Batches:
    """The batches of all updates, made from one of these:

    - a function of the number of the update, counted from 0, that returns a tuple of
      sequences;
    - a list of batches, or another object with a length and items (a Grain
      ``MapDataset``). Update i uses item i. After the last item, the first one follows;
    - an object that can be iterated again (a PyTorch or Grain loader). When it ends, it
      is iterated again;
    - an iterator or a generator. It must not end before the training ends.

    A batch is a tuple or a list of sequences. Anything else, such as an array or a
    dictionary of arrays, is one sequence. Arrays may come from NumPy, JAX, PyTorch, or
    any package with ``numpy()``, ``__array__`` or DLPack. ``transform`` gets the parts
    of a batch as NumPy arrays and returns the tuple of sequences, time first: ``lambda
    x, label: (x.swapaxes(0, 1), ...)``.

    >>> import numpy as np
    >>> zeros, ones = np.zeros((5, 2)), np.ones((5, 2))
    >>> batches = Batches([(zeros, np.ones(5)), (ones, np.ones(5))])
    >>> [float(batches(i)[0].mean()) for i in range(3)]
    [0.0, 1.0, 0.0]
    """

    @classmethod
    def of(cls, data: Any) -> Batches:
        """``data`` as batches, unless it is that already."""
        return data if isinstance(data, Batches) else cls(data)

    def __init__(self, data: Any, transform: Callable[..., Any] | None = None):
        self.data, self.transform = data, transform
        self.kind = _kind_of(data)
        # An iterator that has not begun can be brought to any update.
        self._is_unbegun = (
            inspect.isgenerator(data)
            and inspect.getgeneratorstate(data) == inspect.GEN_CREATED
        )
        self._iterator: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._next = 0
        self._last: tuple[int, tuple] | None = None

    def __call__(self, update: int) -> tuple:
        """The sequences of an update."""
        if self.kind == _FUNCTION:
            _check_function(self.data)
            return self._sequences(_returned(self.data(update)))
        if self.kind == _ITEMS:
            return self._sequences(self.data[update % self._length()])
        if self._last is None or self._last[0] != update:
            self._go_to(update)
            self._last = (update, self._sequences(self._draw()))
        return self._last[1]

    def peek(self) -> tuple:
        """The sequences of one update, without consuming them."""
        if self.kind in (_FUNCTION, _ITEMS):
            return self(0)
        if self._last is not None:
            return self._last[1]
        if not self._peeked:
            self._peeked.append(self._draw())
            self._next -= 1
        return self._sequences(self._peeked[0])

    def resumed_at(self, update: int) -> str | None:
        """Continue a training at an update. Returns a notice if the data may differ."""
        if self.kind in (_FUNCTION, _ITEMS) or not update:
            return None
        if self.kind == _ITERATOR and not self._is_unbegun:
            self._next = update
            return (
                f'a {type(self.data).__name__} cannot be started again, so update '
                f'{update + 1} takes its next batch; the training is the uninterrupted '
                'one only if that is the batch of this update'
            )
        return (
            f'the batches of {update} updates are drawn again and left out; the '
            'training is the uninterrupted one only if they come in the same order as '
            'then (shuffled by a fixed seed, or not at all)'
        )

    def _go_to(self, update: int) -> None:
        """Make the batch of an update the next one to be drawn."""
        if update < self._next and self.kind == _ITERABLE:
            self._iterator, self._next, self._peeked = None, 0, []
        elif update < self._next:
            self._next = update  # another training takes what is left
        while self._next < update:
            self._draw()

    def _draw(self) -> Any:
        """The next batch, from the beginning again where the data can."""
        self._next += 1
        if self._peeked:
            return self._peeked.pop()
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.data)
            for batch in self._iterator:
                return batch
            if self.kind == _ITERATOR:
                raise _ended(self.data, self._next - 1)
            self._iterator = None
        raise ValueError(
            three_parts(
                f'batches from a {type(self.data).__name__}',
                'it gives none when it is iterated',
                'a loader with at least one batch',
            )
        )

    def _length(self) -> int:
        length = len(self.data)
        if not length:
            raise ValueError(
                three_parts(
                    f'batches from an empty {type(self.data).__name__}',
                    'each update takes one',
                    'at least one batch: [(xs, ys), ...]',
                )
            )
        return length

    def _sequences(self, batch: Any) -> tuple:
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        parts = tuple(jax.tree.map(as_array, part) for part in parts)
        if self.transform is not None:
            parts = tuple(_returned(self.transform(*parts), 'a transform that gives'))
        if not parts:
            raise TypeError(
                three_parts(
                    'batches that hold no sequence',
                    'each update takes the sequences of one batch',
                    'a function that returns a tuple, e.g. lambda i: (xs, ys), or an '
                    'iterable of such tuples',
                )
            )
        return parts


def as_array(x: Any) -> Any:
    """Convert an array of any package to NumPy or JAX."""
    if isinstance(x, (np.ndarray, np.generic, jax.Array, int, float, complex, bool)):
        return x
    if hasattr(x, 'detach'):  # a tensor that PyTorch may differentiate
        x = x.detach()
    if hasattr(x, 'cpu'):
        x = x.cpu()
    if callable(getattr(x, 'numpy', None)):
        return np.asarray(x.numpy())
    if hasattr(x, '__array__'):
        return np.asarray(x)
    if hasattr(x, '__dlpack__'):
        return jnp.from_dlpack(x)
    return np.asarray(x)


def _kind_of(data: Any) -> str:
    """How batches are had from some data."""
    if callable(data):
        return _FUNCTION
    has_items = hasattr(data, '__getitem__') and hasattr(data, '__len__')
    if has_items and not _is_one_batch(data):
        return _ITEMS
    if hasattr(data, '__iter__') and not has_items:
        # Not by iter(data): a loader would start to load, and draw random numbers.
        return _ITERATOR if hasattr(data, '__next__') else _ITERABLE
    raise TypeError(
        three_parts(
            f'batches that are a {type(data).__name__}'
            + (' of arrays' if isinstance(data, (tuple, list)) else ''),
            'each update takes the sequences of one batch',
            'a function of the number of the update that returns a tuple, e.g. '
            'lambda i: (xs, ys), or an iterable of such tuples',
        )
    )


def _check_function(function: Callable[..., Any]) -> None:
    """Raise unless a function can be called with the number of an update."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(0)
    except TypeError as error:
        name = getattr(function, '__name__', type(function).__name__)
        raise TypeError(
            three_parts(
                f'batches from {name}{signature}',
                'a function of batches is called with the number of the update: '
                f'{error}',
                'a function of one argument, e.g. lambda i: (xs, ys); of a generator '
                f'function what it returns, {name}()',
            )
        ) from error


def _is_one_batch(data: Any) -> bool:
    """Whether an object with items is a batch, or no data at all."""
    if isinstance(data, (Mapping, str, bytes)) or hasattr(data, 'shape'):
        return True
    is_plain = isinstance(data, (tuple, list))
    return is_plain and len(data) > 0 and all(hasattr(x, 'shape') for x in data)


def _returned(found: Any, said: str = 'batches that give') -> Any:
    """The sequences that a function returned."""
    if not isinstance(found, (tuple, list)):
        raise TypeError(
            three_parts(
                f'{said} a {type(found).__name__}',
                'each update takes the sequences of one batch',
                'a function that returns a tuple, e.g. lambda i: (xs, ys)',
            )
        )
    return found


def _ended(data: Any, drawn: int) -> ValueError:
    return ValueError(
        three_parts(
            f'batches from a {type(data).__name__} that ends after {drawn} batches',
            'every update takes one, and an iterator cannot be started again',
            'as many batches as updates; or a list, a loader or a function of the '
            'number of the update, which start again',
        )
    )
