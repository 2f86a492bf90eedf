"""Comparing a learner's gradient with BPTT's, and saying what a sequence will need in memory."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class CheckRow:
    """One parameter array: its credit class and how its gradient compares with BPTT's."""

    name: str
    credit: str
    cosine: float
    relative_error: float
    norm_ratio: float


@dataclass(frozen=True)
class GradientCheck:
    """A table of :class:`CheckRow`."""

    rule: str
    rows: tuple[CheckRow, ...]

    def __getitem__(self, name: str) -> CheckRow:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f'{self.rule} against BPTT', f'{"parameter":{width}}  {"credit":13}  cosine  rel. error  norm ratio']
        for r in self.rows:
            lines.append(
                f'{r.name:{width}}  {r.credit:13}  {r.cosine:6.3f}  {r.relative_error:10.2e}  {r.norm_ratio:10.3f}'
            )
        return '\n'.join(lines)


def compare(name: str, credit: str, a: jax.Array, b: jax.Array) -> CheckRow:
    """How gradient a of one array compares with gradient b."""
    norm_a, norm_b = jnp.linalg.norm(a.ravel()), jnp.linalg.norm(b.ravel())
    both_zero = (norm_a == 0) & (norm_b == 0)
    dot = jnp.vdot(a.ravel(), b.ravel()).real
    cosine = jnp.where(both_zero, 1.0, dot / jnp.maximum(norm_a * norm_b, 1e-30))
    error = jnp.where(both_zero, 0.0, jnp.linalg.norm((a - b).ravel()) / jnp.maximum(norm_b, 1e-30))
    ratio = jnp.where(both_zero, 1.0, norm_a / jnp.maximum(norm_b, 1e-30))
    return CheckRow(name, credit, float(cosine), float(error), float(ratio))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a sequence of ``steps`` needs, by way of running it."""

    steps: int
    traces: dict[tuple, int]
    one_pass: int
    two_pass: int | None
    bptt: int

    def __str__(self) -> str:
        lines = [f'memory for {self.steps} steps']
        lines += [f'  trace of {", ".join(key[0])} in {key[1]}: {size_text(n)}' for key, n in self.traces.items()]
        lines += [
            f'one pass, {"traces carried:" if self.traces else "windows:       "} {size_text(self.one_pass)}',
            *([] if self.two_pass is None else [f'two passes, no trace:     {size_text(self.two_pass)}']),
            f'BPTT:                     {size_text(self.bptt)}',
        ]
        return '\n'.join(lines)


def size_text(n: float) -> str:
    """Bytes for people."""
    for unit in ('B', 'KiB', 'MiB'):
        if n < 1024:
            return f'{n:.0f} {unit}' if unit == 'B' else f'{n:.1f} {unit}'
        n /= 1024
    return f'{n:.1f} GiB'
