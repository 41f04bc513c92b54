"""Real logs of each fault of the chaos suite: what a user reads last, what `explain` says.

`python -m tests.chaos.logs` makes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.logs import CASES, FOLDER, JOBS
from tests.support.jobs import commands
from tests.support.tools.jobs import verdict_on

# Which rank failed and how, and the next step. The second of three ranks is planted to fail.
DISAGREE = ("rank 1.*ranks disagree on ", "look for an `if comm.rank`")
OUTSIDE = ("rank 1.*is in no call for ", "read its stack, the first")
SAID = {
    "exception": ("rank 1.*RuntimeError: planted", "fix the error above"),
    "sys.exit": (r"rank 1.*sys\.exit\(3\)", "read what that rank printed before"),
    "os._exit": (
        r"rank 1.*os\._exit\(3\) before MPI was finalized",
        "end the rank by sys.exit()",
    ),
    "SIGTERM": (
        r"(the job|launch): .*a signal warned of the end",
        "start the job again",
    ),
    "SIGKILL": (r"rank 1.*(gone, last seen in|ended by signal 9)", "dmesg"),
    "SIGSEGV": (
        "rank 1.*Fatal Python error: Segmentation fault|SIGSEGV",
        "read the stack after 'Fatal",
    ),
    "memory": ("rank 1.*MemoryError", "use fewer ranks"),
    "SIGSTOP": ("rank 1.*is stopped", "kill -CONT"),
    "loop": OUTSIDE,
    "held": OUTSIDE,
    "skip": DISAGREE,
    "other": DISAGREE,
    "shape": DISAGREE,
    # The same for all.
    "disk": (r"rank \d.*No space left on device", "df -h"),
    "typo": ("rank 0.*unknown communicator 'hierarchicl'", "fix the error above"),
    # All ranks, or a host.
    "link": (
        "(the job: )?(nothing was heard of|ranks wait for others).* on beta",
        "ping that host",
    ),
    "ctrl_c": (
        "(the job|launch): ended by Ctrl-C$",
        "start it again; it goes on only",
    ),
    "odd": (
        r"rank 3.*ranks disagree on array: .*; float64 \(4,\) on rank 3\b",
        DISAGREE[1],
    ),
}
LOGS = sorted(FOLDER.glob("*.log"))
LAST_LINES = 10


def test_each_fault_has_a_log_by_each_launcher():
    assert {*SAID} == {*CASES, *JOBS}
    assert {*CASES} == {*KINDS}
    # mpiexec waits forever where a link is cut.
    names = {f"{kind}.mpiexec" for kind in {*KINDS} - {"link"}}
    names |= {f"{kind}.launch" for kind in SAID}
    assert {path.stem for path in LOGS} == names


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_explain_and_launch_name_the_rank_the_cause_and_the_next_step(path: Path):
    kind, launcher = path.stem.rsplit(".", 1)
    how, step = SAID[kind]
    log = path.read_text()
    assert not re.search(r"/root|/work|\btmp/|/pyenv|\.venv|tests/chaos", log)

    verdict = verdict_on(log)
    assert re.match(how, verdict.headline)
    assert step in verdict.next_step
    if kind in ("exception", "memory"):
        assert verdict.how.startswith(verdict.traceback.splitlines()[-1])
        assert "/home/user/faults.py" in verdict.traceback

    # With no verdict at all it would be 1.
    done = commands.invoke("explain", path)
    assert done.exit_code == 0
    reports = [done.output]
    if launcher == "launch":  # which says so last, and once
        reports.append(log)
        assert log.count("Next step: ") == 1
    for report in reports:
        last = report.splitlines()[-LAST_LINES:]
        assert [line for line in last if re.search(how, line)]
        assert step in last[-1]
