"""Traces: what a rule carries from step to step.

    PerParameter      a trace for each parameter and position
    Factorised        an input part and a state part for each use of a parameter
    Window            nothing; exact reverse mode inside windows
    Coupled           the influence of every parameter on every state, or on the states
                      that it reaches within n steps
    RandomProjection  one random direction in place of it

A new kind of trace is a subclass of :class:`TracePart` in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from ..compiled_step import CompiledStep, Tap
from ..solver import (
    BlockSolver,
    InfluenceColumns,
    InfluenceSolver,
    RankOneInfluence,
    RecursionPart,
    SignalPart,
    SiteFacts,
    Solved,
    Solver,
    Traces,
)
from ..solver.site_facts import same_decay
from .parts import SyntheticGradient

if TYPE_CHECKING:
    from .exactness import ParameterFacts


class TracePart:
    """What a rule carries, and the solver that carries it."""

    is_local: ClassVar[bool] = True
    """Traces belong to positions; otherwise one influence on all states is kept."""
    is_carried: ClassVar[bool] = True
    """Something is carried from call to call."""
    holds_memories: ClassVar[bool] = False
    """The memory of a read-out, or a filter, can be held beside it."""
    has_two_passes: ClassVar[bool] = False
    """A fresh sequence can be solved in reverse without it."""
    decay: tuple[float, float] | None = None
    """The decays (x, f) of factors."""

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`, those by default left out."""
        return {}

    @property
    def window(self) -> Window | None:
        """The windows of exact reverse mode, for a rule that has nothing else."""
        return None

    @property
    def exact_because(self) -> str:
        """Why a parameter of which it replaces nothing has the gradient of BPTT."""
        return ''

    def replaces(self, facts: ParameterFacts) -> str | None:
        """What it has in place of the exact gradient of a parameter, where no credit is
        cut inside a step."""
        return None

    def replaces_at(self, site: SiteFacts, recursion: RecursionPart) -> str | None:
        """What it has in place of the exact trace of one use of a parameter."""
        return None

    def refuses(
        self, recursion: RecursionPart, signal: SignalPart
    ) -> Iterator[tuple[str, str]]:
        """Why it cannot be combined with other parts, and the fix."""
        return iter(())

    def solver(
        self,
        step: CompiledStep,
        recursion: RecursionPart,
        signal: SignalPart,
        is_traced: Callable[[Tap], bool],
        dtype: Any,
        every_component: bool,
    ) -> Solver:
        """Solves sequences of a step, see :meth:`Rule.solver`."""
        traces = Traces(step, recursion, self.decay, is_traced, dtype, every_component)
        return BlockSolver(step, traces, signal)

    def init_state(self, groups: list[tuple[int, tuple[int, ...], Any]] | None) -> Any:
        """What it keeps besides, from call to call, at first; None for nothing.
        ``groups``: states per position, shape and type of every group, once they are
        known."""
        return None

    def next_state(self, state: Any, solved: Solved | None) -> Any:
        """The state after a gradient; ``solved``: what a sequence gave, if it was
        one."""
        return state


# ---------------------------------------------------------------- of a position


@dataclass(frozen=True)
class PerParameter(TracePart):
    """One trace for each weight and position it reaches."""

    holds_memories = has_two_passes = True


@dataclass(frozen=True)
class Factorised(TracePart):
    """An input part and a state part for each site, with decays (x, f); memory linear
    in units.

    A site that does not factorise keeps a trace for each weight.
    """

    decay: tuple[float, float] = field()  # no default, unlike that of other traces

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        return {'trace_factorization': 'io_factorized', 'decay': self.decay}

    def replaces_at(self, site: SiteFacts, recursion: RecursionPart) -> str | None:
        """The factors, unless their product is the exact trace."""
        if not site.factorised or self._is_exact(site, recursion):
            return None
        factors = 'the trace is factorised into an input part and a state part'
        if recursion.is_exact:
            return factors
        if self.decay[1] == 0:
            return (
                f'a trace of the input that decays by {self.decay[0]:g} replaces the '
                'trace of the states'
            )
        return f'{factors}, with a number in place of the Jacobian of the states'

    def _is_exact(self, site: SiteFacts, recursion: RecursionPart) -> bool:
        """Whether (Σ_s (α_f m)^(t-s) (1-α_f) f_s) · (Σ_s α_x^(t-s) x_s) / (1-α_f^t) is
        Σ_s λ^(t-s) f_s x_s.

        m is what multiplies the state part from step to step: λ itself, or 1 where a
        number replaces the Jacobian.
        """
        if site.leak is None:
            return False
        decay_x, decay_f = self.decay
        kept = site.leak if recursion.is_exact else 1.0
        # A steady f leaves the state part f itself if nothing of it decays, or if all
        # of it does.
        same_input = site.steady_path and same_decay(decay_x, site.leak)
        if same_input and (decay_f == 0 or kept == 1):
            return True
        return (
            site.steady_input
            and same_decay(decay_x, decay_f)
            and same_decay(kept * decay_f, site.leak)
        )


# ---------------------------------------------------------------- windows


@dataclass(frozen=True)
class Window(TracePart):
    """No trace: exact reverse mode inside windows of ``steps``; None for one over the
    whole sequence.

    ``predictor``: of the credit that the end of a window gets from what follows it.
    """

    steps: int | None = None
    predictor: SyntheticGradient | None = None

    is_carried = False

    @property
    def window(self) -> Window:
        """The windows themselves."""
        return self

    @property
    def exact_because(self) -> str:
        """That there is one window."""
        return (
            'reverse mode through all steps of a call; nothing is carried to the next '
            'call'
        )

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        if self.predictor is not None:
            return {'learning_signal': 'bootstrapped'}
        if self.steps is None:
            return {'trace_factorization': 'none', 'update_schedule': 'sequence_end'}
        return {
            'trace_factorization': 'none',
            'update_schedule': 'window',
            'window_size': self.steps,
        }

    def replaces(self, facts: ParameterFacts) -> str | None:
        """What stands for the credit of later windows."""
        if self.steps is None or not facts.temporal:
            return None
        after = (
            'a learned predictor stands for the credit of later ones'
            if self.predictor
            else 'later ones send no credit'
        )
        return f'exact inside windows of {self.steps} steps; {after}'

    def refuses(
        self, recursion: RecursionPart, signal: SignalPart
    ) -> Iterator[tuple[str, str]]:
        """Recursions and signals need a trace."""
        if not recursion.is_exact:
            yield (
                'without a trace nothing continues from step to step',
                "temporal_recursion='jacobian'",
            )
        if not signal.is_exact:
            yield 'that signal multiplies a trace', "trace_factorization='per_param'"

    def init_state(self, groups: list[tuple[int, tuple[int, ...], Any]] | None) -> Any:
        """The weights of the predictor."""
        if self.predictor is None or groups is None:
            return None
        return self.predictor.init(groups)

    def next_state(self, state: Any, solved: Solved | None) -> Any:
        """Weights changed by what a sequence gave."""
        if self.predictor is None or solved is None:
            return state
        return [w + c for w, c in zip(state, solved.predictor_update, strict=True)]


# ---------------------------------------------------------------- influences


def _only_exact(
    recursion: RecursionPart, signal: SignalPart
) -> Iterator[tuple[str, str]]:
    """Other recursions and signals belong to traces of positions."""
    if not recursion.is_exact:
        yield (
            'states that feed each other do so by their Jacobian',
            "temporal_recursion='jacobian'",
        )
    if not signal.is_exact:
        yield (
            'an influence on all states is read by the derivative of the loss',
            "learning_signal='symmetric'",
        )


@dataclass(frozen=True)
class Coupled(TracePart):
    """The influence of every parameter on every state, or on those that it reaches
    within n steps. Nothing is cut inside a step."""

    n: int | None = None

    is_local = False

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        if self.n is None:
            return {'recurrence_scope': 'coupled'}
        return {'recurrence_scope': 'sparse_n', 'sparse_n': self.n}

    @property
    def _within(self) -> str:
        return f'{self.n} step{"s" * (self.n != 1)}'

    @property
    def exact_because(self) -> str:
        """That no state is left out."""
        if self.n is None:
            return 'its influence on every state is carried'
        return f'every state it ever reaches, it reaches within {self._within}'

    def replaces(self, facts: ParameterFacts) -> str | None:
        """The states that are left out."""
        if self.n is None or facts.complete or not facts.temporal:
            return None
        return f'states that it reaches after more than {self._within} are left out'

    def refuses(
        self, recursion: RecursionPart, signal: SignalPart
    ) -> Iterator[tuple[str, str]]:
        """All but the exact ones."""
        return _only_exact(recursion, signal)

    def solver(
        self,
        step: CompiledStep,
        recursion: RecursionPart,
        signal: SignalPart,
        is_traced: Callable[[Tap], bool],
        dtype: Any,
        every_component: bool,
    ) -> Solver:
        """Carries the influence; the options of traces have no meaning here."""
        return InfluenceSolver(step, InfluenceColumns(step, self.n))


@dataclass(frozen=True)
class RandomProjection(TracePart):
    """One random direction in place of the influence on all states."""

    seed: int = 0

    is_local = False

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        return {
            'trace_factorization': 'random_projection',
            'recurrence_scope': 'coupled',
        }

    def replaces(self, facts: ParameterFacts) -> str | None:
        """The influence on all states."""
        if not facts.moves_states:
            return None
        return (
            'one random direction replaces the influence on all states: right in the '
            'mean, but noisy'
        )

    def refuses(
        self, recursion: RecursionPart, signal: SignalPart
    ) -> Iterator[tuple[str, str]]:
        """All but the exact ones."""
        return _only_exact(recursion, signal)

    def solver(
        self,
        step: CompiledStep,
        recursion: RecursionPart,
        signal: SignalPart,
        is_traced: Callable[[Tap], bool],
        dtype: Any,
        every_component: bool,
    ) -> Solver:
        """Carries the direction; the options of traces have no meaning here."""
        return InfluenceSolver(step, RankOneInfluence(step, self.seed))

    def init_state(self, groups: list[tuple[int, tuple[int, ...], Any]] | None) -> Any:
        """The number of gradients: signs differ from one to the next."""
        return jnp.zeros((), jnp.int32)

    def next_state(self, state: Any, solved: Solved | None) -> Any:
        """One gradient more."""
        return state + 1
