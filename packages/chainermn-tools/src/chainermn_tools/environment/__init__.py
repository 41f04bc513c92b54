"""What a bug report needs to say about this machine and what is installed on it."""

from chainermn_tools.environment.machine import (
    call_with_cupy,
    gpu_devices,
    gpu_driver,
    memory,
    nccl_version,
    ptrace_scope,
    shared_memory,
)
from chainermn_tools.environment.mpi import mpi_library, mpi_mismatch, thread_level
from chainermn_tools.environment.packages import (
    OTHER_PACKAGES,
    OUR_PACKAGES,
    PACKAGE_FAMILIES,
    distributions,
    import_origins,
    package_versions,
    start_method,
)
from chainermn_tools.environment.probe import call_in_subprocess, run_concurrently
from chainermn_tools.environment.report import collect, render

__all__ = [
    "OTHER_PACKAGES",
    "OUR_PACKAGES",
    "PACKAGE_FAMILIES",
    "call_in_subprocess",
    "call_with_cupy",
    "collect",
    "distributions",
    "gpu_devices",
    "gpu_driver",
    "import_origins",
    "memory",
    "mpi_library",
    "mpi_mismatch",
    "nccl_version",
    "package_versions",
    "ptrace_scope",
    "render",
    "run_concurrently",
    "shared_memory",
    "start_method",
    "thread_level",
]
