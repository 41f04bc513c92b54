"""Trace files of a job's ranks: read, aligned and matched; who was late, in tables and a plot."""

from chainermn_tools.trace.clocks import align
from chainermn_tools.trace.loader import NoTrace, read
from chainermn_tools.trace.matching import match

__all__ = ["NoTrace", "align", "match", "read"]
