"""Whether what a job said at its end names the rank that failed, and what it failed in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from _chainermn_events import LEAVING_STATUS

from .faults import KINDS, MOMENTS, Case
from .runs import Seen

# Whether something is as it must be, and what to say if it isn't.
Checks = Iterator[tuple[object, str]]

# What says that another rank failed.
ECHOES = ("PeerError", "Exception")
REPORT = re.compile(
    r"ChainerMN: likely culprits?\b[^:]*: rank (\d+) \(process (\d+) on (\S+)\) (.*)"
)
DISAGREE = re.compile(
    r"^(?:[\w.]+Error): (?P<operation>[^\n]+?) on rank \d+: ranks disagree on (?P<what>[^:\n]+): "
    r"(?P<views>.+)$",
    re.M,
)


def wrong(case: Case, seen: Seen) -> str:
    """What is missing in what the job said, or "" if the right rank and operation are named."""
    stalls = case.group == "stall" or (case.kind, case.moment) == ("skip", "finalize")
    judge = JUDGES["stall" if stalls else case.group]
    if not stalls and case.group != "link" and REPORT.search(seen.err):
        return "a report of a stall, where there was none"
    return next((complaint for holds, complaint in judge(case, seen) if not holds), "")


def _of_end(case: Case, seen: Seen) -> Checks:
    said = f"ChainerMN: rank {case.victim} of {case.ranks}: {KINDS[case.kind].said}"
    yield said in seen.err, f"nowhere {said!r}"
    others = re.findall(r"ChainerMN: rank (\d+) of \d+: uncaught (\w+)", seen.err)
    blaming = [int(rank) for rank, kind in others if kind not in ECHOES]
    yield set(blaming) <= {case.victim}, "another rank blames itself"
    if case.launcher == "launch":
        yield (
            f"rank {case.victim} on " in seen.verdict,
            f"the launcher says {seen.verdict!r}",
        )
    if case.kind in ("exception", "memory") and case.moment:
        place = f"in {MOMENTS[case.moment].function}"
        yield f"{place}\n" in seen.err, f"no traceback has {place!r}"


def _of_signal(case: Case, seen: Seen) -> Checks:
    pid = seen.pids[case.victim]
    if case.launcher == "launch":
        said = f"rank {case.victim} on "
        yield seen.verdict.startswith(said), f"the launcher says {seen.verdict!r}"
        return
    # The watchdog names the first; MPICH's mpiexec, which may come before it, the
    # lowest. Open MPI's ends with a space on a line of its own, but for our words.
    gone = re.search(
        r"^ ?ChainerMN: rank (\d+) \(process (\d+) on \S+\) is gone", seen.err, re.M
    )
    if gone:
        yield (
            gone.groups() == (f"{case.victim}", f"{pid}"),
            f"it is said that {gone[0]!r}",
        )
    else:
        said = rf"PID {pid} RUNNING AT|rank {case.victim} with PID"
        yield re.search(said, seen.out + seen.err), f"nobody says {said!r}"


def _of_warning(case: Case, seen: Seen) -> Checks:
    """Once ranks listen all save and leave together; before, the signal ends the rank."""
    if seen.returncode != LEAVING_STATUS:
        yield from _of_signal(case, seen)
        return
    said = "a signal warned of the end"
    yield said in seen.err, f"nowhere {said!r}"
    if case.launcher == "launch":
        yield said in seen.verdict, f"the launcher says {seen.verdict!r}"


def _of_stall(case: Case, seen: Seen) -> Checks:
    first = REPORT.search(seen.err)
    yield first, "no report"
    assert first
    named = int(first[1]), int(first[2])
    yield named == (case.victim, seen.pids[case.victim]), f"rank {first[1]} is blamed"
    if case.launcher == "launch":
        said = rf"culprits?\b[^:]*: rank {case.victim} "
        yield re.search(said, seen.verdict), f"the launcher says {seen.verdict!r}"
    report = seen.err[first.start() :]
    stacks = report.partition(f"Stacks of rank {case.victim},")[2].partition(
        "Stacks of "
    )[0]
    yield (
        KINDS[case.kind].said in first[4] + stacks,
        f"it is said to be as in {first[4]!r}{stacks}",
    )
    waits = set(
        re.findall(
            r"^  rank \d+ \(.*?\) (?:has ended and )?waits in (\w+)", report, re.M
        )
    )
    yield waits, "nobody is said to wait"
    if case.moment:
        right = waits & {*MOMENTS[case.moment].operations}
        yield right, f"ranks are said to wait in {', '.join(sorted(waits))}"


def _of_deviation(case: Case, seen: Seen) -> Checks:
    assert case.moment is not None
    found = DISAGREE.search(seen.err)
    # An argument that ranks must have in common, which `train` checks.
    if found is None:
        said = [
            line for line in seen.err.splitlines() if re.match(r"^[\w.]*Error: ", line)
        ]
        yield said, "no error"
        victim = (
            rf"\b\w+ on rank {case.victim}\b|\brank {case.victim}[: ]|"
            r"ranks 0, 1, \.\.\. gave \["
        )
        yield any(re.search(victim, line) for line in said), f"only {said[0]!r}"
        return
    # Behind them is where each rank called.
    said, _, _ = found["views"].partition(" (rank")
    views = [view.rpartition(" on rank") for view in said.split("; ")]
    groups = [set(map(int, re.findall(r"\d+", ranks))) for _, _, ranks in views]
    yield (
        {case.victim} in groups,
        f"rank {case.victim} doesn't stand alone in {found[0]!r}",
    )
    named = [found["operation"], *(text for text, _, _ in views)]
    right = any(word.startswith(MOMENTS[case.moment].operations) for word in named)
    yield right, f"no operation of {case.moment} in {found[0]!r}"


def _of_disk(case: Case, seen: Seen) -> Checks:
    said = r"ChainerMN: rank \d+ of \d+: uncaught OSError"
    yield re.search(said, seen.err), "no rank ends because of its OSError"
    for words in ("No space left on device", "in save\n"):
        yield words in seen.err, f"nowhere {words!r}"


def _of_link(case: Case, seen: Seen) -> Checks:
    """The first host's ranks are heard of; the second's report came to where the link led."""
    said = r"ChainerMN: (?:nothing was heard of .*\bbeta for|.*\bbeta didn't answer)"
    yield re.search(said, seen.err), "the host that was cut off isn't named"
    yield "beta" in seen.verdict, f"the launcher says {seen.verdict!r}"
    # In which call depends on what had come through the link.
    waits = r"rank \d+ \(.*? on alpha\) (?:has ended and )?waits in "
    yield re.search(waits, seen.err), "nobody is said to wait"


JUDGES = {
    "end": _of_end,
    "signal": _of_signal,
    "warning": _of_warning,
    "stall": _of_stall,
    "deviation": _of_deviation,
    "disk": _of_disk,
    "link": _of_link,
}
