"""Whether what a job said at its end names the rank that failed, and what it failed in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from _chainermn_events import LEAVING_STATUS

from .faults import KINDS, MOMENTS, Case
from .runs import Seen

REPORT = r"ChainerMN: likely culprits?\b[^:]*: "
# What says that another rank failed.
ECHOES = "(?:PeerError|Exception)"
# What the launcher's verdict must have, of the rank that failed; of a deviation and a
# full disk each rank may be the first.
VERDICTS = {
    "end": "rank {rank} on ",
    "signal": "^rank {rank} on ",
    "warning": "a signal warned of the end",
    "stall": r"culprits?\b[^:]*: rank {rank} ",
    "link": "beta",
}


def wrong(case: Case, seen: Seen) -> str:
    """What is missing in what the job said, or "" if the right rank and operation are named."""
    group = group_of(case, seen)
    for pattern in expected(group, case, seen):
        if not re.search(pattern, seen.job.out + seen.job.err, re.M):
            return f"nowhere {pattern!r}"
    for pattern in refused(group, case, seen):
        if found := re.search(pattern, seen.job.err, re.M):
            return f"it is said that {found[0]!r}"
    if case.launcher == "launch":
        last = re.findall("^chainermn launch: (.*)$", seen.job.err, re.M)[-1:]
        verdict = VERDICTS.get(group, "").format(rank=case.victim)
        if not re.search(verdict, "".join(last)):
            return f"the launcher says {last}"
    return ""


def group_of(case: Case, seen: Seen) -> str:
    """The group of the fault, by what the job must say after it."""
    if (case.kind, case.moment) == ("skip", "finalize"):
        return "stall"
    # Once ranks listen all save and leave together; before, the signal ends the rank.
    if case.group == "warning" and seen.job.returncode != LEAVING_STATUS:
        return "signal"
    return case.group


def expected(group: str, case: Case, seen: Seen) -> Iterator[str]:
    """Patterns that are each found in what the job said."""
    rank = case.victim
    pid = "".join(seen.printed(rf"RANK {rank} (\d+)"))
    of_rank = rf"rank {rank} \(process {pid} on \S+\)"
    operations = r"\w+"
    if case.moment:
        operations = f"(?:{'|'.join(MOMENTS[case.moment].operations)})"
    said = KINDS[case.kind].said.format(rank=rank, ranks=case.ranks)
    if group == "end":
        yield re.escape(said)
        if case.kind in ("exception", "memory") and case.moment:
            yield rf"in {MOMENTS[case.moment].function}$"
    elif group == "signal" and case.launcher == "mpiexec":
        # MPICH's launcher, which may come before the watchdog, names the first rank;
        # Open MPI's has a space on a line of its own, but for our words.
        yield (
            rf"^ ?ChainerMN: {of_rank} is gone|PID {pid} RUNNING AT|"
            rf"rank {rank} with PID"
        )
    elif group == "warning":
        yield "a signal warned of the end"
    elif group == "stall":
        yield REPORT + of_rank
        stack = rf"^Stacks of rank {rank},(?:(?!^Stacks of )[\s\S])*"
        yield rf"(?:{REPORT}.*|{stack}){said}"
        yield rf"^  rank \d+ \(.*?\) (?:has ended and )?waits in {operations}\b"
    elif group == "deviation" and "ranks disagree on" in seen.job.err:
        yield rf"ranks disagree on .* on rank {rank}(?:;| \(rank|$)"
        head = r"^[\w.]+Error: "
        yield rf"{head}(?:.*: ranks disagree on [^:]*: (?:.*; )?)?{operations}"
    elif group == "deviation":
        # An argument that ranks must have in common, which `train` checks.
        yield (
            rf"^[\w.]*Error: .*(?:\b\w+ on rank {rank}\b|\brank {rank}[: ]|"
            r"ranks 0, 1, \.\.\. gave \[)"
        )
    elif group == "disk":
        yield r"ChainerMN: rank \d+ of \d+: uncaught OSError"
        yield "No space left on device"
        yield "in save$"
    elif group == "link":
        # The first host's ranks are heard of; the second's report came to where the
        # link led. In which call they wait depends on what had come through the link.
        yield r"ChainerMN: (?:nothing was heard of .*\bbeta for|.*\bbeta didn't answer)"
        yield r"rank \d+ \(.*? on alpha\) (?:has ended and )?waits in "


def refused(group: str, case: Case, seen: Seen) -> Iterator[str]:
    """Patterns none of which is found in the job's errors."""
    another = f"rank (?!{case.victim} )"
    if group == "stall":
        yield REPORT + another
    elif group != "link":
        yield REPORT
    if group == "end":
        yield rf"ChainerMN: {another}\d+ of \d+: uncaught (?!{ECHOES}\b)"
    if group == "signal" and f"rank {case.victim} (process" not in seen.job.err:
        yield rf"ChainerMN: {another}\d+ \(process \d+ on \S+\) is gone"
