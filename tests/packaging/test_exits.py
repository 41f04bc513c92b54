"""A failing rank ends the job on every Python found here; see exit_status.py, which has two ways.

The other ends are tested on the interpreter that runs the tests: tests/faults/test_exits.py.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.support.failing import (
    EXIT_3,
    RAISE,
    TRACEBACK,
    check_ended,
    check_last_words,
    script,
)
from tests.support.jobs import run_command

SECONDS = 40.0  # ends a hang, no more

# What the failing rank does, the exit status of the job, the last words on stderr.
FAILURES = {
    "exception": (RAISE, 1, TRACEBACK),
    "sys.exit": ("sys.exit(3)", 3, EXIT_3),
    "SystemExit": ("def f():\n    raise SystemExit(3)\nf()", 3, EXIT_3),
}
# These end nothing, so that all ranks reach the end of the script.
HARMLESS = {
    "caught": "try: sys.exit(3)\nexcept SystemExit as e: assert e.code == 3",
    "in a thread": "t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()",
    "success": "if world.rank: sys.exit(0)",
}


@pytest.fixture(scope="module")
def job_on(environment, interpreters, wheels):
    """Runs a script on two ranks of a Python, in an environment made once."""

    @cache
    def make(python):
        env = environment(interpreters[python])
        env.install(wheels["chainermn-comm"], "mpich")
        return env

    def run(python, path):
        env = make(python)
        ours = ("CHAINERMN_", "PYTHON", "VIRTUAL_ENV")
        variables = {name: x for name, x in os.environ.items() if not name.startswith(ours)}
        command = [env.folder / "bin" / "mpiexec", "-n", "2", env.python, path]
        return run_command([str(part) for part in command], variables, SECONDS)

    return run


@pytest.mark.parametrize("end", FAILURES)
def test_a_failing_rank_ends_the_job(python, end, job_on, tmp_path):
    statement, code, words = FAILURES[end]
    job = job_on(python, script(tmp_path, statement))
    check_ended(job, code)
    check_last_words(job, *(word.format(1) for word in words))


@pytest.mark.parametrize("end", HARMLESS)
def test_an_exit_that_is_no_failure_ends_nothing(python, end, job_on, tmp_path):
    body = "print(sys.version, flush=True)\nexec(end)\nprint('finished')"
    job = job_on(python, script(tmp_path, HARMLESS[end], body=body))
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err
    assert job.out.count("finished") == (1 if end == "success" else 2)
    assert job.out.startswith(python)
