"""Values inside a program that depend on none of its inputs: index arrays, masks,
starts of slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..compat import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    consts_of,
    evaluate_equation,
    is_var,
    open_jaxpr,
)


class Constants:
    """Folds constants on demand; ``given`` are inputs of a body that stand for atoms of
    the program around it."""

    def __init__(
        self,
        jaxpr: Any,
        given: Mapping[Var, Atom] = {},
        around: Constants | None = None,
    ):
        body: Jaxpr = open_jaxpr(jaxpr)
        # A step that closes over an array of a jit around it has that tracer as a
        # constant: fixed during the step, but its value is not known here.
        self.values: dict[Var, Any] = {
            v: value
            for v, value in zip(body.constvars, consts_of(jaxpr), strict=False)
            if not isinstance(value, jax.core.Tracer)
        }
        self.around = around
        self.given = {
            v: atom
            for v, atom in given.items()
            if around is not None and around.knows(atom)
        }
        self.producer: dict[Var, Equation] = {}
        for eqn in body.eqns:
            if not eqn.effects and all(self.knows(v) for v in eqn.invars):
                self.producer.update(dict.fromkeys(eqn.outvars, eqn))

    def knows(self, atom: Atom) -> bool:
        """True for an atom whose value is constant."""
        return (
            not is_var(atom)
            or atom in self.values
            or atom in self.given
            or atom in self.producer
        )

    def __call__(self, atom: Atom) -> np.ndarray | None:
        """The value of a constant atom; None for the others."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if not self.knows(atom):
            return None
        if atom not in self.values:
            if atom in self.given and self.around is not None:
                self.values[atom] = self.around(self.given[atom])
            else:
                eqn = self.producer[atom]
                operands = [self(v) for v in eqn.invars]
                with jax.ensure_compile_time_eval():
                    self.values.update(
                        zip(eqn.outvars, evaluate_equation(eqn, operands), strict=True)
                    )
        return np.asarray(self.values[atom])
