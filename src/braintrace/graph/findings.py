"""What the compiler reports of a step: cuts, operations without a rule, states and
credit classes, as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..analysis.analysed import Analysed
from ..analysis.credit import APART, CreditClass
from ..analysis.dependence import of
from ..compat import Equation, open_jaxpr, sub_programs
from ..program import Path, StepProgram
from ..program.step import path_name, path_names
from ..source_lines import (
    described,
    library_line,
    operation_name,
    source_line,
    source_text,
)
from .diagnostics import LEVELS, CompilationRecord, DiagnosticKind, DiagnosticLevel
from .relations import Site


def findings(analysed: Analysed, sites: Sequence[Site]) -> Iterator[CompilationRecord]:
    """All findings, in program order within each kind."""
    program = analysed.dependence.program
    places = _places(program)
    yield from _cut_records(analysed, places)
    yield from _crossing_records(analysed, places)
    yield from _gap_records(analysed)
    yield from _opaque_records(analysed)
    yield from _other_records(analysed)
    for path in program.untouched_hidden:
        yield CompilationRecord(
            DiagnosticKind.UNUSED_STATE,
            DiagnosticLevel.NOTICE,
            f'{path_name(path)} is neither read nor written by the step',
        )
    for path in program.constant_hidden:
        yield CompilationRecord(
            DiagnosticKind.CONSTANT_STATE,
            DiagnosticLevel.NOTICE,
            f'{path_name(path)} is read and never written by the step: it is a '
            'constant, and has no trace',
            context={'state': path},
        )
    yield from _credit_records(analysed, sites)


def _places(program: StepProgram) -> dict[int, int]:
    """The number of the program's own equation that each equation is, or is inside
    of, by identity."""
    found: dict[int, int] = {}

    def enter(i: int, eqn: Equation) -> None:
        found[id(eqn)] = i
        for sub in sub_programs(eqn):
            for inner in open_jaxpr(sub.jaxpr).eqns:
                enter(i, inner)

    for i, eqn in enumerate(program.equations):
        enter(i, eqn)
    return found


def _cut_records(
    analysed: Analysed, places: dict[int, int]
) -> Iterator[CompilationRecord]:
    found: dict[tuple, CompilationRecord] = {}
    dependence = analysed.dependence
    for group, positions in zip(analysed.groups, analysed.positions, strict=True):
        hidden, old = group.hidden_paths, dependence.old(group.hidden)
        for cut in reversed(positions.found):
            bits = cut.bits.grads
            paths: list[Path | None] = [None] if bits & old else []
            paths += dict.fromkeys(
                p.path
                for p in dependence.program.parameters
                if bits & dependence.bit[p.invar]
            )
            # Equations of one operation and one line are reported once.
            name, line = cut.eqn.primitive.name, source_line(cut.eqn)
            for path in paths:
                key = (hidden, path, cut.reason, name, line)
                if key not in found:
                    what = path_names(hidden) if path is None else path_name(path)
                    where = f'{path_names(hidden)} cut at {described(cut.eqn)}'
                    found[key] = CompilationRecord(
                        DiagnosticKind.CUT,
                        DiagnosticLevel.NOTICE,
                        f'{what} → {where}: {cut.reason}',
                        name,
                        path,
                        hidden,
                        {
                            'source': line,
                            'library': library_line(cut.eqn),
                            'operand': cut.operand,
                            'elements': cut.elements,
                            'equations': [],
                        },
                    )
                equations = found[key].context['equations']
                equation = places.get(id(cut.eqn))
                if equation is not None and equation not in equations:
                    equations.append(equation)
    yield from found.values()


def _crossing_records(
    analysed: Analysed, places: dict[int, int]
) -> Iterator[CompilationRecord]:
    credit = analysed.credit
    for g, group in enumerate(analysed.groups):
        for other, live in enumerate(credit.live_groups):
            eqn = credit.passage(g, other) if live and other != g else None
            if eqn is None:
                continue
            target = path_names(analysed.groups[other].hidden_paths)
            apart = credit.is_apart(g, other)
            yield CompilationRecord(
                DiagnosticKind.CUT,
                DiagnosticLevel.WARNING if apart else DiagnosticLevel.NOTICE,
                f'{path_names(group.hidden_paths)} → {target} cut at '
                f'{described(eqn)}: another group' + (f' {APART}' if apart else ''),
                eqn.primitive.name,
                None,
                group.hidden_paths,
                {'source': source_line(eqn), 'equations': [places[id(eqn)]]},
            )


def _gap_records(analysed: Analysed) -> Iterator[CompilationRecord]:
    reported = set()
    for group, found in zip(analysed.groups, analysed.positions, strict=True):
        for eqn, kind in found.gaps:
            name, line = eqn.primitive.name, source_line(eqn)
            if (name, line) in reported:
                continue
            reported.add((name, line))
            probed = kind == 'elementwise'
            taken = (
                'a numerical probe found it element-wise'
                if probed
                else 'it is taken to mix positions and its operands are cut'
            )
            yield CompilationRecord(
                DiagnosticKind.PROBED if probed else DiagnosticKind.MISSING_RULE,
                DiagnosticLevel.NOTICE if probed else DiagnosticLevel.WARNING,
                f'primitive {name!r} at {source_text(eqn)} has no rule: {taken}; '
                'say how it treats positions with '
                f'braintrace.register_primitive({name!r}, ...)',
                name,
                None,
                group.hidden_paths,
                {'source': line},
            )


def _opaque_records(analysed: Analysed) -> Iterator[CompilationRecord]:
    for eqn, _ in analysed.opaque:
        name = eqn.primitive.name
        instead = 'give it one with jax.custom_vjp, or write it in JAX'
        yield CompilationRecord(
            DiagnosticKind.NOT_DIFFERENTIABLE,
            DiagnosticLevel.WARNING,
            f'{operation_name(name)} at {source_text(eqn)} has no reverse derivative: '
            f'no credit passes it; {instead}',
            name,
            context={'source': source_line(eqn)},
        )


def _other_records(analysed: Analysed) -> Iterator[CompilationRecord]:
    dependence = analysed.dependence
    for state in analysed.credit.live_others:
        bits = of(dependence.total, state.outvar).grads
        hidden = tuple(
            h.path
            for h in dependence.program.hidden
            if bits & dependence.new_bit[h.outvar]
        )
        yield CompilationRecord(
            DiagnosticKind.OTHER_STATE,
            DiagnosticLevel.NOTICE,
            f'{path_name(state.path)} carries differentiable information from step '
            'to step but is not a '
            'hidden state: credit through it ends with the step; a '
            'brainstate.HiddenState keeps it',
            hidden_paths=hidden,
            context={'state': state.path},
        )


def _credit_records(
    analysed: Analysed, sites: Sequence[Site]
) -> Iterator[CompilationRecord]:
    for parameter, found in analysed.credit.classes.items():
        own = (s for s in sites if parameter in s.parameters)
        hidden = dict.fromkeys(p for s in own for p in s.connected_hidden_paths)
        yield _credit_record(parameter.path, parameter.name, found, tuple(hidden))
    never_read = CreditClass('none', 'the step never reads it', False)
    for path in analysed.dependence.program.untouched_parameters:
        yield _credit_record(path, path_name(path), never_read, ())


def _credit_record(
    path: Path, name: str, found: CreditClass, hidden: tuple[Path, ...]
) -> CompilationRecord:
    return CompilationRecord(
        DiagnosticKind.CREDIT,
        LEVELS.get(found.credit, DiagnosticLevel.INFO),
        f'{name}: {found.credit} ({found.reason})',
        None,
        path,
        hidden,
        {'name': name, **found._asdict()},
    )
