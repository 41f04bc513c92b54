"""Children that a rank forks while a shared window exists: they harm neither it nor the job."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support import jobs

SCRIPT = f"""{jobs.CHECK_GRADIENTS}
import atexit, multiprocessing, os, sys, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import CommunicationError, create_communicator

def child(how, comm):
    atexit.register(lambda: print(f"EXIT FUNCTION of {{how}}\\n", end=""))
    if how == "use":
        try:
            comm.allreduce_obj(1)
        except CommunicationError as error:
            assert "forked" in str(error)
            comm.finalize()  # does nothing
            os._exit(7)
    if how == "return":
        sys.exit()
    if how == "code":
        raise SystemExit(7)
    if how == "message":
        sys.exit("the child's last words")
    if how == "error":
        raise LookupError("of the child")
    if how == "signal":
        os.kill(os.getpid(), 9)
    if how == "later":
        time.sleep(0.5)
        sys.exit()
    if how == "grandchild":
        if os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        sys.exit(9)
    os._exit(7)

def end_of(pid):
    for _ in range(1000):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    return "hung"

def fork(how, comm):
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
        process.start()
        check_gradients(comm)
        process.join()
        return process.exitcode
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child(how, comm)
    for _ in range(3):
        check_gradients(comm)
    return end_of(pid)

with create_communicator(sys.argv[1]) as comm:
    check_gradients(comm)
    ended = {{}}
    for how in sys.argv[2:]:
        ended[how] = fork(how, comm)
        check_gradients(comm)
with create_communicator(sys.argv[1]) as comm:
    check_gradients(comm)
    ends = comm.gather_obj(ended)
    if comm.rank == 0:
        print("ENDS", ends)
"""
# How a child ends, and with which status.
STATUS = {
    "_exit": 7,
    "return": 0,
    "code": 7,
    "message": 1,
    "error": 1,
    "signal": -9,
    "later": 0,
    "grandchild": 9,
    "use": 7,
    "multiprocessing": 3,
}


def test_forked_children_end_with_their_status_and_gradients_go_on():
    job = jobs.run_text(2, SCRIPT, "hierarchical", *STATUS)
    assert job.returncode == 0, job
    assert f"ENDS {[STATUS, STATUS]}" in job.out, job
    run_exit_functions = ("return", "code", "message", "error", "later", "grandchild", "grandchild")
    assert Counter(re.findall("EXIT FUNCTION of (\\w+)", job.out)) == {
        how: 2 * run_exit_functions.count(how) for how in run_exit_functions
    }
    assert job.err.count("the child's last words") == 2
    assert job.err.count("LookupError: of the child") == 2


@pytest.mark.parametrize(
    ("ranks", "hook"),
    [
        (2, "1"),
        pytest.param(2, "0", marks=pytest.mark.full),
        pytest.param(1, "", marks=pytest.mark.full),
    ],
)
def test_with_and_without_the_abort_hook_and_on_one_rank(ranks, hook):
    environment = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": hook}
    name = "flat" if ranks == 2 else "hierarchical"
    job = jobs.run_text(ranks, SCRIPT, name, "code", environment=environment)
    assert job.returncode == 0, job
    assert f"ENDS {[{'code': 7}] * ranks}" in job.out, job
