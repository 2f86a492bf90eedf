"""The graph: groups, sites, perturbation and diagnostics of one model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..analysis.analysed import Analysed, analyse, check_hidden
from ..compat import Var
from ..errors import three_parts
from ..program import Path, StepProgram
from .diagnostics import CompilationRecord, DiagnosticKind
from .findings import findings
from .hidden_group import GroupsByPath, HiddenGroup, by_path, hidden_groups
from .hidden_perturbation import HiddenPerturbation, add_perturbation
from .module_info import extract
from .relation_records import relation_records
from .relations import HiddenParamOpRelation, by_operation, find_sites

if TYPE_CHECKING:
    from ..report import CompilationReport


class ETraceGraph(NamedTuple):
    """A compiled model: its hidden groups, the uses of its parameters, and the cuts."""

    module_info: Any
    hidden_groups: list[HiddenGroup]
    hid_path_to_group: GroupsByPath
    hidden_param_op_relations: list[HiddenParamOpRelation]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: tuple[CompilationRecord, ...] = ()

    def explain(
        self,
        *,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
        kind: DiagnosticKind | str | None = None,
    ) -> tuple[CompilationRecord, ...]:
        """The records in the order in which they were found. Filters can be
        combined."""
        kind = None if kind is None else DiagnosticKind(kind)
        return tuple(
            r
            for r in self.diagnostics
            if (weight_path is None or r.weight_path == tuple(weight_path))
            and (hidden_path is None or tuple(hidden_path) in r.hidden_paths)
            and (kind is None or r.kind is kind)
        )

    @property
    def report(self) -> CompilationReport:
        """The findings as a readable report."""
        # The report is above this layer, so it is imported only where it is made.
        from ..report import CompilationReport

        credits = self.explain(kind=DiagnosticKind.CREDIT)
        traced = dict.fromkeys(r.weight_path for r in credits if r.hidden_paths)
        first = {r.weight_path: r.context['credit'] for r in reversed(credits)}
        return CompilationReport(
            hidden_groups=self.hidden_groups,
            etrace_weights={path: first[path] for path in traced},
            excluded_weights={
                r.weight_path: r.context['reason']
                for r in credits
                if r.weight_path not in traced
            },
            dynamic_states=tuple(
                dict.fromkeys(
                    o.path
                    for o in self.module_info.program.others
                    if o.outvar is not None
                )
            ),
            diagnostics=self.diagnostics,
            model=self.module_info.name,
            program=self.module_info.program,
            sites=tuple(s for r in self.hidden_param_op_relations for s in r.sites),
        )

    def call_hidden_perturb(
        self,
        args: Sequence[Any],
        perturb_data: Sequence[Any],
        old_state_vals: Sequence[Any] | None = None,
    ) -> Any:
        """The outputs of the model with perturbed new hidden states. No state is
        written.

        ``args``: the inputs as compiled. Keyword arguments follow the others, in the
        order of their names. Raises an ``AssertionError`` if the graph was compiled
        without a perturbed program.
        """
        if self.hidden_perturb is None:
            raise AssertionError(
                three_parts(
                    'call_hidden_perturb on a graph without a perturbed program',
                    'it was compiled with include_hidden_perturb=False',
                    'compile_etrace_graph(model, *args)',
                )
            )
        flat = self.module_info.flat_inputs(args, old_state_vals, {})
        results = self.hidden_perturb.eval_jaxpr(flat, perturb_data)
        return self.module_info.outputs(results)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        lines = [f'ETraceGraph of {self.module_info!r}']
        lines += [f'  {g!r}' for g in self.hidden_groups] + [
            f'  {r!r}' for r in self.hidden_param_op_relations
        ]
        return '\n'.join(lines)


# ---------------------------------------------------------------- entry points

_busy = threading.local()


def compile_etrace_graph(
    model: Any,
    *model_args: Any,
    include_hidden_perturb: bool = True,
    **model_kwargs: Any,
) -> ETraceGraph:
    """Compile one step of a model into its eligibility-trace graph.

    ``model``: a ``brainstate.nn.Module``, which is called with the arguments that
    follow; a module of Flax NNX or Equinox (with ``state=`` if it takes its state as an
    argument); or a function ``step(params, state, *inputs) -> (state, out)`` with
    examples of its arguments. A step without parameters has a graph as well, but it
    cannot have a learner.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> gru = brainstate.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> compile_etrace_graph(gru, jnp.ones(3)).hidden_groups
    [HiddenGroup(0: h; positions (4,), 1 state(s) each)]
    """
    with compiling():
        info = extract(model, *model_args, **model_kwargs)
        check_hidden(info.program)
        return graph_of(info, analyse(info.program), include_hidden_perturb)


@contextmanager
def compiling() -> Iterator[None]:
    """Around the compilation of a model; a second one inside is refused."""
    if getattr(_busy, 'compiling', False):
        raise NotImplementedError(
            three_parts(
                'compile_etrace_graph called while a model is being compiled',
                'the step of a model cannot itself compile a model',
                'compile before the step, and call the compiled graph in it',
            )
        )
    _busy.compiling = True
    try:
        yield
    finally:
        _busy.compiling = False


def graph_of(
    info: Any, analysed: Analysed, include_hidden_perturb: bool = True
) -> ETraceGraph:
    """The graph of a step that was traced and analysed."""
    program: StepProgram = info.program
    groups = hidden_groups(analysed)
    sites = find_sites(analysed, groups)
    relations = by_operation(analysed.dependence, sites)
    records = tuple(findings(analysed, sites))
    # The step also returns every relation's x, and the inputs of every y→hidden program
    # and of every transition; no duplicates.
    wanted = [r.x_var for r in relations if r.x_var is not None]
    for relation in relations:
        for part in relation.y_to_hidden_group_jaxprs:
            wanted += [*part.invars, *part.constvars]
    wanted += [v for group in groups for v in group.transition_jaxpr_constvars]
    returned = {v for v in program.closed.jaxpr.outvars if isinstance(v, Var)}
    return ETraceGraph(
        module_info=info.add_jaxpr_outs(
            [v for v in dict.fromkeys(wanted) if v not in returned]
        ),
        hidden_groups=groups,
        hid_path_to_group=by_path(groups),
        hidden_param_op_relations=relations,
        hidden_perturb=add_perturbation(program) if include_hidden_perturb else None,
        diagnostics=(*records, *relation_records(program, groups, relations, records)),
    )
