"""What a rank says to be inside of."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn_comm.watchdog import alone, annotate
from tests.support import jobs
from tests.support.watchdog import inside_of, record, reported


@pytest.fixture(autouse=True)
def region():
    """Where scopes are recorded, which the first test of a process makes, whichever that is."""
    inside_of()


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


@pytest.fixture
def calls():
    """Records of calls on two communicators."""
    found = [record((0, number), 0, 2) for number in range(2)]
    yield found
    for each in found:
        each.release()


def test_a_call_is_not_said_to_be_inside_of_what_another_thread_entered(calls):
    first, second = calls
    with ThreadPoolExecutor(1) as other, annotate("send"):
        second.collective("allreduce", 1)
        assert re.search(r"waits in .*allreduce.*, inside send for \S+ s$", reported())
        scope = annotate("load")
        other.submit(scope.__enter__).result()
        assert "inside" not in reported()
        other.submit(first.message, "recv", 1, 7).result()
        assert re.search(r"waits in .*allreduce.* and in .*recv.*, inside load for", reported())
        other.submit(scope.__exit__).result()


def test_before_there_is_a_communicator_nothing_is_recorded_and_mpi_not_started():
    script = """
import sys
from chainermn_comm.watchdog import alone
with alone("download"):
    print("mpi4py.MPI" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, env=jobs.variables(), text=True) == "False\n"
