"""Ends the whole job when a rank fails (`abort`), but not when a rank's child does (`forks`)."""

from .abort import abort_if_desynchronized as abort_if_desynchronized
from .abort import install_by_default as install_by_default
from .abort import install_if_forced as install_if_forced
from .abort import leave as leave
from .abort import mpi_abort as mpi_abort
from .forks import skip_finalize_in_forks as skip_finalize_in_forks
