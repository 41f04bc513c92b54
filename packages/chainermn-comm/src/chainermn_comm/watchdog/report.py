"""Puts into words who waits for what and for whom."""

from __future__ import annotations

import os
import re

from .diagnosis import Job, Rank
from .processes import GONE, STOPPED
from .status_region import FINALIZE, INSIDE, MESSAGE, NOBODY, Call

# Of each rank's stacks; a deep recursion would bury the rest.
STACK_LINES = 60
# Of those that wait.
MOST_RANKS = 32
# Before what is said to the user.
MARKED = "ChainerMN: "


def warning(job: Job, rank: Rank, call: Call, seconds: float) -> str:
    """One line at half the time."""
    suspects = job.suspects([(rank, call)])
    whom = f"; {whereabouts(job, suspects[0])}" if suspects else _silent(job)
    return (
        f"ChainerMN: rank {rank.world} has waited {_seconds(call.age)} in "
        f"{_operation(job, call)}{whom}. A report follows at {_seconds(seconds)}.\n"
    )


def report(job: Job, stalled: list[tuple[Rank, Call]], what_now: str) -> str:
    """The likely culprit first, then who waits for what, then the stacks.

    Args:
        job: all ranks that are known of.
        stalled: the calls that have waited too long.
        what_now: the last words on what happens next.
    """
    suspects = job.suspects(stalled)
    inside = {} if suspects else {rank.world: what for rank, what in job.strangers(stalled)}
    suspects = suspects or [job.ranks[world] for world in inside]
    does = [
        whereabouts(job, rank) + (f", but runs {inside[rank.world]} there" if inside else "")
        for rank in suspects[:MOST_RANKS]
    ]
    head = "likely culprit" if len(suspects) == 1 else "likely culprits, the likeliest first"
    lines = [f"{MARKED}{'or' if number else head}: {one}." for number, one in enumerate(does)]
    if not suspects:
        lines.append(f"{MARKED}{_nobody(job, stalled)}")
    longest = max(call.age for _, call in stalled)
    lines.append(f"A call has waited for {_seconds(longest)} (CHAINERMN_TIMEOUT):")
    waiting = [job.ranks[world] for world in sorted(job.ranks) if job.ranks[world].waits]
    lines += [f"  {whereabouts(job, rank)}" for rank in waiting[:MOST_RANKS]]
    if len(waiting) > MOST_RANKS:
        lines.append(f"  and so do {len(waiting) - MOST_RANKS} more ranks")
    lines += [f"  not heard of: {text}{_silent(job)}" for text in _unknown(job, stalled)]
    first = [rank.world for rank in suspects[:MOST_RANKS]]
    for ranks, stacks in _grouped(job, first):
        lines += [f"Stacks of {_ranks(ranks)}, innermost call first:", stacks]
    return "\n".join(["", *lines, what_now, ""])


def reason(report: str) -> str:
    """The first line of a report: whom the ranks wait for."""
    return report.lstrip("\n").partition("\n")[0].removeprefix(MARKED)


def last_words(seconds: float, ends_job: bool) -> str:
    """What happens after a report."""
    if ends_job:
        return "CHAINERMN_TIMEOUT is set: ending the job."
    return (
        f"The ranks go on waiting. CHAINERMN_TIMEOUT={seconds:g} would end the job; 0 switches "
        "these reports off."
    )


def no_answer(host: str, seconds: float) -> str:
    """That another machine is silent."""
    return f"{host} has not answered for {_seconds(seconds)}"


def cut_off(host: str, seconds: float) -> str:
    """What is said before this machine's ranks are ended because another is silent."""
    return (
        f"\nChainerMN: {no_answer(host, seconds)}: the link is cut, or it is "
        f"down. Ending the ranks on {os.uname().nodename}, which MPI can't do from there.\n"
    )


def silent(host: str, seconds: float, limit: float) -> str:
    """What is said of a machine that is silent, where its job isn't ended for that."""
    return (
        f"\nChainerMN: nothing was heard of {host} for {_seconds(seconds)}: the link is cut, or it "
        f"is down. {last_words(limit, False)}\n"
    )


def whereabouts(job: Job, rank: Rank) -> str:
    """Where a rank is, in a clause."""
    return f"rank {rank.world} (process {rank.pid} on {rank.host}) {state(job, rank)}"


def state(job: Job, rank: Rank) -> str:
    """What a rank does, as the predicate of a clause."""
    own = [call for call in rank.calls if call.operation]
    last = min(own, key=lambda call: call.age, default=None)
    before = "in" if rank.waits else "in no call, after"
    seen = f", last seen {before} {_operation(job, last)}" if last else ""
    if rank.has_ended:
        where = "has ended" if rank.state == GONE else f"has ended and waits in {FINALIZE}"
        return where
    if rank.state == GONE:
        return f"is gone{seen}{_inside(rank)}"
    stopped = "is stopped (SIGSTOP or a debugger) and " if rank.state == STOPPED else ""
    if rank.waits:
        calls = " and in ".join(
            f"{_operation(job, call)} for {_seconds(call.age)}" for call in rank.waits
        )
        return f"{stopped}waits in {calls}{_inside(rank)}"
    since = f" for {_seconds(last.age)}, after {_operation(job, last)}" if last else ""
    return f"{stopped}is in no call{since}{_inside(rank)}"


def _inside(rank: Rank) -> str:
    if rank.doing is None:
        return ""
    return f", inside {rank.doing.what} for {_seconds(rank.doing.age)}"


def _operation(job: Job, call: Call) -> str:
    details = []
    if call.state == MESSAGE or (call.peer != NOBODY and call.tag != NOBODY):
        peer = job.world_rank(call, call.peer)
        way = "to" if call.operation.startswith("send") else "from"
        name = f"rank {call.peer} of its communicator" if peer is None else f"rank {peer}"
        details += [f"{way} {name}", f"tag {call.tag}"]
    elif call.peer != NOBODY:
        root = job.world_rank(call, call.peer)
        details.append(f"root {call.peer if root is None else root}")
    if call.sequence:
        details.append(f"collective call {call.sequence}")
    if call.nbytes:
        details.append(f"{call.nbytes:,} bytes")
    name, before, function = call.operation.partition(INSIDE)
    return f"{name} ({', '.join(details)}){before}{function}" if details else call.operation


def _nobody(job: Job, stalled: list[tuple[Rank, Call]]) -> str:
    if job.silent or any(job.unknown(call) for _, call in stalled):
        return (
            "ranks wait for others that could not be asked"
            f"{_silent(job)}; see the reports of other machines."
        )
    return "all ranks are in the call that waits: is the network stuck, or much being sent?"


def _silent(job: Job) -> str:
    if not job.silent:
        return ""
    hosts = ", ".join(job.silent[:MOST_RANKS])
    return f"; {hosts} didn't answer (is a link cut, or a machine down?)"


def _unknown(job: Job, stalled: list[tuple[Rank, Call]]) -> list[str]:
    counts = {call.communicator: (job.unknown(call), call.size) for _, call in stalled}
    return [
        f"{number} of the {size} ranks that take part" for number, size in counts.values() if number
    ]


def _grouped(job: Job, first: list[int]) -> list[tuple[list[int], str]]:
    """Ranks by their stacks, those of `first` before all others."""
    groups: dict[str, list[int]] = {}
    order = [*first, *sorted(job.ranks.keys() - set(first))]
    for world in order:
        text = job.ranks[world].stacks
        if text:
            # Suspects stand alone, though they may wait at the same place.
            groups.setdefault(text if world not in first else f"{text}\0{world}", []).append(world)
    return [(ranks, _cut(text.partition("\0")[0])) for text, ranks in groups.items()]


def plain(stacks: bytes) -> str:
    """What faulthandler wrote, without the numbers of threads, which differ between ranks."""
    return re.sub(r"hread 0x[0-9a-f]+", "hread", stacks.decode(errors="replace")).rstrip()


def _cut(stacks: str) -> str:
    lines = [f"    {line}" for line in stacks.splitlines()]
    more = len(lines) - STACK_LINES
    return "\n".join([*lines[:STACK_LINES], f"    ({more} more lines)"] if more > 0 else lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
