"""Comparing the gradient of a learner with BPTT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import UnknownName, one_of, printable, three_parts


@dataclass(frozen=True)
class CheckRow:
    """One parameter array: its credit class, the comparison of its gradient with BPTT,
    and the norm of the gradient of BPTT.

    ``gradient``: the gradient that the rule gives it, in the words of the report.
    """

    name: str
    credit: str
    cosine: float
    relative_error: float
    norm_ratio: float
    norm: float
    gradient: str

    @property
    def is_zero(self) -> bool:
        """Whether both gradients are zero, so that they cannot be compared."""
        return self.norm == 0 and self.relative_error == 0


@dataclass(frozen=True)
class GradientCheck:
    """A table of :class:`CheckRow`."""

    rule: str
    rows: tuple[CheckRow, ...]

    @property
    def cosine(self) -> float:
        """The cosine of all parameters together."""
        dot = sum(r.cosine * r.norm_ratio * r.norm**2 for r in self.rows)
        mine = sum((r.norm_ratio * r.norm) ** 2 for r in self.rows)
        exact = sum(r.norm**2 for r in self.rows)
        return dot / max((mine * exact) ** 0.5, 1e-30) if mine or exact else 1.0

    def __getitem__(self, name: str) -> CheckRow:
        return _named({row.name: row for row in self.rows}, name)

    def __str__(self) -> str:
        names = [printable(row.name) for row in self.rows]
        width = max(map(len, ('parameter', *names)))
        lines = [
            f'{self.rule} against BPTT',
            f'{"parameter":{width}}  {"gradient":13}  cosine  rel. error  norm ratio',
        ]
        for name, r in zip(names, self.rows, strict=True):
            numbers = f'{r.cosine:6.3f}  {r.relative_error:10.2e}  {r.norm_ratio:10.3f}'
            if r.is_zero:
                numbers = f'{"both gradients are zero":>{len(numbers)}}'
            lines.append(f'{name:{width}}  {r.gradient:13}  {numbers}')
        return '\n'.join(lines)

    def plot(self, file: Any = None) -> Any:
        """Like :meth:`RuleComparison.plot`, for this rule alone."""
        return RuleComparison((self,)).plot(file)


def _compared(row: CheckRow) -> str:
    if row.is_zero:
        return 'both zero'
    return 'zero' if row.norm_ratio == 0 else f'{row.cosine:.3f} ×{row.norm_ratio:.2f}'


def _named(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise UnknownName(
            three_parts(f'[{name!r}]', 'there is no such row', one_of(found, name))
        )
    return found[name]


def _cut_short(name: str) -> str:
    return name if len(name) <= 24 else f'{name[:23]}…'


@dataclass(frozen=True)
class RuleComparison:
    """Several rules compared with BPTT on one model: a :class:`GradientCheck` for
    each."""

    checks: tuple[GradientCheck, ...]

    def __getitem__(self, rule: str) -> GradientCheck:
        return _named({check.rule: check for check in self.checks}, rule)

    def __str__(self) -> str:
        names = [printable(row.name) for row in self.checks[0].rows]
        rules = [_cut_short(check.rule) for check in self.checks]
        rows = [
            [_compared(check.rows[i]) for check in self.checks]
            for i in range(len(names))
        ]
        rows += [[f'{check.cosine:.3f}      ' for check in self.checks]]
        title = 'cosine ×norm, to BPTT'
        width = max(map(len, (title, *names)))
        columns = [max(map(len, texts)) for texts in zip(rules, *rows, strict=True)]
        cells = lambda texts: '  '.join(
            f'{t:>{w}}' for t, w in zip(texts, columns, strict=True)
        )
        table = zip([title, *names, 'all together'], [rules, *rows], strict=True)
        return '\n'.join(
            f'{name:{width}}  {cells(texts)}'.rstrip() for name, texts in table
        )

    def plot(self, file: Any = None) -> Any:
        """Draw cosines and norms by rule and parameter. Write a file, or return a
        matplotlib figure."""
        from matplotlib.figure import Figure

        names = [row.name for row in self.checks[0].rows]
        rules = [_cut_short(check.rule) for check in self.checks]
        figure = Figure(
            figsize=(4.2 + 1.5 * len(rules), 1.5 + 0.4 * len(names)),
            layout='constrained',
        )
        for axes, (title, values, limits) in zip(
            figure.subplots(1, 2, sharey=True),
            [
                ('cosine to BPTT', lambda row: row.cosine, (-1, 1)),
                ('norm / BPTT', lambda row: row.norm_ratio, (0, 2)),
            ],
            strict=True,
        ):
            table = [
                [values(check.rows[i]) for check in self.checks]
                for i in range(len(names))
            ]
            image = axes.imshow(
                table, cmap='RdBu', vmin=limits[0], vmax=limits[1], aspect='auto'
            )
            figure.colorbar(image, ax=axes, pad=0.02)
            axes.set_title(title)
            axes.set_xlabel('rule')
            axes.set_xticks(range(len(rules)), rules, rotation=45, ha='right')
            axes.set_yticks(range(len(names)), names)
            for i, line in enumerate(table):
                for j, value in enumerate(line):
                    middle = (value - limits[0]) / (limits[1] - limits[0])
                    color = 'black' if 0.2 < middle < 0.8 else 'white'
                    axes.text(
                        j,
                        i,
                        f'{value:.2f}',
                        ha='center',
                        va='center',
                        fontsize=8,
                        color=color,
                    )
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure


def compare(
    name: str, credit: str, gradient: str, a: jax.Array, b: jax.Array
) -> CheckRow:
    """How gradient a of one array compares with gradient b."""
    norm_a, norm_b = jnp.linalg.norm(a.ravel()), jnp.linalg.norm(b.ravel())
    both_zero = (norm_a == 0) & (norm_b == 0)
    dot = jnp.vdot(a.ravel(), b.ravel()).real
    cosine = jnp.where(both_zero, 1.0, dot / jnp.maximum(norm_a * norm_b, 1e-30))
    error = jnp.where(
        both_zero, 0.0, jnp.linalg.norm((a - b).ravel()) / jnp.maximum(norm_b, 1e-30)
    )
    ratio = jnp.where(both_zero, 1.0, norm_a / jnp.maximum(norm_b, 1e-30))
    return CheckRow(
        name, credit, float(cosine), float(error), float(ratio), float(norm_b), gradient
    )
