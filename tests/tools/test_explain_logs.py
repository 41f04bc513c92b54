"""Real logs of each fault of the chaos suite: what a user reads last, what `explain` says.

`python -m tests.chaos.logs` makes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.logs import CASES, FOLDER, JOBS, VICTIM
from tests.support.tools.explained import verdict_on

# How the rank failed, and the next step.
DISAGREE = ("ranks disagree on ", "look for an `if comm.rank`")
OUTSIDE = ("is in no call for ", "read its stack, the first")
SAID = {
    "exception": ("RuntimeError: planted", "fix the error above"),
    "sys.exit": (r"sys\.exit\(3\)", "read what that rank printed before"),
    "os._exit": (
        r"os\._exit\(3\) before MPI was finalized",
        "end the rank by sys.exit()",
    ),
    "SIGTERM": ("a signal warned of the end", "start the job again"),
    "SIGKILL": (r"(is )?gone, last seen in|ended by signal 9", "dmesg"),
    "SIGSEGV": (
        r"Fatal Python error: Segmentation fault|SIGSEGV",
        "read the stack after 'Fatal",
    ),
    "memory": ("MemoryError", "use fewer ranks"),
    "SIGSTOP": ("is stopped", "kill -CONT"),
    "loop": OUTSIDE,
    "held": OUTSIDE,
    "skip": DISAGREE,
    "other": DISAGREE,
    "shape": DISAGREE,
    "disk": ("No space left on device", "df -h"),
    "link": ("(nothing was heard of|could not be asked; ).* on beta", "ping that host"),
    "ctrl_c": (
        "^ended by Ctrl-C$|: ended by Ctrl-C$",
        "nothing is wrong; start the job again",
    ),
    "typo": (
        "unknown communicator 'hierarchicl'",
        "fix the error above",
    ),
    "odd": (r"ranks disagree on array: .*; float64 \(4,\) on rank 3\b", DISAGREE[1]),
}
LOGS = sorted(FOLDER.glob("*.log"))
# All ranks, or a host, and no single rank.
OF_NO_RANK = ("SIGTERM", "link", "ctrl_c")
# Any, where it is the same for all.
VICTIMS = {"typo": "0", "odd": "3", "disk": r"\d"}
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
    rank = VICTIMS.get(kind, VICTIM)
    log = path.read_text()
    assert not re.search(r"/root|/work|\btmp/|/pyenv|\.venv|tests/chaos", log)

    verdict = verdict_on(log)
    if kind in OF_NO_RANK:
        assert verdict.rank is None
    else:
        assert re.fullmatch(str(rank), str(verdict.rank))
    assert re.search(how, verdict.how)
    assert step in verdict.next_step
    if kind in ("exception", "memory"):
        assert verdict.traceback.splitlines()[-1].startswith(how)
        assert "/home/user/faults.py" in verdict.traceback

    if launcher == "launch":  # which says so last, and once
        last = log.splitlines()[-LAST_LINES:]
        said = [line for line in last if line.startswith("chainermn launch: ")][-1]
        assert re.search(how, said)
        assert kind in OF_NO_RANK or re.search(rf"\brank {rank}\b", said)
        assert step in last[-1]
        assert log.count("Next step: ") == 1
