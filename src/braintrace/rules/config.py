"""A rule put together from parts by name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import one_of, three_parts
from ..solver import (
    Factorised,
    JacobianRecursion,
    Modulated,
    PerParameter,
    RandomFeedback,
    ScalarLeak,
    Symmetric,
)
from .numbers import as_count, as_decay, as_decays
from .parts import FixedRandomFeedback, SyntheticGradient
from .rule import Coupled, NoTrace, RandomProjection, Reach, Rule, TracePart, Window

PARTS = {
    'trace_factorization': ('per_param', 'io_factorized', 'random_projection', 'none'),
    'temporal_recursion': ('jacobian', 'scalar_leak', 'none'),
    'recurrence_scope': ('diagonal', 'coupled', 'sparse_n'),
    'learning_signal': ('symmetric', 'random_feedback', 'modulatory', 'bootstrapped'),
    'trace_filter': ('none', 'kappa'),
    'update_schedule': ('per_step', 'window', 'sequence_end'),
}
"""The values of every part of a rule."""


@dataclass(frozen=True)
class ETraceConfig:
    """A learning rule put together from its parts.

    ``decay``: of factorised traces (a decay, a rank, or a pair) or the number of a
    scalar leak. ``kappa=0.0`` means no filter: it is the same configuration as one with
    ``trace_filter='none'``.
    """

    trace_factorization: str = 'per_param'
    temporal_recursion: str = 'jacobian'
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
            if value not in allowed:
                raise ValueError(
                    three_parts(
                        f'{part}={value!r}',
                        'there is no such part',
                        one_of(allowed, value),
                    )
                )
        if self.kappa is not None and as_decay('kappa', self.kappa) == 0:
            object.__setattr__(self, 'trace_filter', 'none')
            object.__setattr__(self, 'kappa', None)
        for is_wrong, why, instead in self._contradictions():
            if is_wrong:
                raise ValueError(three_parts(self.name, why, instead))
        _ = (
            self.rule
        )  # refuses parts that do not fit together, and numbers out of range

    @property
    def name(self) -> str:
        """The parts that are not the default ones."""
        given = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f'{field.name}={value!r}')
        return f'ETraceConfig({", ".join(given)})'

    def _contradictions(self) -> list[tuple[bool, str, str]]:
        """(whether parts and numbers disagree, why, what to write instead)."""
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
            (factors and self.decay is None, 'factors decay', 'decay=0.9'),
            (
                kind == 'per_param' and leaks != (self.decay is not None),
                'a scalar leak and its number go together',
                "temporal_recursion='scalar_leak', decay=0.9",
            ),
            (
                windows != (self.window_size is not None),
                'windows and their size go together',
                "update_schedule='window', window_size=20",
            ),
            (
                self.learning_signal == 'bootstrapped' and not windows,
                'a predictor stands at the end of a window',
                "trace_factorization='none', update_schedule='window', window_size=20",
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
            self._window(),
            exact_when='as its parts are',
        )

    def _trace(self) -> TracePart:
        if self.trace_factorization == 'io_factorized':
            decay_x, decay_f = as_decays('decay', self.decay)
            forgets = self.temporal_recursion == 'none'
            return Factorised((decay_x, 0.0 if forgets else decay_f))
        if self.trace_factorization == 'random_projection':
            return RandomProjection()
        if self.trace_factorization == 'none':
            return NoTrace()
        if self.recurrence_scope == 'coupled':
            return Coupled()
        if self.recurrence_scope == 'sparse_n':
            return Reach(as_count('sparse_n', self.sparse_n))
        return PerParameter()

    def _recursion(self) -> JacobianRecursion | ScalarLeak:
        if self.temporal_recursion == 'jacobian':
            return JacobianRecursion()
        if self.temporal_recursion == 'none':
            return ScalarLeak(0.0)
        # Factors have a decay of their own, which takes the place of D.
        factors = self.trace_factorization == 'io_factorized'
        return ScalarLeak(1.0 if factors else as_decay('decay', self.decay))

    def _signal(self) -> Symmetric | RandomFeedback | Modulated:
        if self.learning_signal == 'random_feedback':
            return RandomFeedback(FixedRandomFeedback())
        return Modulated() if self.learning_signal == 'modulatory' else Symmetric()

    def _window(self) -> Window | None:
        if self.update_schedule == 'sequence_end':
            return Window()
        if self.window_size is None:
            return None
        bootstrapped = self.learning_signal == 'bootstrapped'
        size = as_count('window_size', self.window_size)
        return Window(size, SyntheticGradient() if bootstrapped else None)
