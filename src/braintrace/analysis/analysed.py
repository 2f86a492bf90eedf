"""A step program with all that is found in it: dependence, groups, positions, sites.

Everything above the analysis starts from the record that :func:`analyse` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..compat import Equation
from ..errors import CompilationError, three_parts
from ..program import Hidden, Path, StepProgram
from ..program.step import path_names
from .credit import CreditAnalysis
from .cuts import Positions
from .dependence import StepDependence, check_loops, of, opaque_equations
from .groups import Group, find_groups, positions_of_paths


@dataclass(frozen=True)
class Analysed:
    """What holds for a step program.

    ``dependence``: what each value depends on. ``opaque``: what has no reverse
    derivative, and the bits whose credit ends there. ``positions``: the labels and cuts
    of each group's paths.
    """

    dependence: StepDependence
    opaque: list[tuple[Equation, int]]
    groups: tuple[Group, ...]
    positions: list[Positions]

    @property
    def members(self) -> list[tuple[Hidden, ...]]:
        """The hidden states of each group."""
        return [group.hidden for group in self.groups]

    @cached_property
    def credit(self) -> CreditAnalysis:
        """What judges the parameters."""
        return CreditAnalysis(self)


def analyse(program: StepProgram) -> Analysed:
    """Dependence, groups and positions of a step program."""
    dependence = StepDependence(program)
    opaque = opaque_equations(dependence)
    check_loops(dependence, opaque)
    groups = find_groups(dependence)
    positions = [
        positions_of_paths(dependence, g.hidden, g.hidden, g.hidden) for g in groups
    ]
    return Analysed(dependence, opaque, tuple(groups), positions)


# ---------------------------------------------------------------- what is refused


def kept_in_other_states(program: StepProgram) -> list[Path]:
    """Paths of states whose new value depends on their own old value and on a
    parameter, and that are not hidden states."""
    dependence = StepDependence(program)
    found = []
    for other in program.others:
        if other.outvar is None:
            continue
        grads = of(dependence.total, other.outvar).grads
        if grads & dependence.bit[other.invar] and grads & dependence.parameters:
            found.append(other.path)
    return list(dict.fromkeys(found))


def check_hidden(program: StepProgram) -> None:
    """Raise unless the step writes a hidden state."""
    if not program.hidden:
        read = path_names(program.constant_hidden)
        kept = kept_in_other_states(program)
        if kept:
            names = path_names(kept)
            raise CompilationError(
                three_parts(
                    f'a model whose step writes no hidden state: {names} '
                    f'{"is" if len(kept) == 1 else "are"} kept from step to step in '
                    'another kind of state',
                    'eligibility traces belong to states that depend on their own past '
                    'values, and only a brainstate.HiddenState is one',
                    'brainstate.HiddenState in place of brainstate.State or '
                    f'brainstate.ShortTermState for {names}',
                )
            )
        fix = (
            'keep values that the next step needs in a brainstate.HiddenState; '
            'train a model without such values by jax.grad'
        )
        if read:
            last = program.constant_hidden[0][-1]
            fix = (
                f'write the new value into the state, self.{last}.value = ...; '
                f'self.{last} = ... would put an array in its place'
            )
        raise CompilationError(
            three_parts(
                'a model whose step writes no hidden state'
                + (f' and only reads {read}' if read else ''),
                'eligibility traces belong to states that depend on their own past '
                'values, and there are none',
                fix,
            )
        )


def check_parameters(program: StepProgram) -> None:
    """Raise unless the step reads a parameter: without one there is a graph, and
    nothing to train."""
    if not program.parameters:
        raise CompilationError(
            three_parts(
                'a model whose step reads no parameter',
                'there is nothing to train',
                'keep trainable values in a brainstate.ParamState that update reads',
            )
        )
