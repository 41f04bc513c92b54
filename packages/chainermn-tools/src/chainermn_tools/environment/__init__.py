"""Facts for a bug report about this machine and the software on it."""

from .machine import memory as memory
from .mpi import mpi_library as mpi_library
from .mpi import mpi_mismatch as mpi_mismatch
from .mpi import thread_level as thread_level
from .packages import OUR_PACKAGES as OUR_PACKAGES
from .packages import distributions as distributions
from .probe import call_in_subprocess as call_in_subprocess
from .probe import run_concurrently as run_concurrently
from .report import collect as collect
from .report import rank_facts as rank_facts
from .report import render as render
from .report import sections as sections
