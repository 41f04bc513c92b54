"""Tells which rank keeps the others waiting, and ends the job if asked; see docs/decisions/.

A rank notes each call in mapped memory (`calls`); one process a node (`monitor`), which needs
nothing of the ranks but that memory, reads it. This package imports the standard library only:
that process has nothing else.
"""

from .init_timeout import arriving
from .recorder import Record, aborting, leaving, watched
from .rendezvous import join, meeting
from .scope import alone, part_of
from .status_region import NOBODY
from .timeout import NO_LIMIT, VARIABLE, Limit, limit

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
