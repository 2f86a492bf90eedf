"""The methods of a :class:`Learner` that show its report, its graph and its traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from ..arrays import bytes_of
from ..errors import printable
from ..graph.diagnostics import CUTS
from ..program import Path
from ..program.step import path_names
from ..solver.factors import FactorTrace
from ..text import size_text
from .batch import batch_of
from .carried import trace_table
from .parameter_gradients import gradients_of
from .spellings import member
from .weights import path_of_parameter

if TYPE_CHECKING:
    from ..report import CompilationReport
    from .learner import Learner


def report_of(learner: Learner) -> CompilationReport:
    """The findings of the compiler, the gradient that the rule gives each parameter,
    and the traces."""
    found, rule = learner.graph.report, learner.rule
    binding, solver = learner.step_solver()
    gives = gradients_of(rule, binding, solver, found.credits)
    first = {
        r.weight_path: gives[r.context['name']].kind for r in reversed(found.credits)
    }
    return replace(
        found,
        rule=rule,
        traces=trace_table(solver).shapes if rule.has_trace else {},
        gives=gives,
        etrace_weights={path: first[path] for path in found.etrace_weights},
        diagnostics=tuple(
            r for r in found.diagnostics if rule.cuts or r.kind not in CUTS
        ),
    )


def show_graph(
    learner: Learner, verbose: bool = True, return_msg: bool = False
) -> str | None:
    """Print the groups, the parameters with the gradient that the rule gives them, and
    the other states."""
    message = learner.executor.graph_text(learner.report.etrace_weights)
    if verbose:
        print(message)
    return message if return_msg else None


def get_etrace_of(learner: Learner, weight: Path | str | brainstate.State) -> Any:
    """The traces of one parameter in the form of the published package: one array for
    each operation, hidden group and array of the parameter, with the states on the last
    axis.

    :meth:`traces_of` returns them as they are stored.
    """
    return member(learner, 'get_etrace_of')(weight)


def traces_of(learner: Learner, weight: Path | str | brainstate.State) -> Any:
    """The traces of one parameter as they are stored, by name.

    A name consists of parameters, operation and hidden states. A trace is a dictionary
    with one array for each of these states, by the number of the state. For a rule with
    factorised traces, such as pp_prop, there are two such dictionaries: ε_x, with one
    array for each name, and ε_f.
    """
    learner.check_compiled()
    path = path_of_parameter(weight, learner.param_states)
    found = learner._carried.of_parameter(path)
    if learner.rule.decay is None:
        return found
    # Sites that cannot be factorised have a whole trace.
    factors = {k: t for k, t in found.items() if isinstance(t, FactorTrace)}
    whole = {k: t for k, t in found.items() if k not in factors}
    return (
        {k: t.x for k, t in factors.items()},
        {k: t.f for k, t in factors.items()} | whole,
    )


def write_report(learner: Learner, file: Any, steps: int | None = None) -> None:
    """Write the report as an HTML page. ``steps`` adds the memory that a sequence of
    this length needs."""
    memory = None if steps is None else learner.memory_plan(steps)
    learner.report.to_html(file, memory=memory)


def html(learner: Learner) -> str | None:
    """The report as notebooks show it, or None before compiling."""
    return learner.report._repr_html_() if learner._example else None


def described(learner: Learner) -> str:
    """The text that is printed for a learner."""
    rule, model = type(learner).__name__, type(learner.model).__name__
    if not learner.is_compiled:
        return f'{rule} learner of {model}, not compiled'
    states = {path: jnp.shape(x) for path, x in _arrays(learner.hidden_states)}
    batch = batch_of(learner._example, states)
    inputs = [str(jnp.shape(x)) for x in jax.tree.leaves(learner._example)]
    arrays = [x for _, x in _arrays(learner.param_states)]
    kinds = Counter(given.kind for given in learner.report.gradients.values())
    gives = ', '.join(f'{n} {kind}' for kind, n in kinds.items())
    groups = [
        f'{path_names(g.hidden_paths)} {g.varshape}'
        for g in learner.graph.hidden_groups
    ]
    traces = learner.traces.values()
    size = size_text(sum(bytes_of(trace.peek(tracked=False)) for trace in traces))
    lines = [
        f'{rule} learner of {model}' + (f', batch {batch}' if batch else ''),
        f'inputs      {", ".join(_some(inputs))}',
        f'parameters  {sum(map(jnp.size, arrays)):,} numbers in '
        f'{_count(len(arrays), "array")}: {gives}',
        f'groups      {"; ".join(_some(groups))}',
        f'traces      {size} in {_count(len(traces), "part")}',
    ]
    return '\n  '.join(map(printable, lines))


def _arrays(states: Mapping[Path, brainstate.State]) -> list[tuple[Path, Any]]:
    """Every array of some states, with the path of its state."""
    return [(p, x) for p, s in states.items() for x in jax.tree.leaves(s.value)]


def _count(n: int, noun: str) -> str:
    return f'{n} {noun}' + 's' * (n != 1)


def _some(texts: list[str], most: int = 4) -> list[str]:
    """The first few texts, and how many more there are."""
    more = [f'and {len(texts) - most} more'] if len(texts) > most else []
    return texts[:most] + more
