"""However one rank ends in failure, the whole job ends, non-zero, and says why, once.

How soon is in tests/test_promises_of_time.py; signals at all moments are in tests/chaos.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.jobs.failing import (
    ADD_HOOK,
    ALONE,
    COMMUNICATOR,
    ENDS,
    RAISE,
    TRACEBACK,
    check_ended,
    check_last_words,
    failed,
    script,
    text,
    worded,
)
from tests.support.jobs.processes import is_gone
from tests.support.jobs.runner import CHECK_GRADIENTS, run, run_text
from tests.support.plugins.pairwise import in_full
from tests.support.watchdog import events

REFUSED = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0"}
FORCED = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "1"}


@dataclass(frozen=True)
class Row:
    """A job of a script that `failing.text` makes; rank 1 of it raises an error by default.

    Attributes:
        status: of the job, 0 for success; None for any failure.
        words: how the last lines of its errors begin, in this order.
        counts: how often its errors have these words.
        printed: likewise of its output.
        script: the arguments of `text`.
    """

    ranks: int = 2
    status: int | None = 1
    words: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    printed: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    script: dict[str, Any] = field(default_factory=dict)


def end(name, others):
    """A rank that ends so while the others do that; see `failing.BODY`."""
    failure = ENDS[name]
    counts = {"Traceback": "Traceback" in failure.words}
    return Row(
        status=failure.status,
        words=failure.words,
        counts=counts,
        script={"end": failure.statement, "others": others},
    )


OWN_HOOK = (
    "sys.excepthook = lambda kind, value, trace: print('OWN HOOK', file=sys.stderr)\n"
)
# As the manual's snippet.
ABORTING_HOOK = """
def hook(kind, value, trace):
    print("OWN HOOK", file=sys.stderr, flush=True)
    time.sleep(0.5)
    world.Abort(7)
sys.excepthook = hook
"""
# After all that would end the job, the other rank goes on.
REFUSAL = """
import atexit
from pathlib import Path
leaving = Path(sys.argv[0]).with_name("leaving")
if world.rank == 1:
    atexit.register(leaving.touch)
    say_failing()
    sys.exit(3)
while not leaving.exists():
    time.sleep(0.01)
print("going on")
"""
LOSS = """
import chainer, chainermn_train, numpy as np
model = chainer.links.Linear(2, 1)
optimizer = chainermn_train.create_multi_node_optimizer(
    chainer.optimizers.SGD(), create_communicator("naive")
).setup(model)
def loss(x):
    if world.rank == 1 and optimizer.t == 2:
        say_failing()
        raise RuntimeError('planted')
    return chainer.functions.sum(model(x))
while True:
    optimizer.update(loss, np.ones((1, 2), np.float32))
"""
ODD = """
comm = create_communicator("naive")
world.Barrier()
say_failing()
comm.allreduce_obj(1) if world.rank != 2 else comm.bcast_obj(1)
"""
# Of three ranks the second one has the error itself.
LEARNING = f"""
from chainermn_comm import PeerError
if world.size > 2 and world.rank == 1:
    time.sleep(0.1)
    {RAISE}
raise PeerError("rank 1 found an error")
"""
IMPORT = "from chainermn_comm import create_communicator\n"
FIRST = """
if world.rank == 1:
    say_failing()
    create_communicator('naive', 'no communicator')
create_communicator("naive")
"""
BY_NAME = "from sys import exit as leave\n"
PLANTED = f"""{CHECK_GRADIENTS}
from chainermn_comm import create_communicator
from tests.support.worlds import planted
"""
IN_A_STEP = """
say_failing()
comm = create_communicator("hierarchical")
if world.rank == 1:
    planted.fail_while_memory_is_shared(SystemExit(3))
check_gradients(comm)
"""
IN_A_SUM = """
say_failing()
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
HARMLESS = """
try:
    sys.exit(3)
except SystemExit as caught:
    assert caught.code == 3
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
if os.fork() == 0:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
world.Barrier()
print("finished")
"""
SUCCESS = """
ends = ["pass", "sys.exit()", "raise SystemExit(0)", "exit(0)"]
if world.rank == 0:
    time.sleep(0.7)
    print("finished")
exec(ends[world.rank])
"""
IN_A_THREAD = """
def work():
    raise RuntimeError('planted')
if world.rank == 1:
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
world.Barrier()
print("finished")
"""
IN_RECV = """
threading.Thread(target=lambda: world.Recv(bytearray(1), source=0)).start()
time.sleep(0.3)
raise RuntimeError('planted')
"""
CHILD = """
import subprocess
child = (
    "import sys, chainermn_comm.faults.abort as abort; abort.add_hook(); "
    "print('mpi4py.MPI' in sys.modules)"
)
subprocess.run([sys.executable, "-c", child], check=True)
"""
TWICE = """
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
ROWS = {
    # The other ends are among the promises of time.
    "an interrupt": end("interrupt", "loop"),
    "SystemExit": end("SystemExit", "loop"),
    "an exit with a message": end("message", "barrier"),
    "os._exit": end("os._exit", "sleep"),
    "a rank that is alone in its communicator": Row(
        3,
        words=TRACEBACK,
        counts={"; the last line of your own code in it is <string>:1.": 1},
        script={"failing": (0,), "install": ALONE, "end": RAISE},
    ),
    "a rank whose first communicator fails": Row(
        words=("TypeError", "ChainerMN: rank 1 of 2: uncaught TypeError"),
        script={"install": IMPORT, "body": FIRST},
    ),
    "an exit where the environment refuses the hook": Row(
        status=None,
        environment=REFUSED,
        printed={"going on": 1},
        counts={"ChainerMN": 0},
        script={"install": COMMUNICATOR, "body": REFUSAL},
    ),
    "the user's own hook before ours": Row(
        counts={"OWN HOOK": 1, "rank 1 of 2: uncaught RuntimeError, ending": 1},
        script={"install": OWN_HOOK + ADD_HOOK, "end": RAISE},
    ),
    "the user's own hook after ours": Row(
        counts={"OWN HOOK": 1, "rank 1 of 2: uncaught RuntimeError, ending": 1},
        script={"install": ADD_HOOK + OWN_HOOK, "end": RAISE},
    ),
    "a hook of the user's that never returns": Row(
        status=7,
        counts={"OWN HOOK": 1},
        script={"install": ABORTING_HOOK + ADD_HOOK, "end": RAISE},
    ),
    "the same error on all ranks": Row(
        4,
        counts={
            "Traceback": 1,
            "ChainerMN: rank ": 1,
            "unknown communicator 'flatt' (did you mean 'flat'?); use one of: flat": 1,
            "/chainermn_comm/": 0,  # no frame of ours
        },
        script={
            "install": COMMUNICATOR,
            "end": "create_communicator('flatt')",
            "failing": (0, 1, 2, 3),
        },
    ),
    "the odd one of ranks that disagree": Row(
        5,
        words=(
            "Traceback",
            "chainermn_comm.errors.RankMismatchError: bcast_obj on rank 2: ranks disag",
            "ChainerMN: rank 2 of 5: uncaught RankMismatchError",
            "Next step: look for an `if",
        ),
        counts={"Traceback": 1, "handshake.py": 0},
        script={"install": COMMUNICATOR, "body": ODD},
    ),
    "a crash and its line of Python": Row(
        status=None,
        counts={"Fatal Python error: Segmentation fault": 1},
        script={"install": COMMUNICATOR, "end": ENDS["SIGSEGV"].statement},
    ),
    "an error that others learn of": Row(
        3,
        words=TRACEBACK,
        counts={"PeerError": 0},
        script={"end": LEARNING, "failing": (0, 2, 1)},
    ),
    "a rank that learns of an error alone": Row(
        counts={"PeerError: rank 1 found an error": 1},
        script={"end": LEARNING, "failing": (0,)},
    ),
    "a loss": Row(words=TRACEBACK, script={"install": COMMUNICATOR, "body": LOSS}),
    "a rank whose other thread is in MPI": Row(
        words=TRACEBACK, script={"end": IN_RECV}
    ),
    "one rank": Row(
        1,
        counts={"RuntimeError: planted": 1, "ChainerMN": 0, "Abort": 0},
        script={"end": RAISE, "failing": (0,)},
    ),
    # As a signal's handler raises it; the others wait inside of the same call.
    "an exit in a step that ranks take together": Row(
        status=3,
        counts={"ChainerMN: rank 1 of 2: ": 1, "rank 0 of 2": 0},
        script={"install": PLANTED, "body": IN_A_STEP},
    ),
    # Though it is caught: the others are in the middle of the same call.
    "an error while gradients are summed": Row(
        counts={"ChainerMN: rank 1 of 2: ": 1},
        script={"install": PLANTED, "body": IN_A_SUM},
    ),
    "an exit status of 256": Row(script={"end": "sys.exit(256)"}),
    "an exit status of -1": Row(status=255, script={"end": "sys.exit(-1)"}),
    "an exit taken by name before": Row(
        status=3, script={"install": BY_NAME + ADD_HOOK, "end": "leave(3)"}
    ),
    # Each rank in a way of its own; rank 0 when the others wait for it.
    "success": Row(4, 0, printed={"finished": 1}, script={"body": SUCCESS}),
    "exits that are caught, or a thread's, or a child's": Row(
        status=0, printed={"finished": 2}, script={"body": HARMLESS}
    ),
    "an exception in a thread": Row(
        status=0,
        printed={"finished": 2},
        counts={"Exception in thread loader": 1, "RuntimeError: planted": 1},
        script={"body": IN_A_THREAD},
    ),
    "an exit after MPI was finalized": Row(
        status=0, script={"body": "MPI.Finalize()\nos._exit(0)"}
    ),
    "a child of a rank, which doesn't start MPI again": Row(
        status=0,
        environment=FORCED,
        printed={"False": 2},
        script={"body": CHILD},
    ),
    "adding twice, which is once, and to a shell, which is never": Row(
        status=0, script={"install": "", "body": TWICE}
    ),
}
FULL = ("the user's own hook after ours", "an exit status of -1")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in FULL else ())
        for name in ROWS
    ],
)
def test_a_job_ends_as_it_must_and_says_once_what_it_must(name):
    row = ROWS[name]
    if row.status == 0:
        job = run_text(row.ranks, text(**row.script), environment=row.environment)
        assert job.returncode == 0, job
        assert "ChainerMN" not in job.err, job
    else:
        job = failed(row.ranks, row.status, row.words, row.environment, **row.script)
    for words, times in row.counts.items():
        assert job.err.count(words) == times, (words, job)
    for words, times in row.printed.items():
        assert job.out.count(words) == times, (words, job)


def test_forced_before_a_communicator_exists():
    # One rank fails before it has used MPI in any way, and the other begins to.
    script = """
import sys, chainermn_comm
from tests.support.worlds.planted import say_failing
if sys.modules["mpi4py.MPI"].COMM_WORLD.rank == 1:
    say_failing()
    raise RuntimeError('planted')
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
    job = run_text(2, script, environment=FORCED)
    assert job.returncode == 1, job
    check_last_words(job, *worded(TRACEBACK, 1, 2))


def test_importing_starts_mpi_only_where_forced():
    script = "import sys, chainermn_comm; print('mpi4py.MPI' in sys.modules)"
    assert run(1, "-c", script).out.split() == ["False"]
    assert run(1, "-c", script, environment=FORCED).out.split() == ["True"]


def test_long_tracebacks_of_all_ranks_stay_whole():
    # 8 kB each; Open MPI's launcher reads 4 kB at a time.
    end = """world.Barrier()
raise ValueError(''.join(f'\\nby {world.rank} line {i:03} of 200' for i in range(200)))
"""
    job = failed(3, 1, end=end, failing=(0, 1, 2))
    lines = [line for line in job.err.splitlines() if line.endswith("of 200")]
    # On a busy machine some ranks are ended before they come to speak.
    assert lines, job
    for begin in range(0, len(lines), 200):
        rank = lines[begin].split()[1]
        whole = [f"by {rank} line {i:03} of 200" for i in range(200)]
        assert lines[begin : begin + 200] == whole, job


def test_worker_processes_of_the_failing_rank_end():
    end = f"""
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
worker.start()
print("worker", worker.pid, flush=True)
{RAISE}
"""
    job = failed(2, 1, end=end)
    (pid,) = re.findall(r"worker (\d+)", job.out)
    assert is_gone(int(pid))


@pytest.mark.parametrize(
    ("end", "what"),
    [
        ("exception", "uncaught RuntimeError: planted"),
        ("sys.exit", "sys.exit(3)"),
        ("early success", "os._exit(0) before MPI was finalized"),
    ],
)
def test_the_launcher_gets_an_event(end, what):
    failure = ENDS[end]
    job = failed(2, None, end=failure.statement, environment=events.ENVIRONMENT)
    event = {"version": 1, "event": "aborted", "rank": 1}
    event |= {"what": what, "status": failure.status}
    assert events.sent(job.err) == [event], job


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (("-m", "mpi4py", "script.py"), "exception"),
        (("-m", "script"), "SystemExit"),
        *in_full((("-m", "mpi4py", "script.py"), "sys.exit")),
    ],
)
def test_however_the_script_is_started(words, end, tmp_path):
    failure = ENDS[end]
    script(tmp_path, failure.statement)
    job = run(2, *words, cwd=tmp_path)
    check_ended(job, failure.status)
    check_last_words(job, *worded(failure.words, 1, 2))
