"""What a rank says to be inside of."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from chainermn_comm.watchdog import alone, annotate
from tests.support import jobs
from tests.support.watchdog import inside_of


def test_what_a_rank_is_inside_of_is_recorded_until_it_leaves():
    assert inside_of() is None
    with alone("evaluate"):
        with annotate("x" * 100):
            assert inside_of() == ("x" * 64, False)
        assert inside_of() == ("evaluate", True)
    assert inside_of() is None


def test_threads_do_not_mix_up_what_they_are_inside_of():
    """One that leaves while another is still inside doesn't take what that recorded with it."""
    inside, again = annotate("send"), annotate("recv")
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        with alone("evaluate"):
            first.submit(inside.__enter__).result()
            second.submit(again.__enter__).result()
            assert inside_of() == ("evaluate", True)  # others may have to wait for it
            with annotate("barrier"):
                assert inside_of() == ("barrier", False)  # what was recorded last
            first.submit(inside.__exit__).result()
        assert inside_of() == ("recv", False)
        second.submit(again.__exit__).result()
    assert inside_of() is None


def test_before_there_is_a_communicator_nothing_is_recorded_and_mpi_not_started():
    script = """
import sys
from chainermn_comm.watchdog import alone
with alone("download"):
    print("mpi4py.MPI" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, env=jobs.variables(), text=True) == "False\n"
