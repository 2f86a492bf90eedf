"""Operations without a reverse derivative: credit ends there."""

from __future__ import annotations

from collections.abc import Iterator

from ..compat import (
    Equation,
    is_opaque,
    is_var,
    open_jaxpr,
    structure,
    sub_programs,
)
from ..errors import CompilationError, three_parts
from ..own_primitives import is_whole_cut
from ..source_lines import source_text
from .dependence import of, union
from .step_dependence import StepDependence


def opaque_equations(dependence: StepDependence) -> list[tuple[Equation, int]]:
    """What has no reverse derivative, and the bits whose credit ends there."""
    equations = dependence.program.equations
    source = {e.outvars[0]: e.invars[0] for e in equations if is_whole_cut(e)}
    found = []
    for eqn in equations:
        read = [source.get(v, v) for v in eqn.invars if is_var(v)]
        bits = union(of(dependence.total, v) for v in read).grads
        found += [(e, bits) for e in _opaque_in(eqn) if bits]
    return found


def check_loops(dependence: StepDependence, opaque: list[tuple[Equation, int]]) -> None:
    """Raise if credit is lost in a loop of unknown length.

    Such loops are followed, except where they print or call Python code.
    """
    hidden = dependence.program.hidden
    wanted = dependence.parameters | dependence.old(hidden) | dependence.new(hidden)
    for eqn, bits in opaque:
        if structure(eqn) == 'while' and bits & wanted:
            raise CompilationError(
                three_parts(
                    f'a while loop with side effects at {source_text(eqn)}',
                    'parameters or hidden states act on its results, and reverse mode '
                    'runs its rounds again, so it would print or call back again too',
                    'the loop without jax.debug or callbacks in it; a loop of fixed '
                    'length (jax.lax.scan, fori_loop with static bounds); or '
                    'jax.lax.stop_gradient on what it reads, if no gradient is needed',
                )
            )


def _opaque_in(eqn: Equation) -> Iterator[Equation]:
    """What has no reverse derivative in an equation: itself, or equations of its body
    where no rule of its own does."""
    if is_opaque(eqn):
        yield eqn
    elif structure(eqn) != 'custom':
        for sub in sub_programs(eqn):
            for inner in open_jaxpr(sub.jaxpr).eqns:
                yield from _opaque_in(inner)
