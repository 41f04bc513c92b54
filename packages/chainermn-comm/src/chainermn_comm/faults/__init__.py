"""The end of the whole job when one of its ranks fails.

`abort` notices that a rank ends in failure and aborts the job, and `forks` keeps the children of
ranks out of it.
"""

from .abort import (
    abort_if_desynchronized,
    add_hook,
    install_by_default,
    install_if_forced,
    mpi_abort,
    remove_hook,
)
from .forks import skip_finalize_in_forks

__all__ = [
    "abort_if_desynchronized",
    "add_hook",
    "install_by_default",
    "install_if_forced",
    "mpi_abort",
    "remove_hook",
    "skip_finalize_in_forks",
]
