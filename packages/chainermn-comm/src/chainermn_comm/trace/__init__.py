"""Writes communicators' calls into a file for each rank, in the folder CHAINERMN_TRACE.

See docs/trace.md for the format of calls. By these metadata events `chainermn trace` merges files:

- `chainermn`: `schema` (1), `run`, `rank` and `ranks` of the world, `host`, `process`;
  `began`: the time of day; `clock`: equal for ranks that share a clock; `zero`: the
  clock's value when the file's times began;
- `chainermn communicator`: `communicator`; `rank`: of this process in it; `ranks`: numbers
  of its members in the world; `run`: of its rank 0;
- `chainermn clock`: `communicator`; `at`: a time of this file; `ahead`: what to add then to
  get the clock of the communicator's rank 0; `round_trip`: twice the largest possible
  error.

Between such times the offset is interpolated.

`tracer`, which imports MPI and so isn't imported here,
traces a communicator from its creation. Without a trace, calls run no line of this
package.
"""

from .file import TRACE_VARIABLE as TRACE_VARIABLE
