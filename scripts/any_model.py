"""Write ``docs/models.md``: every model of the zoo, and what it gets, as the compiler says.

python scripts/any_model.py
"""

import contextlib
import re
import sys
from collections import Counter
from pathlib import Path

import jax

import braintrace
from braintrace.analysis.credit import NO_CREDIT
from braintrace.graph.diagnostics import DiagnosticKind

ROOT = Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'models.md'
sys.path.insert(0, str(ROOT / 'tests'))
import zoo  # noqa: E402

HEAD = """# Any model

<!-- made by `make models` from tests/zoo; the words are those of the compiler -->

On this page you can look up what gradient your kind of model gets. Most models compile without changes. If part of the
credit is lost, the report says where. If a model cannot be compiled, the error says why.

Each row is a model from the tests in `tests/zoo`:

- *Hidden groups*: the states that depend on each other position by position.
- *Parameters*: the number of parameters in each [credit class](concepts.md#credit-classes).
- *Verdict*: the lowest class among the parameters that could get credit, with the first reason.

The tests compare these columns with results that were written by hand, and the derivatives with dense Jacobians.

| verdict | meaning |
| --- | --- |
| exact | No path is cut: under D-RTRL the gradient of every parameter is equal to BPTT. |
| local | Credit passes through time inside each position. The table names the first path that is cut. |
| instantaneous | At least one parameter gets only the one-step gradient. |
| none | At least one parameter gets no gradient: no output of its step depends on it, and later paths are cut. |
| refused | The model cannot be compiled. The error says what was written, why it does not work and how to fix it. |
"""
LOSSES = (DiagnosticKind.MISSING_RULE, DiagnosticKind.NOT_DIFFERENTIABLE)
ORDER = ('none', 'instantaneous', 'local', 'exact')


def title(family: str) -> str:
    """The first line of the file that holds a family."""
    return sys.modules[f'zoo.{family}'].__doc__.partition('\n')[0].rstrip('.')


def bare(reason: str) -> str:
    """A reason without file and line."""
    return re.sub(r' \([^()]*:\d+\)| at \S+:\d+', '', reason).replace('|', '\\|')


def row(case: zoo.Case) -> str:
    """A model's line of the table."""
    with jax.enable_x64(True) if case.x64 else contextlib.nullcontext():
        model, inputs = case.build()
        report = braintrace.compile_etrace_graph(
            model, *inputs, include_hidden_perturb=False
        ).report
    groups = [
        '{' + ', '.join('.'.join(map(str, p)) for p in g.hidden_paths) + '}'
        for g in report.hidden_groups
    ]
    counts = Counter(r.context['credit'] for r in report.credits)
    judged = [(r.context['credit'], r.context['reason']) for r in report.credits]
    unfelt = [pair for pair in judged if pair[1].startswith(NO_CREDIT)]
    worst, reason = next(
        pair
        for c in (*ORDER[1:], 'none')
        for pair in [*unfelt, *judged]
        if unfelt or pair[0] == c
    )
    verdict = worst if worst == 'exact' else f'{worst}: {bare(reason)}'
    lost = [
        bare(r.message)
        for r in report.diagnostics
        if r.kind in (DiagnosticKind.MISSING_RULE, DiagnosticKind.NOT_DIFFERENTIABLE)
    ]
    numbers = ', '.join(f'{counts[c]} {c}' for c in reversed(ORDER) if counts[c])
    return f'| {case.name.replace("_", " ")} | {" ".join(groups)} | {numbers} | {"; ".join([verdict, *lost])} |'


def refused(name: str) -> str:
    """The line of a model that cannot work."""
    model, inputs = zoo.REFUSED[name]()
    try:
        braintrace.D_RTRL(model).compile_graph(*inputs)
    except (
        ValueError,
        TypeError,
        NotImplementedError,
        braintrace.CompilationError,
    ) as error:
        what, why, fix = re.split(r'\n  (?:Why|Fix): ', str(error), maxsplit=2)
        short = lambda text: bare(' '.join(text.split()))[:300]
        return f'| {name.replace("_", " ")} | refused: {short(what)}. {short(why)} | {short(fix)} |'
    raise AssertionError(f'{name} was not refused')


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for family in dict.fromkeys(case.family for case in zoo.CASES.values()):
        parts += [
            f'## {title(family)}\n',
            '| model | hidden groups | parameters | verdict |',
            '| --- | --- | --- | --- |',
        ]
        parts += [
            *(row(case) for case in zoo.CASES.values() if case.family == family),
            '',
        ]
    parts += [
        f'## {title("refused")}\n',
        '| model | verdict | fix |',
        '| --- | --- | --- |',
    ]
    return '\n'.join([*parts, *map(refused, zoo.REFUSED)]) + '\n'


if __name__ == '__main__':
    PAGE.write_text(page())
    print(
        f'{PAGE.relative_to(ROOT)}: {len(zoo.CASES)} models, {len(zoo.REFUSED)} refused'
    )
