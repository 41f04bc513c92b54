"""Whether what a job said at its end names the rank that failed, and what it failed in."""

from __future__ import annotations

import re

from .cases import DEVIATIONS, STALLS, Case
from .runs import Seen

# The function of the job in which the fault comes, as a traceback shows it.
PLACES = {
    "scatter_dataset": "scatter",
    "bcast_data": "share",
    "first update": "first_mean",
    "collective": "agree",
    "user code": "forward",
    "checkpoint": "save",
    "writing": "write",
    "finalize": "main",
}
# What the other ranks wait in then, or what ranks turn out to disagree in.
OPERATIONS = {
    "scatter_dataset": ("allgather_obj", "scatter_dataset"),
    "bcast_data": ("bcast_data",),
    "first update": ("allreduce_grad",),
    "collective": ("allreduce",),
    "user code": ("allreduce", "allreduce_grad"),
    "checkpoint": ("allgather_obj", "checkpoint"),
    "writing": ("allgather_obj",),
    "finalize": ("finalize",),
}
SIGNALS = ("SIGTERM", "SIGKILL", "SIGSEGV")
SPOKEN = {
    "exception": "uncaught RuntimeError",
    "memory": "uncaught MemoryError",
    "sys.exit": r"sys\.exit\(3\)",
    "os._exit": r"os\._exit\(3\)",
}
FUNCTIONS = {"loop": "loop_in_python", "held": "hold_in_c"}
# What says that another rank failed.
ECHOES = ("PeerError", "Exception")
DISAGREE = re.compile(
    r"^(?:[\w.]+Error): (?P<operation>[\w, ]+?) on rank \d+: ranks disagree on (?P<what>[^:\n]+): "
    r"(?P<views>.+)$",
    re.M,
)


def wrong(case: Case, seen: Seen) -> str:
    """What is missing in what the job said, or "" if the right rank and operation are named."""
    if case.kind in STALLS or (case.kind, case.moment) == ("skip", "finalize"):
        return _of_stall(case, seen)
    if REPORT.search(seen.err) and case.kind != "link":
        return "a report of a stall, where there was none"
    if case.kind in DEVIATIONS:
        return _of_deviation(case, seen)
    if case.kind in SIGNALS:
        return _of_signal(case, seen)
    if case.kind == "link":
        return _of_link(seen)
    if case.kind == "disk":
        return _of_disk(seen)
    return _of_end(case, seen)


REPORT = re.compile(
    r"ChainerMN: likely culprits?\b[^:]*: rank (\d+) \(process (\d+) on (\S+)\) (.*)"
)


def _of_end(case: Case, seen: Seen) -> str:
    said = rf"ChainerMN: rank {case.victim} of {case.ranks}: {SPOKEN[case.kind]}"
    if not re.search(said, seen.err):
        return f"nowhere {said!r}"
    others = re.findall(r"ChainerMN: rank (\d+) of \d+: uncaught (\w+)", seen.err)
    if any(int(rank) != case.victim and kind not in ECHOES for rank, kind in others):
        return "another rank blames itself"
    if case.launcher == "launch" and f"rank {case.victim} on " not in _verdict(seen):
        return f"the launcher says {_verdict(seen)!r}"
    if case.kind not in ("exception", "memory") or case.moment is None:
        return ""
    place = f"in {PLACES[case.moment]}\n"
    return "" if place in seen.err else f"no traceback has {place.strip()!r}"


def _of_signal(case: Case, seen: Seen) -> str:
    if case.launcher == "launch":
        said = f"rank {case.victim} on "
        verdict = _verdict(seen)
        return "" if verdict.startswith(said) else f"the launcher says {verdict!r}"
    # The watchdog names the first; MPICH's mpiexec, which may come before it, the lowest.
    gone = re.findall(r"^ChainerMN: rank (\d+) \(process (\d+) on \S+\) is gone", seen.err, re.M)
    if gone:
        named = int(gone[0][0]), int(gone[0][1])
        right = named == (case.victim, seen.pids[case.victim])
        return "" if right else f"rank {named[0]} is said to be gone"
    said = rf"PID {seen.pids[case.victim]} RUNNING AT|rank {case.victim} with PID"
    return "" if re.search(said, seen.out + seen.err) else f"nobody says {said!r}"


def _of_stall(case: Case, seen: Seen) -> str:
    first = REPORT.search(seen.err)
    if first is None:
        return "no report"
    if (int(first[1]), int(first[2])) != (case.victim, seen.pids[case.victim]):
        return f"rank {first[1]} is blamed"
    if case.launcher == "launch":
        said = rf"culprits?\b[^:]*: rank {case.victim} "
        if not re.search(said, _verdict(seen)):
            return f"the launcher says {_verdict(seen)!r}"
    expected = {"SIGSTOP": "is stopped", "skip": "has ended and waits in MPI_Finalize"}
    if expected.get(case.kind, "") not in first[4]:
        return f"rank {first[1]} is said to be as in {first[4]!r}"
    report = seen.err[first.start() :]
    if case.kind in FUNCTIONS:
        stacks = report.partition(f"Stacks of rank {case.victim},")[2].partition("Stacks of ")[0]
        if f"in {FUNCTIONS[case.kind]}\n" not in stacks:
            return "the rank's stacks are missing"
    waits = re.findall(r"^  rank \d+ \(.*?\) waits in (\w+)", report, re.M)
    if not waits:
        return "nobody is said to wait"
    if case.moment and not set(waits) & set(OPERATIONS[case.moment]):
        return f"ranks are said to wait in {', '.join(sorted(set(waits)))}"
    return ""


def _of_deviation(case: Case, seen: Seen) -> str:
    found = DISAGREE.search(seen.err)
    if found is None:
        return _of_argument(case, seen)
    views = [view.rpartition(" on rank") for view in found["views"].split("; ")]
    groups = [set(map(int, re.findall(r"\d+", ranks))) for _, _, ranks in views]
    if {case.victim} not in groups:
        return f"rank {case.victim} doesn't stand alone in {found[0]!r}"
    named = {found["operation"], *(text for text, _, _ in views)}
    assert case.moment is not None
    if not any(word.startswith(OPERATIONS[case.moment]) for word in named):
        return f"no operation of {case.moment} in {found[0]!r}"
    return ""


def _of_argument(case: Case, seen: Seen) -> str:
    """An argument that ranks must have in common, which the functions of `train` check."""
    victim = rf"\b\w+ on rank {case.victim}\b|\brank {case.victim}[: ]|ranks 0, 1, \.\.\. gave \["
    said = [line for line in seen.err.splitlines() if re.match(r"^[\w.]*Error: ", line)]
    if not said:
        return "no error"
    return "" if any(re.search(victim, line) for line in said) else f"only {said[0]!r}"


def _of_disk(seen: Seen) -> str:
    if not re.search(r"ChainerMN: rank \d+ of \d+: uncaught OSError", seen.err):
        return "no rank ends because of its OSError"
    if "No space left on device" not in seen.err:
        return "it isn't said what was wrong with the disk"
    return "" if "in save\n" in seen.err else "no traceback shows the save"


def _of_link(seen: Seen) -> str:
    """The first host's ranks are heard of; the second's report came to where the link led."""
    said = r"ChainerMN: .*\bbeta (?:didn't answer|has not answered)"
    if not re.search(said, seen.err):
        return "the host that was cut off isn't named"
    if "beta" not in _verdict(seen):
        return f"the launcher says {_verdict(seen)!r}"
    # In which call depends on what had come through the link.
    waits = re.search(r"^  rank \d+ \(.*? on alpha\) (?:has ended and )?waits in ", seen.err, re.M)
    return "" if waits else "nobody is said to wait"


def _verdict(seen: Seen) -> str:
    found = re.findall(r"^chainermn launch: (.*)$", seen.err, re.M)
    return found[-1] if found else ""
