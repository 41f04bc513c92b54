"""Trace files of a job's ranks: read, aligned and matched; late ranks, in tables and a plot."""

from chainermn_tools.trace.chrome_export import write_chrome_trace
from chainermn_tools.trace.clocks import align
from chainermn_tools.trace.loader import NoTrace, read
from chainermn_tools.trace.matching import match
from chainermn_tools.trace.plot import plot_run
from chainermn_tools.trace.text import render

__all__ = ["NoTrace", "align", "match", "plot_run", "read", "render", "write_chrome_trace"]
