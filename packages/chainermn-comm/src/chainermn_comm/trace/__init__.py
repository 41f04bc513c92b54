"""Writes communicators' calls into a file for each rank, in the folder CHAINERMN_TRACE.

See docs/trace.md for the format. `tracer`, which imports MPI and so isn't imported here,
traces a communicator from its creation. Without a trace, calls run no line of this
package.
"""

from .file import TRACE_VARIABLE as TRACE_VARIABLE
