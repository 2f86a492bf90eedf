"""The policy for branches and loops of the published package's compiler."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import three_parts
from ..learner.arguments import check_choice


@dataclass(frozen=True)
class ControlFlowPolicy:
    """How the compiler of the published package treats branches and loops. It is
    accepted and not needed: this package analyses branches and loops without converting
    them."""

    cond: str = 'convert'
    scan_unroll_limit: int | None = 16
    while_hidden: str = 'opaque-fwd'
    etp_in_control_flow: str = 'error'
    scan_descent: str = 'auto'
    fixpoint_iteration_limit: int = 64

    def __post_init__(self) -> None:
        check_choice('scan_descent', self.scan_descent, ('auto', 'off'))
        limit = self.fixpoint_iteration_limit
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(
                three_parts(
                    f'fixpoint_iteration_limit={limit!r}',
                    'it counts iterations',
                    'a whole number from 1',
                )
            )
