"""Launchers of MPI: whose they are, and whether they fit the library."""

import pytest

from chainermn_tools.environment import mpi

HYDRA = "HYDRA build details:\n    Version:                                 4.2.0\n"


@pytest.mark.parametrize(
    ("printed", "vendor", "version"),
    [
        (HYDRA, "MPICH", "4.2.0"),
        ("mpiexec (OpenRTE) 4.1.6\n\nReport bugs to http://www.open-mpi.org/", "Open MPI", "4.1.6"),
        ("mpiexec (Open MPI) 5.0.11\n", "Open MPI", "5.0.11"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023", "Intel MPI", "2021.10"),
        (f"{HYDRA} Configure options: --prefix=/opt/mvapich2", "MVAPICH", "4.2.0"),
        ("prterun (PRRTE) 3.0.5", "Open MPI", "3.0.5"),
        ("slurm launcher", None, None),
    ],
)
def test_launchers_are_recognised(printed, vendor, version):
    assert mpi.recognise(printed) == {"vendor": vendor, "version": version}


@pytest.mark.parametrize(
    ("library", "launcher", "fits"),
    [
        (("MPICH", "5.0.2"), ("MPICH", "4.2.0"), True),
        (("MVAPICH2", "2.3.7"), ("MPICH", "3.2.1"), True),
        (("MVAPICH", "4.0"), ("MVAPICH", "4.0"), True),
        (("Open MPI", "5.0.11"), ("Open MPI", "5.0.3"), True),
        (("Open MPI", "5.0.11"), ("Open MPI", "4.1.6"), False),
        (("Open MPI", "5.0.11"), ("MPICH", "4.2.0"), False),
        (("MPICH", "5.0.2"), ("Open MPI", "5.0.2"), False),
        (("Intel MPI", "2021.10"), ("MPICH", "4.2.0"), False),
    ],
)
def test_library_and_launcher_are_compared(library, launcher, fits):
    sides = [{"vendor": v, "version": n, "path": "/opt/mpiexec"} for v, n in (library, launcher)]
    reason = mpi.mismatch(*sides)
    assert (reason is None) == fits
    assert fits or "/opt/mpiexec" in str(reason)
