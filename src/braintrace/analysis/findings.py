"""What the compiler reports of a step: cuts, operations without a rule, states and
credit classes, as records."""

from __future__ import annotations

from collections.abc import Iterator

from ..compat import Equation, open_jaxpr, sub_programs
from ..program import Path
from ..program.step import path_name, path_names
from ..source_lines import (
    described,
    library_line,
    operation_name,
    source_line,
    source_text,
)
from .analysed import Analysed
from .credit import CreditAnalysis, CreditClass
from .diagnostics import LEVELS, CompilationRecord, DiagnosticKind, DiagnosticLevel


def findings(analysed: Analysed) -> Iterator[CompilationRecord]:
    """All findings, in program order within each kind."""
    credit = analysed.credit
    yield from _cut_records(credit)
    yield from _gap_records(credit)
    yield from _other_records(credit)
    for path in credit.dependence.program.untouched_hidden:
        yield CompilationRecord(
            DiagnosticKind.UNUSED_STATE,
            DiagnosticLevel.NOTICE,
            f'{path_name(path)} is neither read nor written by the step',
        )
    for path in credit.dependence.program.constant_hidden:
        yield CompilationRecord(
            DiagnosticKind.CONSTANT_STATE,
            DiagnosticLevel.NOTICE,
            f'{path_name(path)} is read and never written by the step: it is a '
            'constant, and has no trace',
            context={'state': path},
        )
    yield from _credit_records(analysed)


def _places(credit: CreditAnalysis) -> dict[int, int]:
    """The number of the program's own equation that each equation is, or is inside
    of, by identity."""
    found: dict[int, int] = {}

    def enter(i: int, eqn: Equation) -> None:
        found[id(eqn)] = i
        for sub in sub_programs(eqn):
            for inner in open_jaxpr(sub.jaxpr).eqns:
                enter(i, inner)

    for i, eqn in enumerate(credit.dependence.program.equations):
        enter(i, eqn)
    return found


def _cut_records(credit: CreditAnalysis) -> Iterator[CompilationRecord]:
    found: dict[tuple, CompilationRecord] = {}
    places = _places(credit)
    for g, positions in enumerate(credit.positions):
        hidden = tuple(credit.groups[g].hidden_paths)
        old = credit.dependence.old(credit.members[g])
        for cut in reversed(positions.found):
            paths: list[Path | None] = [None] if cut.bits.grads & old else []
            paths += dict.fromkeys(
                p.path
                for p in credit.dependence.program.parameters
                if cut.bits.grads & credit.dependence.bit[p.invar]
            )
            equation = places.get(id(cut.eqn))
            for path in paths:
                what = path_names(hidden) if path is None else path_name(path)
                where = f'{path_names(hidden)} cut at {described(cut.eqn)}'
                message = f'{what} → {where}: {cut.reason}'
                # Equations of one operation and one line are reported once.
                name, line = cut.eqn.primitive.name, source_line(cut.eqn)
                key = (hidden, path, cut.reason, name, line)
                if key not in found:
                    context = {
                        'source': line,
                        'library': library_line(cut.eqn),
                        'operand': cut.operand,
                        'elements': cut.elements,
                    }
                    found[key] = CompilationRecord(
                        DiagnosticKind.CUT,
                        DiagnosticLevel.NOTICE,
                        message,
                        name,
                        path,
                        hidden,
                        {**context, 'equations': []},
                    )
                equations = found[key].context['equations']
                if equation is not None and equation not in equations:
                    equations.append(equation)
    yield from found.values()
    for g, group in enumerate(credit.groups):
        for other, live in enumerate(credit.live_groups):
            eqn = credit.passage(g, other) if live and other != g else None
            if eqn is None:
                continue
            line, target = source_line(eqn), credit.groups[other].hidden_paths
            yield CompilationRecord(
                DiagnosticKind.CUT,
                DiagnosticLevel.NOTICE,
                f'{path_names(group.hidden_paths)} → {path_names(target)} cut at '
                f'{described(eqn)}: another group',
                eqn.primitive.name,
                None,
                tuple(group.hidden_paths),
                {'source': line, 'equations': [places[id(eqn)]]},
            )


def _gap_records(credit: CreditAnalysis) -> Iterator[CompilationRecord]:
    reported = set()
    for g, found in enumerate(credit.positions):
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
                tuple(credit.groups[g].hidden_paths),
                {'source': line},
            )
    yield from _opaque_records(credit)


def _opaque_records(credit: CreditAnalysis) -> Iterator[CompilationRecord]:
    for eqn, _ in credit.opaque:
        line, name = source_line(eqn), eqn.primitive.name
        instead = 'give it one with jax.custom_vjp, or write it in JAX'
        yield CompilationRecord(
            DiagnosticKind.NOT_DIFFERENTIABLE,
            DiagnosticLevel.WARNING,
            f'{operation_name(name)} at {source_text(eqn)} has no reverse derivative: '
            f'no credit passes it; {instead}',
            eqn.primitive.name,
            context={'source': line},
        )


def _other_records(credit: CreditAnalysis) -> Iterator[CompilationRecord]:
    for state in credit.live_others:
        bits = credit.grads([state.outvar])
        hidden = tuple(
            h.path
            for h in credit.dependence.program.hidden
            if bits & credit.dependence.new_bit[h.outvar]
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


def _credit_records(analysed: Analysed) -> Iterator[CompilationRecord]:
    for parameter, found in analysed.credit.classes.items():
        sites = (s for s in analysed.sites if parameter in s.parameters)
        hidden = dict.fromkeys(p for s in sites for p in s.connected_hidden_paths)
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
