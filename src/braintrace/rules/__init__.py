"""Learning rules as data: a trace, its recursion, its scope, the signal that reads it, a filter, a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from ..engine.recursion import Scheme
from ..errors import one_of, three_parts
from .numbers import as_count, as_decay, as_decays, as_seed
from .parts import FixedRandomFeedback, GradExpon, KappaFilter, SyntheticGradient

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
class Rule:
    """What a learner carries from block to block, how it goes on, what reads it, how far exact reverse mode reaches.

    ``window``: None for traces, 0 for one exact window over the whole sequence, k for exact windows of k steps.
    ``exact_when``: where the rule's gradient is BPTT's. ``cost``: memory of what it carries and time, in B batch,
    I inputs, H units, S states of a unit, T steps. ``use``: when to take it.
    ``multi_step``: every call is an exact window, of one step if it is not given more.
    """

    name: str
    trace: str = 'per_param'
    recursion: str = 'jacobian'
    scope: str = 'diagonal'
    signal: str = 'symmetric'
    kappa: float | None = None
    decay: tuple[float, float] | None = None
    leak: float | None = None
    sparse_n: int | None = None
    window: int | None = None
    feedback: FixedRandomFeedback | None = None
    predictor: SyntheticGradient | None = None
    exact_when: str = 'no position feeds another across time'
    cost: tuple[str, str] = ('B·I·H·S', 'T·B·I·H')
    use: str = ''
    deep: bool = False
    seed: int = 0
    multi_step: bool = False

    @property
    def scheme(self) -> Scheme:
        """The rule's traces, for the engine."""
        leak = {'jacobian': None, 'scalar_leak': self.leak, 'none': 0.0}[self.recursion]
        align = self.feedback.align if self.feedback else None
        signal = 'symmetric' if self.signal == 'bootstrapped' else self.signal
        return Scheme(self.decay, leak, self.kappa, signal, self.feedback, align)

    @property
    def has_exact_windows(self) -> bool:
        """True if reverse mode goes through the whole of every step, and not along kept paths only."""
        return self.multi_step or self.trace == 'none'

    @property
    def is_local(self) -> bool:
        """True if traces live at positions; otherwise one influence of parameters on all states is kept."""
        return self.scope == 'diagonal' and self.trace != 'random_projection'

    @property
    def cuts(self) -> bool:
        """True if credit from one position to another is cut at every step, as local traces do."""
        return self.is_local and self.trace != 'none'


_LOCAL = 'no position feeds another across time'
_FACTORS = ('B·(I + H·S)', 'T·B·I·H')
D_RTRL = Rule('D_RTRL', use='the default: spiking and gated units with memory of their own')
OSTL_RECURRENT = Rule('OSTLRecurrent', use='the same trace under the name of its paper')
BPTT = Rule('BPTT', 'none', window=0, exact_when='always', cost=('T·B·H·S', 'T·B·I·H'), use='the baseline; not online')
RTRL = Rule(
    'RTRL',
    scope='coupled',
    exact_when='always',
    cost=('B·H²·I·S', 'T·B·H³·I'),
    use='the exact reference, for small nets',
)


def pp_prop(decay_or_rank: float | int | tuple[float | int, float | int]) -> Rule:
    """Factorised traces: a decay in (0, 1), a rank r ≥ 1 that means (r - 1)/(r + 1), or a pair for (x, f)."""
    when = 'one step; or one decay, states without memory and inputs constant in time'
    use = 'many neurons: memory linear in them; sparse nets; less where adaptation is the memory'
    decay = as_decays('decay_or_rank', decay_or_rank)
    return Rule('pp_prop', 'io_factorized', decay=decay, exact_when=when, cost=_FACTORS, use=use)


def ostl_feedforward(decay_or_rank: float | int | tuple[float | int, float | int]) -> Rule:
    """Factorised traces that decay by a number in place of D."""
    when = 'one step; or units that leak by the decay, with no other memory and a drive that enters linearly'
    return Rule(
        'OSTLFeedforward',
        'io_factorized',
        'scalar_leak',
        leak=1.0,
        decay=as_decays('decay_or_rank', decay_or_rank),
        exact_when=when,
        cost=_FACTORS,
        use='feed-forward spiking layers',
    )


def ottt(leak: float) -> Rule:
    """A presynaptic trace that leaks; the postsynaptic side is that of the step."""
    leak = as_decay('leak', leak)
    when = 'units that leak by `leak`, with no other memory and a drive that enters linearly'
    cost, use = ('B·I', 'T·B·I·H'), 'feed-forward spiking layers: the least memory'
    return Rule('OTTT', 'io_factorized', 'none', decay=(leak, 0.0), exact_when=when, cost=cost, use=use)


def rflo(leak: float, feedback: str | FixedRandomFeedback = 'symmetric', key: Any = 0) -> Rule:
    """One trace a parameter that leaks by a number in place of D; errors come back by the read-out or by others."""
    fixed = _feedback(feedback, key)
    when = 'units that leak by `leak`, with no other memory and no weights between them'
    return Rule(
        'RFLO',
        'per_param',
        'scalar_leak',
        signal='random_feedback' if fixed else 'symmetric',
        leak=as_decay('leak', leak),
        feedback=fixed,
        exact_when=f'{when}, symmetric feedback' if fixed else when,
        use='leaky rate units; a comparison',
    )


def eprop(kappa: float | KappaFilter | None, feedback: str | FixedRandomFeedback, key: int) -> Rule:
    """The local trace, low-passed, read by the error at the read-out: sent back by its own weights or by others."""
    kappa, fixed = _kappa(kappa), _feedback(feedback, key)
    when = f'{_LOCAL}, symmetric feedback and no filter' if fixed or kappa else _LOCAL
    return Rule(
        'EProp',
        signal='random_feedback' if fixed else 'symmetric',
        kappa=kappa,
        feedback=fixed,
        exact_when=when,
        use='biological plausibility: no weights sent back, leaky read-outs',
    )


def snap(n: int) -> Rule:
    """The influence of a parameter on the states that it reaches within n steps."""
    n = as_count('n', n)
    when = 'no parameter reaches more states than it does within `n` steps'
    cost = ('B·I·H·S·(states within n steps)', 'T·B·H³·I')
    use = 'small or sparse nets whose units feed each other'
    return Rule(f'SnAp({n})', scope='sparse_n', sparse_n=n, exact_when=when, cost=cost, use=use)


def uoro(seed: int) -> Rule:
    """One random direction stands for the influence on all states; right in the mean."""
    cost = ('I·H + B·H·S', 'T·B·I·H')
    when = 'in the mean over seeds'
    use = 'unbiased credit across positions at the cost of noise; many small updates'
    return Rule(
        'UORO', 'random_projection', scope='coupled', exact_when=when, cost=cost, use=use, seed=as_seed('seed', seed)
    )


def three_factor(kappa: float | KappaFilter | None) -> Rule:
    """The local trace, read by the caller's modulator in place of the loss."""
    kappa = _kappa(kappa)
    when = 'the modulator is ∂loss/∂h, no filter, and no position feeds another across time'
    use = 'rewards and neuromodulators in place of a loss'
    return Rule('ThreeFactor', signal='modulatory', kappa=kappa, exact_when=when, use=use)


def dni(window: int, predictor: SyntheticGradient) -> Rule:
    """Exact windows; a learned predictor sends credit back from what comes after each."""
    window = as_count('window', window)
    if not (callable(predictor) and hasattr(predictor, 'init') and hasattr(predictor, 'lesson')):
        made = 'SyntheticGradient(width=64, rate=1.0)'
        raise ValueError(three_parts(f'predictor={predictor!r}', 'it has no init, lesson and call', made))
    when = 'the predictor is right'
    return Rule(
        f'DNI({window})',
        'none',
        signal='bootstrapped',
        window=window,
        predictor=predictor,
        exact_when=when,
        cost=('window·B·H·S', 'T·B·I·H'),
        use='credit from the future without waiting for it',
    )


def tbptt(k: int) -> Rule:
    """Truncated BPTT: exact inside windows of k steps, nothing across them."""
    k = as_count('k', k)
    when, cost = 'no credit crosses a window', ('k·B·H·S', 'T·B·I·H')
    return Rule(f'TBPTT({k})', 'none', window=k, exact_when=when, cost=cost, use='the usual compromise; a baseline')


@dataclass(frozen=True)
class ETraceConfig:
    """A learning rule put together from its parts.

    ``decay``: of factorised traces (a decay, a rank, or a pair) or the number of a scalar leak.
    ``kappa=0.0`` means no filter: it is the same configuration as one with ``trace_filter='none'``.
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
            if getattr(self, part) not in allowed:
                raise ValueError(
                    three_parts(
                        f'{part}={getattr(self, part)!r}', 'there is no such part', f'one of {", ".join(allowed)}'
                    )
                )
        if self.kappa is not None and as_decay('kappa', self.kappa) == 0:
            object.__setattr__(self, 'trace_filter', 'none')
            object.__setattr__(self, 'kappa', None)
        for wrong, reason, instead in self._contradictions():
            if wrong:
                raise ValueError(three_parts(self.name, reason, instead))
        self.rule  # noqa: B018 - refuses numbers out of range

    @property
    def name(self) -> str:
        """The parts that are not the default ones."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f'ETraceConfig({_written(given)})'

    def _contradictions(self) -> list[tuple[Any, str, str]]:
        """(whether it is one, why it cannot work, what to write instead)."""
        factors, projection = (self.trace_factorization == kind for kind in ('io_factorized', 'random_projection'))
        kappa, bootstrapped = self.trace_filter == 'kappa', self.learning_signal == 'bootstrapped'
        full = self.recurrence_scope != 'diagonal' or projection
        windows = self.update_schedule == 'window'
        return [
            (
                kappa != (self.kappa is not None),
                'a filter and its kappa go together',
                "trace_filter='kappa', kappa=0.9",
            ),
            (
                kappa and (factors or full or windows or self.trace_factorization == 'none'),
                'the filter acts on one trace for each parameter and position',
                "trace_factorization='per_param', recurrence_scope='diagonal'",
            ),
            (
                full and self.temporal_recursion != 'jacobian',
                'states that feed each other do so by their Jacobian',
                "temporal_recursion='jacobian'",
            ),
            (
                full and self.learning_signal != 'symmetric',
                'an influence on all states is read by the derivative of the loss',
                "learning_signal='symmetric'",
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
                self.trace_factorization == 'none' and self.recurrence_scope != 'diagonal',
                'a window is exact in all states as it is',
                "recurrence_scope='diagonal'",
            ),
            (
                self.trace_factorization == 'none' and self.temporal_recursion != 'jacobian',
                'without a trace nothing goes on from step to step',
                "temporal_recursion='jacobian'",
            ),
            (
                self.decay is not None and (full or self.trace_factorization == 'none'),
                'neither an influence on all states nor a window decays',
                'no decay',
            ),
            (
                (self.recurrence_scope == 'sparse_n') != (self.sparse_n is not None),
                'the sparse scope and its number of steps go together',
                "recurrence_scope='sparse_n', sparse_n=1",
            ),
            (
                factors and self.decay is None,
                'factors decay',
                'decay=0.9',
            ),
            (
                self.trace_factorization == 'per_param'
                and (self.temporal_recursion == 'scalar_leak') != (self.decay is not None),
                'a scalar leak and its number go together',
                "temporal_recursion='scalar_leak', decay=0.9",
            ),
            (
                windows != (self.window_size is not None),
                'windows and their size go together',
                "update_schedule='window', window_size=20",
            ),
            (
                (windows or self.update_schedule == 'sequence_end') != (self.trace_factorization == 'none'),
                'exact windows need no trace, and without a trace there are only windows',
                "trace_factorization='none' with update_schedule='window' or 'sequence_end'",
            ),
            (
                bootstrapped and not windows,
                'a predictor stands at the end of a window',
                "trace_factorization='none', update_schedule='window', window_size=20",
            ),
            (
                self.trace_factorization == 'none' and self.learning_signal in ('random_feedback', 'modulatory'),
                'that signal reads a trace',
                "trace_factorization='per_param'",
            ),
        ]

    @property
    def rule(self) -> Rule:
        """The rule of these parts."""
        factors = self.trace_factorization == 'io_factorized'
        decay = as_decays('decay', self.decay) if factors else None
        number = None if factors or self.decay is None else as_decay('decay', self.decay)
        window = None if self.window_size is None else as_count('window_size', self.window_size)
        if decay is not None and self.temporal_recursion == 'none':
            decay = (decay[0], 0.0)
        return Rule(
            self.name,
            self.trace_factorization,
            self.temporal_recursion,
            self.recurrence_scope,
            self.learning_signal,
            None if self.kappa is None else as_decay('kappa', self.kappa),
            decay,
            1.0 if factors else number,
            None if self.sparse_n is None else as_count('sparse_n', self.sparse_n),
            0 if self.update_schedule == 'sequence_end' else window,
            FixedRandomFeedback() if self.learning_signal == 'random_feedback' else None,
            SyntheticGradient() if self.learning_signal == 'bootstrapped' else None,
            'as its parts are',
        )


def _feedback(value: str | FixedRandomFeedback, key: Any) -> FixedRandomFeedback | None:
    """The weights that errors come back by, if not the read-out's own."""
    kinds = {'symmetric': None, 'random': FixedRandomFeedback(key), 'adaptive': FixedRandomFeedback(key, align=0.999)}
    if isinstance(value, FixedRandomFeedback):
        return value
    if not isinstance(value, str) or value not in kinds:
        allowed = f'one of {", ".join(map(repr, kinds))}, or FixedRandomFeedback(key, scale, align)'
        reason = 'the weights back are drawn, one array for each read-out and of its shape'
        raise ValueError(three_parts(f'feedback={value!r}', reason, allowed))
    return kinds[value]


def _kappa(value: float | KappaFilter | None) -> float | None:
    value = value.kappa if isinstance(value, KappaFilter) else value
    if value is None:
        return None
    # A filter with κ = 0 changes nothing and would only double the traces.
    return as_decay('kappa_filter_decay', value) or None


def _written(given: dict[str, Any]) -> str:
    return ', '.join(f'{k}={v!r}' for k, v in given.items())


PRESETS = {
    'd_rtrl': D_RTRL,
    'pp_prop': pp_prop(0.9),
    'es_d_rtrl': pp_prop(0.9),
    'eprop': eprop(None, 'symmetric', 0),
    'ostlrecurrent': OSTL_RECURRENT,
    'ostlfeedforward': ostl_feedforward(0.9),
    'ottt': ottt(0.9),
    'rflo': rflo(0.9),
    'snap': snap(1),
    'rtrl': RTRL,
    'uoro': uoro(0),
    'threefactor': three_factor(None),
    'dni': dni(10, SyntheticGradient()),
    'bptt': BPTT,
    'tbptt': tbptt(20),
}
"""Every rule by name, with the options it has by default."""


def named(name: str) -> str:
    """The name under which a rule is known, from any way to write it."""
    plain = name.lower().replace('-', '_')
    found = next((n for n in (plain, plain.replace('_', '')) if n in PRESETS), None)
    if found is None:
        raise ValueError(three_parts(f'rule={name!r}', 'there is no such rule', one_of(PRESETS, name)))
    return found
