"""Whether a launcher fits the library of MPI."""

import pytest

from chainermn_tools.environment import mpi


@pytest.mark.parametrize(
    ("library", "launcher", "fits"),
    [
        ("MPICH 5.0.2", "MPICH 4.2.0", True),
        ("MVAPICH2 2.3.7", "MPICH 3.2.1", True),
        ("Open MPI 5.0.11", "Open MPI 5.0.3", True),
        ("Open MPI 5.0.11", "Open MPI 4.1.6", False),
        ("Open MPI 5.0.11", "MPICH 4.2.0", False),
        ("MPICH 5.0.2", "Open MPI 5.0.2", False),
        ("Intel MPI 2021.10", "MPICH 4.2.0", False),
    ],
)
def test_library_and_launcher_are_compared(library, launcher, fits):
    sides = []
    for one in (library, launcher):
        vendor, _, version = one.rpartition(" ")
        sides.append({"vendor": vendor, "version": version, "path": "/opt/mpiexec"})
    reason = mpi.mpi_mismatch(*sides)
    assert (reason is None) == fits
    assert fits or "/opt/mpiexec" in str(reason)
