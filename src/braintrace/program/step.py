"""The step program: jaxpr plus the role of every input and output.

The front ends make it, the analysis reads it. Nothing here depends on a framework: a
state object is opaque and kept only so that records can return it to the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..compat import Atom, ClosedJaxpr, Var, changed, copy_equation, is_var, new_var
from ..errors import three_parts

Path = tuple[Any, ...]
"""Keys that lead to a state in its model, e.g. ``('layers', 0, 'neuron', 'V')``."""
Leaf = tuple[Any, ...]
"""Keys that lead to one array inside the value of a state; empty for a plain array."""


@dataclass(frozen=True)
class Hidden:
    """A hidden state: its value at t depends on its value at t-1 and carries credit."""

    path: Path
    invar: Var
    outvar: Atom
    state: Any
    varshape: tuple[int, ...]

    @property
    def has_trailing_axis(self) -> bool:
        """Whether its last axis has several states of one position."""
        return self.invar.aval.shape != self.varshape

    @property
    def positions(self) -> np.ndarray:
        """Position of every element: states kept on a trailing axis share theirs."""
        numbers = np.arange(int(np.prod(self.varshape)), dtype=np.int32).reshape(
            self.varshape
        )
        if not self.has_trailing_axis:
            return numbers
        return np.broadcast_to(numbers[..., None], self.invar.aval.shape)


@dataclass(frozen=True)
class Parameter:
    """One array of a trainable parameter."""

    path: Path
    leaf: Leaf
    invar: Var
    state: Any = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Path and leaf in one word."""
        return path_name(self.path + self.leaf)


@dataclass(frozen=True)
class OtherState:
    """One array of a state that is neither hidden nor a parameter; ``outvar`` is None
    if only read."""

    path: Path
    leaf: Leaf
    invar: Var
    outvar: Atom | None


@dataclass(frozen=True)
class StepProgram:
    """One time step in normal form, with the role of every variable."""

    closed: ClosedJaxpr
    inputs: tuple[Var, ...]
    parameters: tuple[Parameter, ...]
    hidden: tuple[Hidden, ...]
    others: tuple[OtherState, ...]
    outputs: tuple[Atom, ...]
    constant_hidden: tuple[Path, ...] = ()
    """Hidden states of the model that the step reads and never writes; they are among
    ``others``."""
    untouched_hidden: tuple[Path, ...] = ()
    """Hidden states of the model that the step neither reads nor writes."""
    untouched_parameters: tuple[Path, ...] = ()
    """Parameters of the model that the step never reads."""

    @property
    def equations(self) -> Sequence[Any]:
        """Equations in program order."""
        return self.closed.jaxpr.eqns


def path_name(path: Path) -> str:
    """A path as one readable word: ``layers.0.weight``."""
    return '.'.join(str(key) for key in path) or '<value>'


def path_names(paths: Iterable[Path]) -> str:
    """Several paths, as reports and errors write them."""
    return ', '.join(map(path_name, paths))


def check_shapes(closed: ClosedJaxpr, values: Sequence[Any]) -> None:
    """Raise unless the values have the shapes of the program's inputs."""
    expected, got = (
        [v.aval.shape for v in closed.jaxpr.invars],
        [np.shape(x) for x in values],
    )
    if got != expected:
        raise ValueError(
            three_parts(
                f'a call with arrays of shapes {got}',
                f'the step was compiled for {expected}',
                'inputs and states of the compiled shapes, or compile again with the '
                'new ones',
            )
        )


def distinct_outputs(closed: ClosedJaxpr, places: Sequence[int]) -> ClosedJaxpr:
    """Give each of these outputs a variable of its own that an equation defines, and
    every constant one a variable.

    A state passed through unchanged, set to a constant, or set to the same value as
    another state becomes a copy, so that a variable stands for one new state only.
    """
    jaxpr = closed.jaxpr
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    outvars, copies = list(jaxpr.outvars), []
    taken: set[Var] = set()
    for i, out in enumerate(outvars):
        if not is_var(out) or (i in places and (out not in made or out in taken)):
            outvars[i] = new_var(out.aval)
            copies.append(copy_equation(out, outvars[i]))
        if i in places:
            taken.add(outvars[i])
    return changed(closed, outvars=outvars, equations=[*jaxpr.eqns, *copies])
