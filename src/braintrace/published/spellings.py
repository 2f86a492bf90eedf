"""All that `learner.spellings` looks for: members, refused classes and switches."""

from .compiler import check_switches
from .learner import MEMBERS, POSITIONS, check_subclass
from .records import MEMBERS as RECORD_MEMBERS

__all__ = [
    'MEMBERS',
    'POSITIONS',
    'RECORD_MEMBERS',
    'check_subclass',
    'check_switches',
]
