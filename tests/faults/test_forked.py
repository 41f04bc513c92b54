"""Children that a rank forks while a shared window exists: they harm neither it nor the job."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support.jobs.runner import CHECK_GRADIENTS, run_text

USE = """
try:
    comm.allreduce_obj(1)
except CommunicationError as error:
    assert "forked" in str(error)
    comm.finalize()  # does nothing
    os._exit(7)
"""
GRANDCHILD = """
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
sys.exit(9)
"""
# How a child ends, with which status, and how many processes run the child's exit
# functions before that: its own child doesn't.
CHILDREN = {
    "_exit": ("os._exit(7)", 7, 0),
    "return": ("sys.exit()", 0, 1),
    "code": ("raise SystemExit(7)", 7, 1),
    "message": ("sys.exit('last words')", 1, 1),
    "error": ("raise LookupError('of the child')", 1, 1),
    "interrupt": ("raise KeyboardInterrupt", 130, 1),
    "signal": ("os.kill(os.getpid(), 9)", -9, 0),
    "later": ("time.sleep(0.5); sys.exit()", 0, 1),
    "grandchild": (GRANDCHILD, 9, 1),
    "use": (USE, 7, 0),
}
SCRIPT = f"""{CHECK_GRADIENTS}
import atexit, multiprocessing, os, sys, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import CommunicationError, create_communicator
CHILDREN = {CHILDREN}

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
        atexit.register(lambda: print(f"EXIT FUNCTION of {{how}}\\n", end=""))
        exec(CHILDREN[how][0])
    for _ in range(3):
        check_gradients(comm)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

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


@pytest.mark.parametrize(
    ("name", "hook"),
    [("hierarchical", ""), pytest.param("flat", "0", marks=pytest.mark.full)],
)
def test_forked_children_end_with_their_status_and_gradients_go_on(name, hook):
    expected = {how: status for how, (_, status, _) in CHILDREN.items()}
    expected["multiprocessing"] = 3
    environment = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": hook}
    job = run_text(2, SCRIPT, name, *expected, environment=environment)
    assert job.returncode == 0, job
    assert f"ENDS {[expected, expected]}" in job.out, job
    found = Counter(re.findall("EXIT FUNCTION of (\\w+)", job.out))
    assert found == {
        how: 2 * processes for how, (_, _, processes) in CHILDREN.items() if processes
    }
    assert job.err.count("last words") == 2
    assert job.err.count("LookupError: of the child") == 2
