"""The checks of `published/checks`, which hold on the published package, hold here.

Those of `DIFFERENT` do not: `docs/from-published.md` says why.
"""

import sys
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / 'published'
sys.path.insert(0, str(FOLDER))

from check import load  # noqa: E402 - its folder is no package

DIFFERENT = ('options[SnAp-trace_dtype',)
CHECKS = {
    name: check
    for name, check in load().items()
    if not any(part in name for part in DIFFERENT)
}


@pytest.mark.parametrize('name', sorted(CHECKS))
def test_holds_here(name):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # what is automatic here is said in a warning
        CHECKS[name]()
