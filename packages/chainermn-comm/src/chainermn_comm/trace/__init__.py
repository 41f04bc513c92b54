"""Writes communicators' calls into files, one a rank, where CHAINERMN_TRACE names a folder.

See docs/trace.md for the format. A communicator is traced from when it is made
(`tracer`, which imports MPI, so not here): where nothing is traced, calls pass no line
of this package.
"""

from .file import TRACE_VARIABLE as TRACE_VARIABLE
