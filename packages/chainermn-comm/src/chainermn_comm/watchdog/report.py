"""The texts of the watchdog: which rank waits for what and for which, and what happens next."""

from __future__ import annotations

import os
import re
import textwrap

from _chainermn_verdict import next_step, users_lines

from .diagnosis import Rank, WaitGraph, Waits
from .processes import GONE, STOPPED
from .status_region import FINALIZE, MESSAGE, NOBODY, SCOPE_SEPARATOR, Call
from .timeout import Timeout

# Of a rank's stacks: a deep recursion would bury the rest.
STACK_CHARACTERS = 4096
# The most ranks that are listed.
MOST_RANKS = 32
PREFIX = "ChainerMN: "
# Lines of stacks that say nothing of the user's script: what runs it.
RUNNERS = re.compile(r'\n  File "[^"]*(runpy>|runpy\.py|chainermn_tools/rank\.py)".*')


def warning(graph: WaitGraph, rank: Rank, call: Call, seconds: float) -> str:
    """Return the one line that is printed at half the time-out."""
    waited = f"rank {rank.world} has waited {_seconds(call.age)} in {_operation(graph, call)}"
    why = culprits(graph, [(rank, call)])[0]
    return f"{PREFIX}{waited}; {why}. A report follows at {_seconds(seconds)}.\n"


def report(graph: WaitGraph, stalled: Waits, timeout: Timeout) -> str:
    """Return a text: the likely culprit first, then which rank waits for what, then the stacks."""
    causes = graph.root_causes(stalled)[:MOST_RANKS]
    clauses = culprits(graph, stalled)
    if len(causes) > 1:
        clauses[0] = f"likely culprits, the likeliest first: {clauses[0]}"
    elif causes or graph.missing:
        clauses[0] = f"likely culprit: {clauses[0]}"
    lines = ["", f"{PREFIX}{clauses[0]}."]
    lines += [f"{PREFIX}or: {clause}." for clause in clauses[1:]]
    longest = max(call.age for _, call in stalled)
    lines.append(f"A call has waited for {_seconds(longest)} (CHAINERMN_TIMEOUT):")
    lines += _who_waits(graph, stalled)
    lines += _stacks(graph, causes)
    if timeout.ends_job:
        lines.append("CHAINERMN_TIMEOUT is set: ending the job.")
    else:
        lines.append(
            f"The ranks go on waiting. CHAINERMN_TIMEOUT={timeout.seconds:g} would end the job; "
            "0 switches these reports off."
        )
    lines.append(f"{next_step(clauses[0])}\n")
    return "\n".join(lines)


def _who_waits(graph: WaitGraph, stalled: Waits) -> list[str]:
    """Return a line for each rank that waits, and how many nothing is known of."""
    waiting = [rank for _, rank in sorted(graph.ranks.items()) if rank.waits]
    lines = [f"  {describe_rank(graph, rank)}" for rank in waiting[:MOST_RANKS]]
    if len(waiting) > MOST_RANKS:
        lines.append(f"  and so do {len(waiting) - MOST_RANKS} more ranks")
    calls = {call.communicator: call for _, call in stalled}
    for call in calls.values():
        unknown = graph.num_unknown(call)
        if unknown:
            lines.append(
                f"  not heard of: {unknown} of the {call.size} ranks that take part"
            )
    return lines


def _stacks(graph: WaitGraph, first: list[Rank]) -> list[str]:
    """Return the stacks, those of ``first`` before all others; equal ones once."""
    others = [rank for _, rank in sorted(graph.ranks.items()) if rank not in first]
    groups: dict[str, list[int]] = {}
    for rank in [*first, *others]:
        groups.setdefault(rank.stacks, []).append(rank.world)
    groups.pop("", None)
    lines = []
    for stacks, ranks in groups.items():
        lines.append(f"Stacks of {rank_list(ranks)}, innermost call first:")
        lines.append(textwrap.indent(stacks, "    "))
    return lines


def culprits(graph: WaitGraph, stalled: Waits) -> list[str]:
    """Return for whom these calls wait, as clauses, the likeliest first; at least one."""
    causes = graph.root_causes(stalled)
    if causes:
        return [describe_rank(graph, rank) for rank in causes[:MOST_RANKS]]
    if graph.missing:
        _, call = stalled[0]
        has = "have" if len(graph.missing) > 1 else "has"
        return [
            f"{rank_list(graph.missing)} {has} not come to {call.operation} on "
            f"{os.uname().nodename}, unless on another machine"
        ]
    if graph.unreachable:
        hosts = ", ".join(graph.unreachable[:MOST_RANKS])
        return [
            f"ranks wait for others that could not be asked; {hosts} didn't answer (is a link "
            "cut, or a machine down?)"
        ]
    if any(graph.num_unknown(call) for _, call in stalled):
        return ["ranks wait for others that could not be asked"]
    return [
        "all ranks are in the call that waits: is the network stuck, or much being sent?"
    ]


def reason(report: str) -> str:
    """Return the first line of a report: which rank the others wait for."""
    return report.lstrip("\n").partition("\n")[0].removeprefix(PREFIX)


def describe_rank(graph: WaitGraph, rank: Rank) -> str:
    """Return where a rank is, as a clause."""
    return f"rank {rank.world} (process {rank.pid} on {rank.host}) {describe_state(graph, rank)}"


def describe_state(graph: WaitGraph, rank: Rank) -> str:
    """Return what a rank does, as the predicate of a clause."""
    if rank.has_finished:
        if rank.state == GONE:
            return "has ended"
        return f"has ended and waits in {FINALIZE}"
    last = rank.last_call
    if rank.state == GONE:
        if last is None:
            return "is gone"
        before = "in" if rank.waits else "in no call, after"
        return f"is gone, last seen {before} {_operation(graph, last)}"
    if rank.waits:
        calls = [
            f"{_operation(graph, call)} for {_seconds(call.age)}" for call in rank.waits
        ]
        doing = f"waits in {' and in '.join(calls)}"
    elif last is None:
        doing = "is in no call"
    else:
        doing = (
            f"is in no call for {_seconds(last.age)}, after {_operation(graph, last)}"
        )
    lines = users_lines(rank.stacks)
    if lines:
        doing += f", at {lines[0]}"
    if rank.state == STOPPED:
        return f"is stopped (SIGSTOP or a debugger) and {doing}"
    return doing


def _operation(graph: WaitGraph, call: Call) -> str:
    """Return what a call is, and for whom it waits."""
    details = []
    whom = f"{call.peer} of its communicator"
    peer = graph.world_rank(call, call.peer)
    if peer is not None:
        whom = f"{peer}"
    if call.state == MESSAGE or call.tag != NOBODY:
        way = "to" if call.operation.startswith("send") else "from"
        details.append(f"{way} rank {whom}")
        details.append("any tag" if call.tag == NOBODY else f"tag {call.tag}")
    elif call.peer != NOBODY:
        details.append(f"root {whom}")
    if call.sequence:
        details.append(f"collective call {call.sequence}")
    if call.nbytes:
        details.append(f"{call.nbytes:,} bytes")
    name, separator, scope = call.operation.partition(SCOPE_SEPARATOR)
    if details:
        name += f" ({', '.join(details)})"
    return name + separator + scope


def normalize_stacks(stacks: bytes) -> str:
    """Return the beginning of what faulthandler wrote, the main thread first, without numbers."""
    text = re.sub("hread 0x[0-9a-f]+", "hread", stacks.decode(errors="replace"))
    threads = RUNNERS.sub("", text.rstrip()).split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith("Current"))
    return "\n\n".join(threads)[:STACK_CHARACTERS]


def rank_list(ranks: list[int]) -> str:
    """Return the numbers of ranks, of many the first ones."""
    numbers = ", ".join(map(str, ranks[:MOST_RANKS]))
    if len(ranks) > MOST_RANKS:
        numbers += ", ..."
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s"
