"""Children that a rank forks while a shared window exists: they harm neither it nor the job."""

from __future__ import annotations

import pytest

from tests.support import jobs

SCRIPT = (
    jobs.PRELUDE
    + jobs.CHECK_GRADIENTS
    + """
import atexit, multiprocessing, os, sys, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import CommunicationError, create_communicator

def child(how, comm):
    atexit.register(lambda: print("CHILD'S EXIT FUNCTION"))
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

how = sys.argv[1]
with create_communicator(sys.argv[2]) as comm:
    check_gradients(comm)
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
        process.start()
        check_gradients(comm)
        process.join(20)
        ended = process.exitcode
    else:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            child(how, comm)
        for _ in range(5):
            check_gradients(comm)
        ended = end_of(pid)
    for _ in range(3):
        check_gradients(comm)
with create_communicator(sys.argv[2]) as comm:
    check_gradients(comm)
    ends = comm.gather_obj(ended)
    if comm.rank == 0:
        print("ENDS", ends)
"""
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("_exit", 7),
        ("return", 0),
        ("code", 7),
        ("message", 1),
        ("error", 1),
        ("signal", -9),
        ("later", 0),
        ("grandchild", 9),
        ("use", 7),
        ("multiprocessing", 3),
    ],
)
def test_a_forked_child_ends_with_its_status_and_gradients_go_on(script, how, status):
    job = jobs.run(2, script, how, "hierarchical")
    assert job.returncode == 0, job
    assert f"ENDS [{status}, {status}]" in job.out, job
    runs_exit_functions = {"return", "code", "message", "error", "later"}
    times = 4 if how == "grandchild" else 2 if how in runs_exit_functions else 0
    assert job.out.count("CHILD'S EXIT FUNCTION") == times, job
    assert ("the child's last words" in job.err) == (how == "message")
    assert ("LookupError: of the child" in job.err) == (how == "error")


@pytest.mark.parametrize("hook", ["0", "1"])
def test_with_and_without_the_abort_hook(script, hook):
    environment = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": hook}
    job = jobs.run(2, script, "code", "flat", environment=environment)
    assert job.returncode == 0, job
    assert "ENDS [7, 7]" in job.out, job


def test_one_rank(script):
    job = jobs.run(1, script, "code", "hierarchical")
    assert job.returncode == 0, job
    assert "ENDS [7]" in job.out, job
