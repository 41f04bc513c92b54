"""Trace files of a job's ranks: reads, aligns and matches them, and shows tables and time lines."""

from chainermn_tools.trace.chrome_export import write_chrome_trace as write_chrome_trace
from chainermn_tools.trace.clocks import align as align
from chainermn_tools.trace.loader import NoTrace as NoTrace
from chainermn_tools.trace.loader import is_trace as is_trace
from chainermn_tools.trace.loader import read as read
from chainermn_tools.trace.matching import match as match
from chainermn_tools.trace.summary import summarize as summarize
from chainermn_tools.trace.tables import TABLES as TABLES
from chainermn_tools.trace.tables import render as render
from chainermn_tools.trace.tables import title as title
from chainermn_tools.trace.timeline import time_lines as time_lines
