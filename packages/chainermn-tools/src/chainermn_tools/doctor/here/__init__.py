"""Checks of this machine, without starting a rank."""

from chainermn_tools.doctor.here.gpus import cupy, driver, nccl, visible_gpus
from chainermn_tools.doctor.here.machine import cores, scheduler, start_method
from chainermn_tools.doctor.here.memory import direct_memory, shared_memory
from chainermn_tools.doctor.here.mpi import mpi4py, mpi_match, mpicc, mpiexec
from chainermn_tools.doctor.here.software import import_chainer, import_chainermn, packages, python

__all__ = ["CHECKS"]

# In the order in which they are shown.
CHECKS = (
    python,
    packages,
    import_chainermn,
    import_chainer,
    mpi4py,
    mpiexec,
    mpi_match,
    mpicc,
    shared_memory,
    direct_memory,
    start_method,
    cores,
    scheduler,
    driver,
    cupy,
    nccl,
    visible_gpus,
)
