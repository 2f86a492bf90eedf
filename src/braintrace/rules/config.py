"""A rule put together from parts by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from typing import Any

from ..errors import ArgumentError, one_of, three_parts
from ..solver import (
    JacobianRecursion,
    Modulated,
    RandomFeedback,
    RecursionPart,
    ScalarLeak,
    SignalPart,
    Symmetric,
)
from .numbers import as_count, as_decay, as_decays, set_fields
from .parts import FixedRandomFeedback, SyntheticGradient
from .rule import Rule
from .trace_kinds import (
    Coupled,
    Factorised,
    PerParameter,
    RandomProjection,
    TracePart,
    Window,
)

PARTS = {
    'trace_factorization': ('per_param', 'io_factorized', 'random_projection', 'none'),
    'temporal_recursion': ('jacobian', 'scalar_leak', 'none'),
    'recurrence_scope': ('diagonal', 'coupled', 'sparse_n'),
    'learning_signal': ('symmetric', 'random_feedback', 'modulatory', 'bootstrapped'),
    'trace_filter': ('none', 'readout', 'kappa'),
    'update_schedule': ('per_step', 'window', 'sequence_end'),
}
"""The values of every part of a rule."""

SIDES = {'x': ('scalar_leak', 'none'), 'f': ('jacobian', 'scalar_leak', 'none')}
"""How the two factors of a trace may continue: that of inputs, that of states."""


@dataclass(frozen=True)
class ETraceConfig:
    """A learning rule as a combination of parts.

    ``decay``: for factorised traces a decay, a rank, or a pair; for a scalar leak its
    number. ``trace_filter='readout'`` filters traces like the leaky read-outs, and
    ``'kappa'`` filters them by the number ``kappa``. For factorised traces,
    ``temporal_recursion`` may be a pair (x, f) for the two factors, such as
    ``('scalar_leak', 'none')``. A single word is for f.

    Configurations of the same rule are equal: ``kappa=0.0`` means no filter, and a leak
    of 0 means no recursion.
    """

    trace_factorization: str = 'per_param'
    temporal_recursion: Any = 'jacobian'
    recurrence_scope: str = 'diagonal'
    learning_signal: str = 'symmetric'
    trace_filter: str = 'none'
    update_schedule: str = 'per_step'
    decay: float | int | tuple | None = None
    kappa: float | None = None
    sparse_n: int | None = None
    window_size: int | None = None

    def __post_init__(self) -> None:
        for part, allowed in PARTS.items():
            value = getattr(self, part)
            if part == 'temporal_recursion' and isinstance(value, (tuple, list)):
                self._check_sides(value)
            elif value not in allowed:
                raise _no_part(part, value, allowed)
        if self.kappa is not None and as_decay('kappa', self.kappa) == 0:
            set_fields(self, trace_filter='none', kappa=None)
        for is_wrong, why, instead in self._contradictions():
            if is_wrong:
                raise ArgumentError(three_parts(self.name, why, instead))
        set_fields(self, **self._one_spelling())
        # Making the rule refuses parts that do not fit together, and wrong numbers.
        _ = self.rule
        has_windows = self.update_schedule != 'per_step' or self._is_bootstrapped
        if self._has_no_trace != has_windows:
            raise ArgumentError(
                three_parts(
                    self.name,
                    'exact windows need no trace, and without a trace there are only '
                    'windows',
                    "trace_factorization='none' with update_schedule='window' or "
                    "'sequence_end'",
                )
            )

    def _check_sides(self, pair: Any) -> None:
        if self.trace_factorization != 'io_factorized' or len(pair) != 2:
            raise ArgumentError(
                three_parts(
                    f'temporal_recursion={pair!r} with '
                    f'trace_factorization={self.trace_factorization!r}',
                    'factorised traces have two sides, all others one',
                    "one of 'jacobian', 'scalar_leak', 'none'",
                )
            )
        for value, (side, allowed) in zip(pair, SIDES.items(), strict=True):
            if value not in allowed:
                raise _no_part(f'temporal_recursion on side {side}', value, allowed)

    def _one_spelling(self) -> dict[str, Any]:
        """Recursion and decay as they are written for every configuration of the same
        rule."""
        recursion, decay = self.temporal_recursion, self.decay
        if not self.is_factorized:
            if recursion == 'none' or (recursion == 'scalar_leak' and decay == 0):
                return {'temporal_recursion': 'none', 'decay': 0.0}
            return {'decay': None} if decay == 0 and recursion == 'jacobian' else {}
        pair = decay if isinstance(decay, (tuple, list)) else (decay, decay)
        if isinstance(recursion, str):
            forgets = recursion == 'none' and pair[0] is None
            recursion = ('none' if forgets else 'scalar_leak', recursion)
        kept = [r != 'none' for r in recursion]
        # A side without recursion has no decay to be checked.
        x, f = as_decays(
            'decay',
            tuple(d if k and d else 0.0 for k, d in zip(kept, pair, strict=True)),
        )
        named = tuple(
            r if d else 'none' for r, d in zip(recursion, (x, f), strict=True)
        )
        return {'temporal_recursion': named, 'decay': (x, f)}

    # ------------------------------------------------------------ what it says

    @property
    def is_factorized(self) -> bool:
        """Whether traces are two factors."""
        return self.trace_factorization == 'io_factorized'

    def _side(self, field: str, side: int) -> Any:
        if not self.is_factorized:
            raise AttributeError(
                f'{field} has one side: {self.trace_factorization} traces are no '
                'factors'
            )
        return getattr(self, field)[side]

    @property
    def recursion_x(self) -> str:
        """How the factor of inputs continues."""
        return self._side('temporal_recursion', 0)

    @property
    def recursion_f(self) -> str:
        """How the factor of states continues."""
        return self._side('temporal_recursion', 1)

    @property
    def decay_x(self) -> float:
        """The decay of the factor of inputs."""
        return self._side('decay', 0)

    @property
    def decay_f(self) -> float:
        """The decay of the factor of states."""
        return self._side('decay', 1)

    @property
    def include_recurrent_mixing(self) -> bool:
        """Whether traces hold influences of one position on another."""
        return self.recurrence_scope != 'diagonal'

    def replace(self, **changes: Any) -> ETraceConfig:
        """Another configuration, with some parts changed."""
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """The kind of trace, and all parts that are not the usual ones."""
        kind = f'trace_factorization={self.trace_factorization!r}'
        return ', '.join([kind, *self._unusual(fields(self)[1:])])

    @property
    def name(self) -> str:
        """The parts that are not the default ones."""
        return f'ETraceConfig({", ".join(self._unusual(fields(self)))})'

    def _unusual(self, parts: Iterable[Field]) -> list[str]:
        values = [(part, getattr(self, part.name)) for part in parts]
        return [f'{part.name}={x!r}' for part, x in values if x != part.default]

    def _contradictions(self) -> list[tuple[bool, str, str]]:
        """(whether parts and numbers disagree, why, the fix)."""
        kind, schedule = self.trace_factorization, self.update_schedule
        factors, windows = kind == 'io_factorized', schedule == 'window'
        projection, full = (
            kind == 'random_projection',
            self.recurrence_scope != 'diagonal',
        )
        leaks = self.temporal_recursion == 'scalar_leak'
        return [
            (
                (self.trace_filter == 'kappa') != (self.kappa is not None),
                'a filter and its kappa go together',
                "trace_filter='kappa', kappa=0.9",
            ),
            (
                factors and full,
                'two factors hold the influence on a position itself, not on others',
                "recurrence_scope='diagonal'",
            ),
            (
                projection and self.recurrence_scope == 'sparse_n',
                'one random direction stands for all states',
                "recurrence_scope='coupled'",
            ),
            (
                kind == 'none' and full,
                'a window is exact in all states as it is',
                "recurrence_scope='diagonal'",
            ),
            (
                self.decay is not None and (full or projection or kind == 'none'),
                'neither an influence on all states nor a window decays',
                'no decay',
            ),
            (
                (self.recurrence_scope == 'sparse_n') != (self.sparse_n is not None),
                'the sparse scope and its number of steps go together',
                "recurrence_scope='sparse_n', sparse_n=1",
            ),
            (factors and self._lacks_decay(), 'factors decay', 'decay=0.9'),
            (
                kind == 'per_param' and leaks != _is_given(self.decay, leaks),
                'a scalar leak and its number go together',
                "temporal_recursion='scalar_leak', decay=0.9",
            ),
            (
                windows != (self.window_size is not None),
                'windows and their size go together',
                "update_schedule='window', window_size=20",
            ),
        ]

    @property
    def rule(self) -> Rule:
        """The rule of these parts."""
        kappa = None if self.kappa is None else as_decay('kappa', self.kappa)
        return Rule(
            self.name,
            self._trace(),
            self._recursion(),
            kappa,
            self._signal(),
            exact_when='as its parts are',
            reach=self._reach(),
        )

    def _lacks_decay(self) -> bool:
        """Whether a factor that continues has no decay."""
        recursion, decay = self.temporal_recursion, self.decay
        if isinstance(recursion, str):
            return decay is None and recursion != 'none'
        pair = decay if isinstance(decay, (tuple, list)) else (decay, decay)
        sides = zip(recursion, pair, strict=False)
        return any(r != 'none' and d is None for r, d in sides)

    def _trace(self) -> TracePart:
        if self.is_factorized:
            return Factorised((self.decay_x, self.decay_f))
        if self.trace_factorization == 'random_projection':
            return RandomProjection()
        if self._has_no_trace:
            if self.update_schedule == 'sequence_end':
                return Window()
            # A predictor is at the end of a window; the usual one is that of DNI.
            usual = 10 if self.window_size is None else self.window_size
            size = as_count('window_size', usual)
            return Window(size, SyntheticGradient() if self._is_bootstrapped else None)
        if self.recurrence_scope == 'coupled':
            return Coupled()
        if self.recurrence_scope == 'sparse_n':
            return Coupled(as_count('sparse_n', self.sparse_n))
        return PerParameter()

    @property
    def _is_bootstrapped(self) -> bool:
        return self.learning_signal == 'bootstrapped'

    @property
    def _has_no_trace(self) -> bool:
        whole = self.trace_factorization == 'per_param'
        return self.trace_factorization == 'none' or (whole and self._is_bootstrapped)

    def _recursion(self) -> RecursionPart:
        factors = self.is_factorized
        recursion = self.recursion_f if factors else self.temporal_recursion
        if recursion == 'jacobian':
            return JacobianRecursion()
        if recursion == 'none':
            return ScalarLeak(0.0)
        # Factors have a decay of their own, which takes the place of D.
        return ScalarLeak(1.0 if factors else as_decay('decay', self.decay))

    def _signal(self) -> SignalPart:
        if self.learning_signal == 'random_feedback':
            return RandomFeedback(FixedRandomFeedback())
        return Modulated() if self.learning_signal == 'modulatory' else Symmetric()

    def _reach(self) -> str:
        if self.trace_filter == 'kappa' and self.learning_signal == 'modulatory':
            return 'local'
        return 'local' if self.trace_filter == 'none' else 'readout'


def _is_given(decay: Any, leaks: bool) -> bool:
    """Whether a decay was given; one of 0 says no more than its absence, but to a
    leak."""
    return decay is not None and (leaks or decay != 0)


def _no_part(part: str, value: Any, allowed: Any) -> ValueError:
    why = 'there is no such part'
    return ValueError(three_parts(f'{part}={value!r}', why, one_of(allowed, value)))
