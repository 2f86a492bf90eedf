"""All that `learner.spellings` looks for: members, refused classes and switches."""

from .compiler import check_switches
from .learner import MEMBERS, check_subclass
from .records import MEMBERS as RECORD_MEMBERS

__all__ = ['MEMBERS', 'RECORD_MEMBERS', 'check_subclass', 'check_switches']
