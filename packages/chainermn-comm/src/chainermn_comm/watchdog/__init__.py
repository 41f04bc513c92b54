"""Tells which rank keeps the others waiting, and ends the job if asked; see docs/decisions/.

A rank records each call in memory (`recorder`, `status_region`) that one process a machine, the
`monitor`, maps and reads; it needs nothing else of the ranks, and no more than the standard
library.
"""

from .init_timeout import enforce_init_timeout
from .recorder import (
    CallRecorder,
    alone,
    annotate,
    mark_aborting,
    mark_finalizing,
    watch_call,
    watched,
)
from .rendezvous import register
from .status_region import NOBODY
from .timeout import NO_TIMEOUT, TIMEOUT_VARIABLE, Timeout, timeout_from_env

__all__ = [
    "NOBODY",
    "NO_TIMEOUT",
    "TIMEOUT_VARIABLE",
    "CallRecorder",
    "Timeout",
    "alone",
    "annotate",
    "enforce_init_timeout",
    "mark_aborting",
    "mark_finalizing",
    "register",
    "timeout_from_env",
    "watch_call",
    "watched",
]
