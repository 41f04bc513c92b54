"""Events that a job sends to `chainermn launch`; the code is in `_chainermn_events`.

It lies outside of this package because a rank imports it before the script: importing
`chainermn_comm` loads NumPy, and MPI where the abort hook is forced.
"""

from _chainermn_events import (
    RANK_VARIABLES,
    active_job,
    emit,
    encode,
    event_frames,
    write_frames,
)

__all__ = ["RANK_VARIABLES", "active_job", "emit", "encode", "event_frames", "write_frames"]
