"""A step program with all that is found in it: dependence, groups, positions, sites.

Everything above the analysis starts from the record that :func:`analyse` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..compat import Equation
from ..errors import CompilationError, three_parts
from ..frontends.brainstate import path_mapping
from ..program import Hidden, Path, StepProgram
from ..program.step import path_names
from .credit import CreditAnalysis
from .cuts import Positions
from .dependence import StepDependence, check_loops, of, opaque_equations
from .groups import HiddenGroup, group_hidden, make_group, positions_of_paths
from .sites import HiddenParamOpRelation, Site, by_operation, find_sites

GroupsByPath = dict[Path, HiddenGroup]


@dataclass(frozen=True)
class Analysed:
    """What holds for a step program.

    ``dependence``: what each value depends on. ``members``: the hidden states of each
    group. ``positions``: the labels and cuts of each group's paths. ``opaque``: what
    has no reverse derivative, and the bits whose credit ends there.
    """

    dependence: StepDependence
    opaque: list[tuple[Equation, int]]
    members: list[tuple[Hidden, ...]]
    groups: tuple[HiddenGroup, ...]
    positions: list[Positions]

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every use of a parameter, in program order; for reports."""
        return find_sites(self.dependence, self.groups, self.positions)

    @cached_property
    def relations(self) -> list[HiddenParamOpRelation]:
        """The sites by operation."""
        return by_operation(self.dependence, self.sites)

    @cached_property
    def credit(self) -> CreditAnalysis:
        """What judges the parameters."""
        return CreditAnalysis(self)

    @property
    def by_path(self) -> GroupsByPath:
        """The group of each hidden state."""
        return path_mapping(
            {path: group for group in self.groups for path in group.hidden_paths}
        )


def analyse(program: StepProgram) -> Analysed:
    """Dependence, groups and positions of a step program."""
    dependence = StepDependence(program)
    opaque = opaque_equations(dependence)
    check_loops(dependence, opaque)
    members = group_hidden(dependence)
    positions = [positions_of_paths(dependence, m, m, m) for m in members]
    pairs = enumerate(zip(members, positions, strict=True))
    groups = tuple(
        make_group(i, group, dependence, found) for i, (group, found) in pairs
    )
    return Analysed(dependence, opaque, members, groups, positions)


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
