"""What a rank says to do alone."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn_comm.watchdog import alone
from tests.support import jobs
from tests.support.watchdog import inside_of, reported


@pytest.fixture(autouse=True)
def region():
    """Where scopes are recorded, which the first test of a process makes, whichever that is."""
    inside_of()


def test_what_a_rank_does_alone_is_recorded_until_it_has_done_it():
    assert inside_of() is None
    with alone("evaluate"):
        with alone("x" * 100):
            assert inside_of() == "x" * 64
        assert inside_of() == "evaluate"
        assert re.search(r"in no call.*, inside evaluate for \S+ s$", reported())
    assert inside_of() is None


def test_one_thread_that_is_done_takes_nothing_from_what_another_does():
    inside, again = alone("load"), alone("download")
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        first.submit(inside.__enter__).result()
        second.submit(again.__enter__).result()
        assert inside_of() == "download"  # what began last
        first.submit(inside.__exit__, None, None, None).result()
        assert inside_of() == "download"
        second.submit(again.__exit__, None, None, None).result()
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
