"""The end of the whole job when one of its ranks fails.

`abort` notices that a rank ends in failure and aborts the job, and `forks` keeps the children of
ranks out of it.
"""

from .abort import abort_if_desynchronized as abort_if_desynchronized
from .abort import install_by_default as install_by_default
from .abort import install_if_forced as install_if_forced
from .abort import mpi_abort as mpi_abort
from .forks import skip_finalize_in_forks as skip_finalize_in_forks
