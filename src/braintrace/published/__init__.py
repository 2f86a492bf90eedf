"""Names and spellings of the published package of the same import name (0.2.6).

Code written for it runs here unchanged. What has a counterpart of its own here is only
another spelling of it, and nothing outside of this folder knows any of them:
`braintrace` looks here for names that it does not have, and learners for members that
they do not have. `docs/from-published.md` lists what differs.

    learner      members of a learner; overridden hooks, which are refused
    traces       traces by its keys and in its shapes
    vmapped      learners mapped over a batch by hand, with drivers of sequences
    parts        filters, feedback, running means, predictors with states of their own
    compiler     executors and switches of its compiler
    policy       its policy for branches and loops
    records      members of groups, relations and traced modules
    report       the report made from a graph
    spellings    what learners and records look for
    primitives   operations by a function and four rules
    first        the eleven names of its version 0.1
    modules      the modules that its public names are in
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .._brainstate import brainstate as brainstate

NAMES = {
    'ETraceVmap': 'vmapped',
    'SequenceDriverMixin': 'vmapped',
    'FixedRandomFeedback': 'parts',
    'GradExpon': 'parts',
    'KappaFilter': 'parts',
    'SyntheticGradient': 'parts',
    'train_synthetic_gradient': 'parts',
    'CompilationReport': 'report',
    'ControlFlowPolicy': 'policy',
    'ETraceVjpGraphExecutor': 'compiler',
    'ETPPrimitive': 'primitives',
    'register_primitive': 'primitives',
}
"""Every name, and the file of this folder that has it."""

FIRST = (
    'ConvOp',
    'ElemWiseOp',
    'ElemWiseParam',
    'ETraceOp',
    'ETraceParam',
    'FakeETraceParam',
    'FakeElemWiseParam',
    'LoraOp',
    'MatMulOp',
    'NonTempParam',
    'SpMatMulOp',
)
"""Names of version 0.1, which warn."""


def find(name: str) -> Any:
    """What the published package calls by a name; an AttributeError if nothing."""
    if name in FIRST:
        return file('first').named(name)
    if name not in NAMES:
        text = f"module 'braintrace' has no attribute {name!r}"
        # With these, Python suggests the nearest name.
        raise AttributeError(text, name=name, obj=sys.modules['braintrace'])
    return getattr(file(NAMES[name]), name)


def file(name: str) -> Any:
    """A file of this folder."""
    return importlib.import_module(f'{__name__}.{name}')
