"""A failing rank ends the job on every Python found here; see system_exit.py, which has two ways.

The other ends are tested on the interpreter that runs the tests:
tests/faults/test_exits.py.
"""

import os

import pytest

from tests.support.hosts.interpreters import found_combinations
from tests.support.jobs import failing
from tests.support.jobs.runner import run_command

SECONDS = 300.0  # ends a hang, no more

# How the failing rank ends.
FAILURES = {
    "exception": failing.ENDS["exception"],
    "sys.exit": failing.ENDS["sys.exit"],
    "SystemExit": failing.End(
        "def f():\n    raise SystemExit(3)\nf()", 3, failing.EXIT_3
    ),
}
# None ends anything, so that all ranks come past them; the last one ends a rank, but
# with success.
HARMLESS = """\
try: sys.exit(3)
except SystemExit as e: assert e.code == 3
t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()
print('came through', flush=True)
if world.rank: sys.exit(0)
"""


@pytest.fixture
def job_on(environment_on):
    """Runs a script on two ranks of a Python, the oldest one with NumPy 1.26."""

    def run(python, path):
        combinations = found_combinations()
        numpy = dict(combinations[1:] + combinations[:1])[python]
        env = environment_on(python, numpy)
        ours = ("CHAINERMN_", "PYTHON", "VIRTUAL_ENV")
        variables = {
            name: x for name, x in os.environ.items() if not name.startswith(ours)
        }
        command = [env.folder / "bin" / "mpiexec", "-n", "2", env.python, path]
        return run_command([str(part) for part in command], variables, SECONDS)

    return run


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, marks=() if end == "SystemExit" else pytest.mark.full)
        for end in FAILURES
    ],
)
def test_a_failing_rank_ends_the_job(python, end, job_on, tmp_path):
    failure = FAILURES[end]
    job = job_on(python, failing.script(tmp_path, failure.statement))
    failing.check_ended(job, failure.status)
    failing.check_last_words(job, *failing.worded(failure.words, 1, 2))


def test_an_exit_that_is_no_failure_ends_nothing(python, job_on, tmp_path):
    body = "print(sys.version, flush=True)\nexec(end)\nprint('finished')"
    job = job_on(python, failing.script(tmp_path, HARMLESS, body=body))
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err
    assert job.out.count("came through") == 2
    assert job.out.count("finished") == 1
    assert job.out.startswith(python)
