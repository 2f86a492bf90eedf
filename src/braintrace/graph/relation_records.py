"""Findings by the names of the published package: which parameters are tied to which
groups, and why others are not.

Everything here is read from groups, sites and records of other kinds, so that code
which filters diagnostics by these names finds them, with the levels that they have
there. Reports show the same in other places, and do not count them as warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..compat import is_var, read_scan, structure
from ..program import Path, StepProgram
from ..program.step import path_name, path_names
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .hidden_group import HiddenGroup
from .relations import HiddenParamOpRelation

UNROLLED = 16
"""The length up to which the published package unrolls a loop."""


def relation_records(
    program: StepProgram,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
    found: Sequence[CompilationRecord],
) -> Iterator[CompilationRecord]:
    """The records of a program; ``found``: those of the credit analysis."""
    for path in (*program.untouched_parameters, *program.untouched_hidden):
        is_weight = path in program.untouched_parameters
        yield CompilationRecord(
            DiagnosticKind.STATE_MISMATCH,
            DiagnosticLevel.WARNING,
            f'{path_name(path)} is a state of the model that the step does not use',
            weight_path=path if is_weight else None,
            hidden_paths=() if is_weight else (path,),
            context={'direction': 'retrieved_not_in_compiled', 'state_path': path},
        )
    for group in groups:
        if len(group.hidden_paths) > 1:
            yield CompilationRecord(
                DiagnosticKind.HIDDEN_GROUP_MERGED,
                DiagnosticLevel.INFO,
                f'{path_names(group.hidden_paths)} reach each other position by '
                'position: one group',
                hidden_paths=tuple(group.hidden_paths),
                context={'hidden_group_indices': (group.index,)},
            )
    partial = set()
    for relation in relations:
        classes = relation.path_classification
        mixed = tuple(p for p, kind in classes.items() if kind == 'mixed')
        indices = tuple(group.index for group in relation.hidden_groups)
        into = ', '.join(map(str, indices))
        for path in dict.fromkeys(relation.trainable_paths.values()):
            name = path_name(path)
            if mixed and (path, mixed) not in partial:
                partial.add((path, mixed))
                yield CompilationRecord(
                    DiagnosticKind.RELATION_PARTIAL_PATH,
                    DiagnosticLevel.WARNING,
                    f'{name} reaches {path_names(mixed)} directly and by a way that is '
                    'cut',
                    relation.primitive,
                    path,
                    mixed,
                    {'classification': 'mixed'},
                )
            yield CompilationRecord(
                DiagnosticKind.RELATION_INCLUDED,
                DiagnosticLevel.INFO,
                f'{name} → {relation.primitive} → group {into}',
                relation.primitive,
                path,
                tuple(relation.connected_hidden_paths),
                {'hidden_group_indices': indices, 'path_classification': classes},
            )
    yield from _untied(program, relations, found)
    yield from _followed(program)


def _untied(
    program: StepProgram,
    relations: Sequence[HiddenParamOpRelation],
    found: Sequence[CompilationRecord],
) -> Iterator[CompilationRecord]:
    tied = {path for r in relations for path in r.trainable_paths.values()}
    temporal = {r.weight_path for r in found if (r.context or {}).get('temporal')}
    cut: dict[Path | None, tuple[Path, ...]] = {
        r.weight_path: r.hidden_paths for r in found if r.kind is DiagnosticKind.CUT
    }
    for path in dict.fromkeys(p.path for p in program.parameters):
        name = path_name(path)
        if path not in tied and path not in temporal:
            yield CompilationRecord(
                DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
                DiagnosticLevel.WARNING,
                f'{name} moves no state that a later step reads: it needs no trace',
                weight_path=path,
            )
        elif path not in tied and path in cut:
            yield CompilationRecord(
                DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
                DiagnosticLevel.WARNING,
                f'every way of {name} to a hidden group is cut: it has no trace',
                weight_path=path,
                hidden_paths=cut[path],
            )


def _followed(program: StepProgram) -> Iterator[CompilationRecord]:
    """Branches and loops that read hidden states or parameters. All are followed inside
    and run as they are; the kinds are those of what the published package does."""
    known = {h.invar for h in program.hidden} | {p.invar for p in program.parameters}
    weights = {p.invar: p.path for p in program.parameters}
    for eqn in program.equations:
        if not any(is_var(v) and v in known for v in eqn.invars):
            continue
        read = [weights[v] for v in eqn.invars if is_var(v) and v in weights]
        record = lambda kind, message, **context: CompilationRecord(
            kind, DiagnosticLevel.INFO, message, context=context
        )
        kind = structure(eqn)
        if kind == 'cond':
            count = len(eqn.params['branches'])
            text = f'a branch of {count} ways is followed in each of them'
            yield record(DiagnosticKind.COND_IF_CONVERTED, text, n_branches=count)
        elif kind == 'scan':
            length = read_scan(eqn).length
            if length is None:
                continue
            text = f'a loop of {length} steps is followed through all of them'
            if length <= UNROLLED:
                yield record(DiagnosticKind.SCAN_UNROLLED, text, length=length)
                continue
            yield record(DiagnosticKind.SCAN_UNROLL_SKIPPED, text, length=length)
            if read:
                applied = DiagnosticKind.SCAN_DESCENT_APPLIED
                yield record(applied, text, length=length, weight_paths=tuple(read))
