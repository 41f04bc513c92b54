"""When the hook of abort.py is on, and what it prints and leaves alone."""

from __future__ import annotations

import re

import pytest

from tests.support.jobs.failing import (
    ADD_HOOK,
    ALONE,
    COMMUNICATOR,
    RAISE,
    TRACEBACK,
    check_last_words,
    failed,
    text,
)
from tests.support.jobs.processes import is_gone
from tests.support.jobs.runner import CHECK_GRADIENTS, run, run_text
from tests.support.watchdog import events

FORCED = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "1"}


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.full)])
def test_on_where_a_rank_is_alone_in_its_communicator(ranks):
    """Of three ranks one that isn't alone fails; of two both are alone."""
    words = ("Traceback", "ValueError", f"ChainerMN: rank 0 of {ranks}: uncaught")
    failed(ranks, 1, words, end=RAISE, failing=(0,), install=ALONE)


def test_on_before_the_first_communicator_is_finished():
    install = "from chainermn_comm import create_communicator\n"
    body = """
if world.rank == 1:
    say_failing()
    create_communicator('naive', 'no communicator')
create_communicator("naive")
"""
    words = ("Traceback", "TypeError", "ChainerMN: rank 1 of 2: uncaught TypeError")
    failed(2, 1, words, install=install, body=body)


def test_refused_by_the_environment_an_exit_is_pythons_and_the_others_go_on(tmp_path):
    body = f"""
leaving = Path({str(tmp_path / "leaving")!r})
if world.rank == 1:
    atexit.register(leaving.touch)  # after all that would end the job
    sys.exit(3)
while not leaving.exists():
    time.sleep(0.01)
print("going on")
"""
    install = "import atexit\nfrom pathlib import Path\n" + COMMUNICATOR
    refused = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0"}
    job = run_text(2, text(install=install, body=body), environment=refused)
    assert "going on" in job.out, job
    assert "ChainerMN" not in job.err, job


def test_forced_before_a_communicator_exists():
    # One rank fails before it has used MPI in any way, and the other begins to.
    script = """
import sys, chainermn_comm
from tests.support.worlds.planted import say_failing
if sys.modules["mpi4py.MPI"].COMM_WORLD.rank == 1:
    say_failing()
    raise ValueError("failure!")
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
    job = run_text(2, script, environment=FORCED)
    assert job.returncode == 1, job
    check_last_words(job, *(word.format(1) for word in TRACEBACK))


def test_importing_starts_mpi_only_where_forced():
    script = "import sys, chainermn_comm; print('mpi4py.MPI' in sys.modules)"
    assert run(1, "-c", script).out.split() == ["False"]
    assert run(1, "-c", script, environment=FORCED).out.split() == ["True"]


def test_a_child_of_a_rank_does_not_start_mpi_again():
    body = """
import subprocess
child = (
    "import sys, chainermn_comm.faults.abort as abort; abort.add_hook(); "
    "print('mpi4py.MPI' in sys.modules)"
)
subprocess.run([sys.executable, "-c", child], check=True)
"""
    job = run_text(
        2, text(install="import chainermn_comm\n", body=body), environment=FORCED
    )
    assert job.returncode == 0, job
    assert job.out.split() == ["False", "False"]


@pytest.mark.parametrize(
    "when", ["before", pytest.param("after", marks=pytest.mark.full)]
)
def test_the_users_own_hook_prints_once(when):
    own = "sys.excepthook = lambda kind, value, trace: print('OWN HOOK', file=sys.stderr)\n"
    install = own + ADD_HOOK if when == "before" else ADD_HOOK + own
    job = failed(2, 1, end=RAISE, install=install)
    assert job.err.count("OWN HOOK") == 1, job
    assert "rank 1 of 2: uncaught ValueError" in job.err


def test_a_hook_of_the_users_that_never_returns():
    # As the manual's snippet: it aborts by itself.
    own = """
def hook(kind, value, trace):
    print("OWN HOOK", file=sys.stderr, flush=True)
    time.sleep(0.5)
    world.Abort(7)
sys.excepthook = hook
"""
    job = failed(2, 7, end=RAISE, install=own + ADD_HOOK)
    assert job.err.count("OWN HOOK") == 1, job


def test_long_tracebacks_of_all_ranks_stay_whole():
    # 8 kB each; Open MPI's launcher reads 4 kB at a time.
    end = """world.Barrier()
raise ValueError(''.join(f'\\nby {world.rank} line {i:03} of 200' for i in range(200)))
"""
    job = failed(3, 1, end=end, failing=(0, 1, 2))
    lines = job.err.splitlines()
    begins = [i for i, line in enumerate(lines) if line.endswith("line 000 of 200")]
    # On a busy machine some ranks are ended before they come to speak.
    assert begins, job
    whole = []
    for begin in begins:
        rank = lines[begin].split()[1]
        whole += [f"by {rank} line {i:03} of 200" for i in range(200)]
    assert [line for line in lines if line.endswith("of 200")] == whole, job


def test_the_same_error_on_all_ranks_is_printed_once():
    """Such as of a name that doesn't exist."""
    job = failed(
        4,
        1,
        end="create_communicator('flatt')",
        failing=(0, 1, 2, 3),
        install=COMMUNICATOR,
    )
    assert job.err.count("Traceback") == 1, job
    assert job.err.count("ChainerMN: rank ") == 1, job
    assert (
        "unknown communicator 'flatt' (did you mean 'flat'?); use one of: flat"
        in job.err
    )
    frames = re.findall(r'File "(.*)", line', job.err)
    assert not [frame for frame in frames if "chainermn_comm" in frame], job


def test_of_ranks_that_disagree_the_odd_one_is_the_one_that_speaks():
    body = """
comm = create_communicator("naive")
world.Barrier()
say_failing()
comm.allreduce_obj(1) if world.rank != 2 else comm.bcast_obj(1)
"""
    words = (
        "Traceback",
        "chainermn_comm.errors.RankMismatchError: bcast_obj on rank 2: ranks disag",
    )
    words += (
        "ChainerMN: rank 2 of 5: uncaught RankMismatchError",
        "Next step: look for an `if",
    )
    job = failed(5, 1, words, install=COMMUNICATOR, body=body, failing=(2,))
    assert job.err.count("Traceback") == 1, job
    assert "handshake.py" not in job.err, job


def test_a_crash_shows_the_line_of_python():
    job = failed(
        2, None, end="import ctypes; ctypes.string_at(0)", install=COMMUNICATOR
    )
    assert "Fatal Python error: Segmentation fault" in job.err
    assert "script.py" in job.err, job


def test_ranks_that_learn_of_an_error_do_not_bury_it():
    end = """
from chainermn_comm import PeerError
if world.rank == 1:
    time.sleep(0.1)
    raise ValueError("failure!")
raise PeerError("rank 1 found an error")
"""
    words = ("Traceback", "ValueError: failure!", "ChainerMN: rank 1 of 3")
    job = failed(3, 1, words, end=end, failing=(0, 1, 2))
    assert "PeerError" not in job.err, job


def test_the_rank_whose_loss_fails_is_the_one_that_speaks():
    body = """
import chainer, chainermn_train, numpy as np
from chainermn_comm import create_communicator
model = chainer.links.Linear(2, 1)
optimizer = chainermn_train.create_multi_node_optimizer(
    chainer.optimizers.SGD(), create_communicator("naive")
).setup(model)
def loss(x):
    if world.rank == 1 and optimizer.t == 2:
        say_failing()
        raise ValueError("failure!")
    return chainer.functions.sum(model(x))
while True:
    optimizer.update(loss, np.ones((1, 2), np.float32))
"""
    job = failed(2, 1, TRACEBACK, install="", body=body)
    assert "PeerError" not in job.err, job


def test_a_rank_that_learns_of_an_error_alone_ends_the_job():
    end = (
        "from chainermn_comm import PeerError; raise PeerError('rank 1 found an error')"
    )
    job = failed(2, 1, end=end, failing=(0,))
    assert "PeerError: rank 1 found an error" in job.err


def test_while_another_thread_is_in_mpi():
    end = """
threading.Thread(target=lambda: world.Recv(bytearray(1), source=0)).start()
time.sleep(0.3)
raise ValueError("failure!")
"""
    failed(2, 1, TRACEBACK, end=end)


def test_an_exception_in_a_thread_ends_nothing():
    body = """
def work():
    raise ValueError("failure!")
if world.rank == 1:
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
world.Barrier()
print("finished")
"""
    job = run_text(2, text(body=body))
    assert job.returncode == 0, job
    assert job.out.count("finished") == 2
    check_last_words(job, "Exception in thread loader", "Traceback", "ValueError")


def test_worker_processes_of_the_failing_rank_end():
    end = """
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
worker.start()
print("worker", worker.pid, flush=True)
raise ValueError("failure!")
"""
    job = failed(2, 1, end=end)
    (pid,) = re.findall(r"worker (\d+)", job.out)
    assert is_gone(int(pid))


def test_one_rank_alone_ends_as_python_does():
    job = failed(1, 1, end=RAISE, failing=(0,))
    assert "ValueError: failure!" in job.err
    assert "ChainerMN" not in job.err
    assert "Abort" not in job.err


def test_after_mpi_is_finalized_an_exit_is_pythons():
    job = run_text(2, text(body="MPI.Finalize()\nos._exit(0)\n"))
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err


def test_adding_twice_is_adding_once_and_in_an_interactive_interpreter_nothing():
    body = """
from chainermn_comm.faults import abort
def hooks():
    return sys.excepthook, threading.excepthook, os._exit, sys.exit, vars(SystemExit)["code"]
before = hooks()
sys.ps1 = ">>> "
abort.add_hook()
assert hooks() == before
del sys.ps1
abort.add_hook()
once = hooks()
abort.add_hook()
assert hooks() == once != before
"""
    job = run_text(2, text(install="", body=body))
    assert job.returncode == 0, job


PLANTED = f"""{CHECK_GRADIENTS}
from chainermn_comm import create_communicator
from tests.support.worlds import planted
"""


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        pytest.param("RuntimeError('planted')", 1, marks=pytest.mark.full),
        ("SystemExit(3)", 3),
    ],
)
def test_an_exception_between_steps_that_ranks_take_together_ends_the_job(
    raised, status
):
    """Such as that of a signal's handler; the others wait inside of the same call."""
    body = f"""
comm = create_communicator("hierarchical")
if world.rank == 1:
    planted.fail_while_memory_is_shared({raised})
check_gradients(comm)
"""
    job = failed(2, status, install=PLANTED, body=body)
    assert "ChainerMN: rank 1 of 2: " in job.err
    assert "rank 0 of 2" not in job.err


def test_an_exception_while_gradients_are_summed_ends_the_job():
    """Even one that is caught: the others are in the middle of the same call."""
    body = """
comm = create_communicator("single_node")
check_gradients(comm)
if world.rank == 1:
    planted.fail_while_gradients_are_summed(MemoryError("planted"))
try:
    check_gradients(comm)
except MemoryError:
    pass
comm.allreduce(np.ones(3))
"""
    job = failed(2, 1, install=PLANTED, body=body)
    assert "ChainerMN: rank 1 of 2: " in job.err
    assert "planted" in job.err


@pytest.mark.parametrize(
    ("end", "what", "status"),
    [
        (RAISE, "uncaught ValueError: failure!", 1),
        ("sys.exit(3)", "sys.exit(3)", 3),
        ("os._exit(0)", "os._exit(0) before MPI was finalized", 1),
    ],
    ids=["exception", "sys.exit", "os._exit"],
)
def test_the_launcher_gets_an_event(end, what, status):
    job = failed(2, None, end=end, environment=events.ENVIRONMENT)
    event = {
        "version": 1,
        "event": "aborted",
        "rank": 1,
        "what": what,
        "status": status,
    }
    assert events.sent(job.err) == [event], job
