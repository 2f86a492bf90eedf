"""A step program from a bare jaxpr, given which of its variables are hidden states and
parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    Var,
    changed,
    close,
    consts_of,
    is_var,
    make_jaxpr,
    open_jaxpr,
)
from ..errors import three_parts
from .normal import normal_form
from .step import Hidden, Parameter, Path, StepProgram, distinct_outputs, path_name


def program_of_jaxpr(
    jaxpr: Jaxpr | ClosedJaxpr,
    hidden_outvar_to_invar: Mapping[Var, Var],
    weight_invars: Iterable[Var],
    invar_to_hidden_path: Mapping[Var, Path],
    outvar_to_hidden_path: Mapping[Var, Path],
    path_to_state: Mapping[Path, Any],
) -> StepProgram:
    """The step program of a jaxpr; its hidden states in the order of
    ``path_to_state``."""
    given = _closed(jaxpr)
    invars, outvars = list(given.jaxpr.invars), list(given.jaxpr.outvars)
    weights = list(weight_invars)
    pairs: dict[Path, tuple[Var, Var]] = {}
    for outvar, invar in hidden_outvar_to_invar.items():
        path = outvar_to_hidden_path[outvar]
        _check(
            path,
            invar in invars and invar_to_hidden_path.get(invar) == path,
            'the inputs',
        )
        _check(path, any(v is outvar for v in outvars), 'the outputs')
        _check(path, path in path_to_state, 'path_to_state')
        pairs[path] = invar, outvar
    paths = [path for path in path_to_state if path in pairs]
    places = {
        path: next(i for i, v in enumerate(outvars) if v is pairs[path][1])
        for path in paths
    }

    # In the normal form an output may be another variable than in the given program.
    closed = distinct_outputs(normal_form(given), list(places.values()))
    closed = _renamed(closed, [(i, pairs[path][1]) for path, i in places.items()])
    new = {path: closed.jaxpr.outvars[i] for path, i in places.items()}
    taken = {*weights, *(pairs[path][0] for path in paths)}
    return StepProgram(
        closed,
        inputs=tuple(v for v in closed.jaxpr.invars if v not in taken),
        parameters=tuple(
            Parameter(('weight', i), (), v) for i, v in enumerate(weights)
        ),
        hidden=tuple(
            Hidden(path, pairs[path][0], new[path], state, tuple(state.varshape))
            for path, state in path_to_state.items()
            if path in pairs
        ),
        others=(),
        outputs=tuple(closed.jaxpr.outvars),
    )


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants; those of an open one, whose values are not known,
    are its first inputs."""
    body, consts = open_jaxpr(jaxpr), consts_of(jaxpr)
    if len(consts) == len(body.constvars):
        return close(body, consts)
    return close(
        make_jaxpr([], [*body.constvars, *body.invars], body.outvars, body.eqns)
    )


def _renamed(closed: ClosedJaxpr, names: Sequence[tuple[int, Var]]) -> ClosedJaxpr:
    """The program with these outputs under these names, except for a name that an input
    has."""
    jaxpr = closed.jaxpr
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    name: dict[Atom, Var] = {jaxpr.outvars[i]: v for i, v in names if v not in inputs}
    if all(old is new for old, new in name.items()):
        return closed
    rename = lambda atoms: [name.get(v, v) if is_var(v) else v for v in atoms]
    equations = [
        e.replace(invars=rename(e.invars), outvars=rename(e.outvars))
        for e in jaxpr.eqns
    ]
    return changed(closed, outvars=rename(jaxpr.outvars), equations=equations)


def _check(path: Path, holds: bool, where: str) -> None:
    if not holds:
        raise ValueError(
            three_parts(
                f'hidden state {path_name(path)}, which is not among {where}',
                'every hidden state has an input and an output of the program, a '
                'path and a state object',
                'the mappings of one program, as extract_module_info gives them',
            )
        )
