"""Real logs of each fault of the chaos suite: what a user reads last, what `explain` says.

`python -m tests.chaos.logs` makes them anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.logs import CASES, FOLDER, JOBS, VICTIM
from tests.support.jobs import commands

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
        "unknown communicator 'hierarchicl'; use one of: dummy, flat",
        "fix the error above",
    ),
    "odd": (r"ranks disagree on array: .*; float64 \(4,\) on rank 3\b", DISAGREE[1]),
}
LOGS = sorted(FOLDER.glob("*.log"))
# All ranks, or a host, and no single rank.
OF_NO_RANK = ("SIGTERM", "link", "ctrl_c")
# Any, where it is the same for all.
VICTIMS = {"typo": r"\d", "odd": "3", "disk": r"\d"}
LAST_LINES = 10


def test_each_fault_has_a_log_by_each_launcher():
    assert {*SAID} - {*JOBS} == {*CASES} == {*KINDS}
    names = {
        f"{kind}.{launcher}.log" for kind in KINDS for launcher in ("launch", "mpiexec")
    }
    names |= {f"{kind}.launch.log" for kind in JOBS}
    assert {path.name for path in LOGS} == names - {"link.mpiexec.log"}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_explain_names_the_rank_the_cause_and_the_next_step(path: Path):
    kind = path.name.rsplit(".", 2)[0]
    how, step = SAID[kind]
    done = commands.invoke("explain", "--json", path)
    assert done.exit_code == 0
    verdict = json.loads(done.output)["verdict"]
    rank = None if kind in OF_NO_RANK else VICTIMS.get(kind, VICTIM)
    assert re.fullmatch(str(rank), str(verdict["rank"]))
    assert re.search(how, verdict["how"])
    assert step in verdict["next_step"]
    # The exception itself, and the place.
    if kind in ("exception", "memory"):
        assert verdict["traceback"].splitlines()[-1].startswith(how)
        assert "/home/user/faults.py" in verdict["traceback"]
    text = commands.invoke("explain", path, COLUMNS="1000").output
    assert text.count("Next step: ") == 1
    assert verdict["next_step"] in text


@pytest.mark.parametrize(
    "path",
    # Where nobody has failed.
    [path for path in LOGS if path.name != "SIGTERM.mpiexec.log"],
    ids=lambda path: path.stem,
)
def test_a_user_reads_last_which_rank_failed_how_and_what_to_do_once(path: Path):
    kind, launcher, _ = path.name.rsplit(".", 2)
    how, step = SAID[kind]
    log = path.read_text()
    steps = [line for line in log.splitlines() if line.startswith("Next step: ")]
    assert len({*steps}) == 1
    assert len(steps) == 1 or kind == "disk"  # which ranks find full at different files
    if launcher == "launch":
        last = log.splitlines()[-LAST_LINES:]
        verdict = [line for line in last if line.startswith("chainermn launch: ")][-1]
        victim = VICTIMS.get(kind, VICTIM)
        assert kind in OF_NO_RANK or re.search(rf"\brank {victim}\b", verdict)
        assert re.search(how, verdict)
        assert step in last[-1]
        # Once: no other line of these says the verdict, or a next step.
        assert sum(step in line for line in last) == 1
        assert sum(verdict in line for line in last) == 1
        said = [line for line in last if line.startswith("chainermn launch: ")]
        assert said[-1:] == [line for line in said if "/mpiexec" not in line]
    # mpiexec's own lines come later, or much of them before: it prints them as it
    # likes.
    elif kind != "SIGSEGV":  # where the watchdog has seen no more than the end
        assert step in steps[0]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_no_path_of_the_machine_that_made_a_log_is_in_it(path: Path):
    assert not re.search(r"/root|/work|/tmp/|/pyenv|\.venv", path.read_text())
