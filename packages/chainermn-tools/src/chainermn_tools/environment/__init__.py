"""What a bug report needs to say about this machine and what is installed on it."""

from .machine import call_with_cupy as call_with_cupy
from .machine import gpu_devices as gpu_devices
from .machine import gpu_driver as gpu_driver
from .machine import memory as memory
from .machine import nccl_version as nccl_version
from .machine import shared_memory as shared_memory
from .mpi import mpi_library as mpi_library
from .mpi import mpi_mismatch as mpi_mismatch
from .mpi import thread_level as thread_level
from .packages import OTHER_PACKAGES as OTHER_PACKAGES
from .packages import OUR_PACKAGES as OUR_PACKAGES
from .packages import PACKAGE_FAMILIES as PACKAGE_FAMILIES
from .packages import distributions as distributions
from .packages import import_origins as import_origins
from .packages import package_versions as package_versions
from .probe import call_in_subprocess as call_in_subprocess
from .probe import run_concurrently as run_concurrently
from .report import collect as collect
from .report import render as render
from .report import sections as sections
