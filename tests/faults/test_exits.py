"""However one rank ends in failure, the whole job ends, non-zero, and says why.

The commonest failures are in tests/test_promises_of_time.py, which says how soon;
signals are in tests/chaos, which has them at all moments.
"""

from __future__ import annotations

import pytest

from tests.support.jobs.failing import (
    ADD_HOOK,
    BODY,
    EXIT_3,
    RAISE,
    TRACEBACK,
    check_ended,
    check_last_words,
    failed,
    script,
    text,
)
from tests.support.jobs.runner import run, run_text
from tests.support.plugins.pairwise import in_full

# What the failing rank does, the exit status of the job, the last words on stderr.
REPORTED = {
    "exception": (RAISE, 1, TRACEBACK),
    "interrupt": (
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        130,
        (
            *("Traceback", "KeyboardInterrupt"),
            *(
                "ChainerMN: rank {} of 2: uncaught KeyboardInterrupt",
                "Next step: nothing is wrong",
            ),
        ),
    ),
    "sys.exit": ("sys.exit(3)", 3, EXIT_3),
    "SystemExit": ("raise SystemExit(3)", 3, EXIT_3),
    "message": (
        "sys.exit('no')",
        1,
        ("no", "ChainerMN: rank {} of 2: sys.exit with a message"),
    ),
    "os._exit": ("os._exit(3)", 3, ("ChainerMN: rank {} of 2: os._exit(3)",)),
    "early success": ("os._exit(0)", 1, ("ChainerMN: rank {} of 2: os._exit(0)",)),
}
# Each end while rank 1 waits in a barrier and while rank 0 is in code of its own.
CASES = [
    (end, others, rank)
    for i, end in enumerate(REPORTED)
    for others, rank in (("barrier", 0), (("sleep", "loop")[i % 2], 1))
]
DEFAULT = [
    ("interrupt", "loop", 1),
    ("SystemExit", "loop", 1),
    ("message", "barrier", 0),
    ("os._exit", "loop", 1),
]


REST = [case for case in [*CASES, ("exception", "loop", 1)] if case not in DEFAULT]


@pytest.mark.parametrize(("end", "others", "rank"), [*DEFAULT, *in_full(*REST)])
def test_a_failing_rank_says_why_and_ends_the_job(end, others, rank):
    statement, code, words = REPORTED[end]
    job = failed(2, code, words, end=statement, others=others, failing=(rank,))
    assert ("Traceback" in job.err) == ("Traceback" in words), job


@pytest.mark.full
def test_a_third_rank_is_ended_too():
    words = (*TRACEBACK[:2], "ChainerMN: rank {} of 3: uncaught ValueError")
    failed(3, 1, words, end=RAISE, others="loop", failing=(2,))


def test_success_stays_success_and_the_others_finish():
    """Each rank in a way of its own; rank 0 when the others wait for it."""
    body = """
ends = ["pass", "sys.exit()", "raise SystemExit(0)", "exit(0)"]
if world.rank == 0:
    time.sleep(0.7)
    print("rank 0 finished")
exec(ends[world.rank])
"""
    job = run_text(4, text(body=body))
    assert job.returncode == 0, job
    assert "rank 0 finished" in job.out
    assert "ChainerMN" not in job.err


def test_an_exit_that_is_caught_or_a_threads_or_a_childs_does_not_end_the_job():
    body = """
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
    job = run_text(2, text(body=body))
    assert job.returncode == 0, job
    assert job.out.count("finished") == 2


@pytest.mark.parametrize(("code", "status"), [(256, 1), *in_full((-1, 255))])
def test_exit_codes_that_do_not_fit_are_no_success(code, status):
    failed(2, status, end=f"sys.exit({code})")


def test_an_exit_taken_by_name_before_is_seen():
    failed(2, 3, end="leave(3)", install="from sys import exit as leave\n" + ADD_HOOK)


@pytest.mark.parametrize(
    ("words", "end", "code"),
    [
        (("-m", "mpi4py"), RAISE, 1),
        *in_full(
            (("-m", "mpi4py"), "sys.exit(3)", 3), (("-m", "mpi4py"), "sys.exit(0)", 0)
        ),
        (("-m", "script"), "raise SystemExit(3)", 3),
        *in_full((("-c",), "sys.exit(3)", 3)),
    ],
)
def test_however_the_script_is_started(words, end, code, tmp_path):
    path = script(tmp_path, end, body=BODY if code else "exec(end)")
    last = {"-c": [path.read_text()], "script": []}.get(words[-1], [path])
    job = run(2, *words, *last, cwd=tmp_path)
    if code == 0:
        assert job.returncode == 0, job
        return
    check_ended(job, code)
    said = EXIT_3 if "3" in end else TRACEBACK
    check_last_words(job, *(word.format(1) for word in said))
