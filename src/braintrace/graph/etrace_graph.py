"""The graph: groups, sites, perturbation and diagnostics of one model."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..analysis.analysed import Analysed, GroupsByPath, analyse, check_hidden
from ..analysis.groups import HiddenGroup
from ..analysis.sites import HiddenParamOpRelation
from ..compat import ClosedJaxpr, Jaxpr, Var
from ..errors import three_parts
from ..frontends import extract
from ..program import Path, StepProgram
from ..program.bare import program_of_jaxpr
from .diagnostics import CompilationRecord, DiagnosticKind
from .findings import findings
from .hidden_perturbation import HiddenPerturbation, add_perturbation
from .relation_records import relation_records

if TYPE_CHECKING:
    from ..report import CompilationReport

Groups = tuple[list[HiddenGroup], GroupsByPath]


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
    relations = analysed.relations
    found = tuple(findings(analysed))
    return ETraceGraph(
        module_info=info.add_jaxpr_outs(
            _extra_outputs(program, analysed.groups, relations)
        ),
        hidden_groups=list(analysed.groups),
        hid_path_to_group=analysed.by_path,
        hidden_param_op_relations=relations,
        hidden_perturb=add_perturbation(program) if include_hidden_perturb else None,
        diagnostics=(
            *found,
            *relation_records(program, analysed.groups, relations, found),
        ),
    )


def _extra_outputs(
    program: StepProgram,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
) -> list[Var]:
    """Every relation's x, the inputs of every y→hidden program and of every transition;
    no duplicates."""
    wanted = [r.x_var for r in relations if r.x_var is not None]
    wanted += [
        v
        for r in relations
        for part in r.y_to_hidden_group_jaxprs
        for v in (*part.invars, *part.constvars)
    ]
    wanted += [v for group in groups for v in group.transition_jaxpr_constvars]
    returned = {v for v in program.closed.jaxpr.outvars if isinstance(v, Var)}
    return [v for v in dict.fromkeys(wanted) if v not in returned]


def find_hidden_groups_from_minfo(minfo: Any) -> Groups:
    """Hidden groups of a traced module, and the group of each path."""
    analysed = analyse(minfo.program)
    return list(analysed.groups), analysed.by_path


def find_hidden_groups_from_module(
    model: Any, *model_args: Any, **model_kwargs: Any
) -> Groups:
    """Hidden groups of a module, and the group of each path."""
    return find_hidden_groups_from_minfo(extract(model, *model_args, **model_kwargs))


def find_hidden_groups_from_jaxpr(
    jaxpr: Jaxpr | ClosedJaxpr,
    hidden_outvar_to_invar: Mapping[Var, Var],
    weight_invars: Iterable[Var],
    invar_to_hidden_path: Mapping[Var, Path],
    outvar_to_hidden_path: Mapping[Var, Path],
    path_to_state: Mapping[Path, Any],
) -> Groups:
    """Hidden groups of a jaxpr, and the group of each path, in the order of
    ``path_to_state``.

    The mappings are those of :class:`ModuleInfo`. ``path_to_state`` may also contain
    other states. The constants of an open jaxpr have no known values, so pass a closed
    jaxpr if indices are constants.
    """
    program = program_of_jaxpr(
        jaxpr,
        hidden_outvar_to_invar,
        weight_invars,
        invar_to_hidden_path,
        outvar_to_hidden_path,
        path_to_state,
    )
    analysed = analyse(program)
    return list(analysed.groups), analysed.by_path


def find_hidden_param_op_relations_from_minfo(
    minfo: Any, hid_path_to_group: GroupsByPath | None = None
) -> list[HiddenParamOpRelation]:
    """Relations of a traced module. With ``hid_path_to_group``, only relations into
    these groups."""
    relations = analyse(minfo.program).relations
    if hid_path_to_group is None:
        return relations
    return [
        r
        for r in relations
        if any(p in hid_path_to_group for p in r.connected_hidden_paths)
    ]


def find_hidden_param_op_relations_from_module(
    model: Any, *model_args: Any, **model_kwargs: Any
) -> list[HiddenParamOpRelation]:
    """Relations of a module."""
    return find_hidden_param_op_relations_from_minfo(
        extract(model, *model_args, **model_kwargs)
    )


def add_hidden_perturbation_from_minfo(minfo: Any) -> HiddenPerturbation:
    """The perturbed program of a traced module."""
    return add_perturbation(minfo.program)


def add_hidden_perturbation_in_module(
    model: Any, *model_args: Any, **model_kwargs: Any
) -> HiddenPerturbation:
    """The perturbed program of a module."""
    return add_perturbation(extract(model, *model_args, **model_kwargs).program)


def add_hidden_perturbation_in_jaxpr(
    closed_jaxpr: ClosedJaxpr,
    hidden_outvar_to_invar: Mapping[Var, Var],
    weight_invars: Iterable[Var],
    invar_to_hidden_path: Mapping[Var, Path],
    outvar_to_hidden_path: Mapping[Var, Path],
    path_to_state: Mapping[Path, Any],
) -> HiddenPerturbation:
    """The perturbed form of a jaxpr. Arguments are those of
    :func:`find_hidden_groups_from_jaxpr`."""
    return add_perturbation(
        program_of_jaxpr(
            closed_jaxpr,
            hidden_outvar_to_invar,
            weight_invars,
            invar_to_hidden_path,
            outvar_to_hidden_path,
            path_to_state,
        )
    )
