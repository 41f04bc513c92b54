"""Tells which rank keeps the others waiting, and ends the job if asked; see docs/decisions/.

A rank notes each call in mapped memory (`calls`); one process a node (`monitor`), which needs
nothing of the ranks but that memory, reads it. This package imports the standard library only:
that process has nothing else.
"""

from .arriving import arriving
from .calls import Record, aborting, leaving, watched
from .inside import alone, part_of
from .limit import NO_LIMIT, VARIABLE, Limit, limit
from .records import NOBODY
from .starting import join, meeting

__all__ = [
    "NOBODY",
    "NO_LIMIT",
    "VARIABLE",
    "Limit",
    "Record",
    "aborting",
    "alone",
    "arriving",
    "join",
    "leaving",
    "limit",
    "meeting",
    "part_of",
    "watched",
]
