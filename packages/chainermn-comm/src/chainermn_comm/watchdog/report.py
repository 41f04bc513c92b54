"""The texts of the watchdog: which rank waits for what and for which, and what happens next."""

from __future__ import annotations

import os
import re
import textwrap

from _chainermn_verdict import next_step

from .diagnosis import Rank, WaitGraph, Waits
from .processes import GONE, STOPPED
from .status_region import FINALIZE, MESSAGE, NOBODY, SCOPE_SEPARATOR, Call
from .timeout import Timeout

# Of a rank's stacks: a deep recursion would bury the rest.
STACK_CHARACTERS = 4096
# The most ranks that are listed.
MOST_RANKS = 32
PREFIX = "ChainerMN: "
INIT = "create_communicator"


def warning(graph: WaitGraph, rank: Rank, call: Call, seconds: float) -> str:
    """Return the one line that is printed at half the time-out."""
    causes = graph.root_causes([(rank, call)])
    whom = f"; {describe_rank(graph, causes[0])}" if causes else _unreachable(graph)
    waits = f"rank {rank.world} has waited {_seconds(call.age)} in {_operation(graph, call)}"
    return f"{PREFIX}{waits}{whom}. A report follows at {_seconds(seconds)}.\n"


def report(graph: WaitGraph, stalled: Waits, timeout: Timeout) -> str:
    """Return a text: the likely culprit first, then which rank waits for what, then the stacks."""
    causes = graph.root_causes(stalled)
    clauses = [describe_rank(graph, rank) for rank in causes[:MOST_RANKS]]
    head = (
        "likely culprit" if len(causes) == 1 else "likely culprits, the likeliest first"
    )
    lines = [
        f"{PREFIX}{'or' if n else head}: {clause}." for n, clause in enumerate(clauses)
    ]
    if not causes:
        what = "all ranks are in the call that waits: is the network stuck, or much being sent?"
        if graph.unreachable or any(graph.num_unknown(call) for _, call in stalled):
            silent = (
                f"ranks wait for others that could not be asked{_unreachable(graph)}"
            )
            what = f"{silent}; see the reports of other machines."
        lines.append(f"{PREFIX}{what}")
    longest = max(call.age for _, call in stalled)
    lines.append(f"A call has waited for {_seconds(longest)} (CHAINERMN_TIMEOUT):")
    waiting = [rank for _, rank in sorted(graph.ranks.items()) if rank.waits]
    lines += [f"  {describe_rank(graph, rank)}" for rank in waiting[:MOST_RANKS]]
    if len(waiting) > MOST_RANKS:
        lines.append(f"  and so do {len(waiting) - MOST_RANKS} more ranks")
    unknown = {
        call.communicator: (graph.num_unknown(call), call.size) for _, call in stalled
    }
    lines += [
        f"  not heard of: {number} of the {size} ranks that take part{_unreachable(graph)}"
        for number, size in unknown.values()
        if number
    ]
    first = [rank.world for rank in causes[:MOST_RANKS]]
    for ranks, stacks in _group_by_stacks(graph, first):
        lines += [
            f"Stacks of {rank_list(ranks)}, innermost call first:",
            textwrap.indent(stacks, "    "),
        ]
    return "\n".join(["", *lines, _end(timeout, lines[0])])


def init_report(come: list[int], missing: list[int], timeout: Timeout) -> str:
    """Return what is printed where ranks don't come together first."""
    what = f"all ranks have come to {INIT}: MPI itself, or the network"
    if missing:
        has, is_elsewhere = (
            ("have", "they are") if len(missing) > 1 else ("has", "it is")
        )
        what = f"{rank_list(missing)} {has} not come to {INIT} on {os.uname().nodename}"
        what += f", unless {is_elsewhere} on another machine"
    head = f"{PREFIX}likely culprit{'s' * (len(missing) > 1)}: {what}."
    waited = f"A call has waited for {_seconds(timeout.seconds)} (CHAINERMN_TIMEOUT):"
    here = f"  {rank_list(come)} wait{'s' * (len(come) == 1)} there"
    return "\n".join(["", head, waited, here, _end(timeout, what)])


def reason(report: str) -> str:
    """Return the first line of a report: which rank the others wait for."""
    return report.lstrip("\n").partition("\n")[0].removeprefix(PREFIX)


def _end(
    timeout: Timeout, how: str, end: str = "CHAINERMN_TIMEOUT is set: ending the job."
) -> str:
    """Return what happens after a report, and what to do: two lines."""
    if not timeout.ends_job:
        end = f"The ranks go on waiting. CHAINERMN_TIMEOUT={timeout.seconds:g} would end the job"
        end += "; 0 switches these reports off."
    return f"{end}\n{next_step(how)}\n"


def host_silent(
    machines: list[str], graph: WaitGraph, waiting: Waits, timeout: Timeout
) -> tuple[str, str]:
    """Return that other machines can't be reached, as a clause, and what is printed."""
    names = "; ".join(machines[:MOST_RANKS])
    longest, _ = max(waiting, key=lambda each: each[1].age)
    silence, who = _seconds(timeout.silence), describe_rank(graph, longest)
    why = f"nothing was heard of {names} for {silence}, and {who}"
    here = f"Ending the ranks that {os.uname().nodename} can reach."
    end = _end(timeout, why, here)
    return why, f"\n{PREFIX}{why}: the link is cut, or it is down. {end}"


def describe_rank(graph: WaitGraph, rank: Rank) -> str:
    """Return where a rank is, as a clause."""
    return f"rank {rank.world} (process {rank.pid} on {rank.host}) {describe_state(graph, rank)}"


def describe_state(graph: WaitGraph, rank: Rank) -> str:
    """Return what a rank does, as the predicate of a clause."""
    last = min(
        (one for one in rank.calls if one.operation),
        key=lambda it: it.age,
        default=None,
    )
    if rank.has_finished:
        return (
            "has ended" if rank.state == GONE else f"has ended and waits in {FINALIZE}"
        )
    if rank.state == GONE:
        before = "in" if rank.waits else "in no call, after"
        seen = f", last seen {before} {_operation(graph, last)}" if last else ""
        return f"is gone{seen}"
    stopped = "is stopped (SIGSTOP or a debugger) and " if rank.state == STOPPED else ""
    if rank.waits:
        calls = (
            f"{_operation(graph, call)} for {_seconds(call.age)}" for call in rank.waits
        )
        return f"{stopped}waits in {' and in '.join(calls)}"
    since = (
        f" for {_seconds(last.age)}, after {_operation(graph, last)}" if last else ""
    )
    return f"{stopped}is in no call{since}"


def _operation(graph: WaitGraph, call: Call) -> str:
    details = []
    if call.state == MESSAGE or (call.peer != NOBODY and call.tag != NOBODY):
        peer = graph.world_rank(call, call.peer)
        way = "to" if call.operation.startswith("send") else "from"
        name = (
            f"rank {call.peer} of its communicator" if peer is None else f"rank {peer}"
        )
        details += [
            f"{way} {name}",
            "any tag" if call.tag == NOBODY else f"tag {call.tag}",
        ]
    elif call.peer != NOBODY:
        root = graph.world_rank(call, call.peer)
        details.append(f"root {call.peer if root is None else root}")
    if call.sequence:
        details.append(f"collective call {call.sequence}")
    if call.nbytes:
        details.append(f"{call.nbytes:,} bytes")
    name, separator, function = call.operation.partition(SCOPE_SEPARATOR)
    return (
        f"{name} ({', '.join(details)}){separator}{function}"
        if details
        else call.operation
    )


def _unreachable(graph: WaitGraph) -> str:
    hosts = ", ".join(graph.unreachable[:MOST_RANKS])
    return (
        f"; {hosts} didn't answer (is a link cut, or a machine down?)" if hosts else ""
    )


def _group_by_stacks(graph: WaitGraph, first: list[int]) -> list[tuple[list[int], str]]:
    """Return ranks by their stacks, each of ``first`` by itself and before all others."""
    groups: dict[str, list[int]] = {}
    for world, rank in sorted(graph.ranks.items()):
        if rank.stacks and world not in first:
            groups.setdefault(rank.stacks, []).append(world)
    alone = [
        ([world], graph.ranks[world].stacks)
        for world in first
        if graph.ranks[world].stacks
    ]
    return alone + [(ranks, text) for text, ranks in groups.items()]


def normalize_stacks(stacks: bytes) -> str:
    """Return the beginning of what faulthandler wrote, the main thread first, without numbers."""
    text = re.sub(
        r"hread 0x[0-9a-f]+", "hread", stacks.decode(errors="replace")
    ).rstrip()
    text = re.sub(
        r'\n  File "[^"]*(runpy>|runpy\.py|chainermn_tools/rank\.py)".*', "", text
    )
    threads = sorted(text.split("\n\n"), key=lambda one: not one.startswith("Current"))
    return "\n\n".join(threads)[:STACK_CHARACTERS]


def rank_list(ranks: list[int]) -> str:
    """Return the numbers of ranks, of many the first ones."""
    first = ", ".join(map(str, ranks[:MOST_RANKS])) + ", ..." * (
        len(ranks) > MOST_RANKS
    )
    return f"rank{'s' * (len(ranks) > 1)} {first}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
