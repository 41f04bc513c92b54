"""What a rank says to be inside of."""

from __future__ import annotations

import subprocess
import sys

from chainermn_comm.watchdog.inside import alone, part_of
from tests.support import jobs
from tests.support.watchdog import inside_of


def test_what_a_rank_is_inside_of_is_noted_until_it_leaves():
    assert inside_of() is None
    with alone("evaluate"):
        with part_of("x" * 100):
            assert inside_of() == ("x" * 64, False)
        assert inside_of() == ("evaluate", True)
    assert inside_of() is None


def test_before_there_is_a_communicator_nothing_is_noted_and_mpi_not_started():
    script = """
import sys
from chainermn_comm.watchdog import alone
with alone("download"):
    print("mpi4py.MPI" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, env=jobs.variables(), text=True) == "False\n"
