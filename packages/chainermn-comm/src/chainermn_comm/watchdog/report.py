"""The texts of the watchdog: in which call a rank waits, for which ranks, and the next step."""

from __future__ import annotations

import os
import re
import textwrap
from typing import NamedTuple

from _chainermn_verdict import users_lines

from ..errors import MOST_RANKS, rank_list
from .diagnosis import Rank, WaitGraph, Waits
from .processes import GONE, STOPPED
from .status_region import FINALIZE, NOBODY, SCOPE_SEPARATOR, Call
from .timeout import Timeout

# The most characters of a rank's stacks: a deep recursion would bury the rest.
STACK_CHARACTERS = 4096
PREFIX = "ChainerMN: "


class Report(NamedTuple):
    """A report of calls that wait too long."""

    reason: str  # the ranks that the calls wait for: the text's first line
    how: str  # the likely culprit's state, by which `next_step` chooses
    text: str


def warning(graph: WaitGraph, rank: Rank, call: Call, seconds: float) -> str:
    """Return the one line that is printed at half the time-out."""
    waited = f"rank {rank.world} has waited {_seconds(call.age)} in {_operation(graph, call)}"
    why = _culprits(graph, [(rank, call)])[0]
    return f"{PREFIX}{waited}; {why}. A report follows at {_seconds(seconds)}.\n"


def report(graph: WaitGraph, stalled: Waits, timeout: Timeout) -> Report:
    """Report calls: the likely culprit first, then which rank waits for what, then the stacks."""
    causes = graph.root_causes(stalled)
    reason, *others = _culprits(graph, stalled)
    how = reason
    if causes:
        how = describe_state(graph, causes[0])
    if others:
        reason = f"likely culprits, the likeliest first: {reason}"
    elif causes or graph.missing:
        reason = f"likely culprit: {reason}"
    longest = max(call.age for _, call in stalled)
    end = "CHAINERMN_TIMEOUT is set: ending the job."
    if not timeout.ends_job:
        end = (
            f"The ranks go on waiting. CHAINERMN_TIMEOUT={timeout.seconds:g} would end the job; "
            "0 switches these reports off."
        )
    lines = [
        "",
        f"{PREFIX}{reason}.",
        *(f"{PREFIX}or: {other}." for other in others),
        f"A call has waited for {_seconds(longest)} (CHAINERMN_TIMEOUT):",
        *_who_waits(graph),
        *_stacks(graph, causes),
        end,
        "",
    ]
    return Report(reason, how, "\n".join(lines))


def _who_waits(graph: WaitGraph) -> list[str]:
    """Return a line for each rank that waits."""
    waiting = [rank for _, rank in sorted(graph.ranks.items()) if rank.waits]
    lines = [f"  {describe_rank(graph, rank)}" for rank in waiting[:MOST_RANKS]]
    if len(waiting) > MOST_RANKS:
        lines.append(f"  and so do {len(waiting) - MOST_RANKS} more ranks")
    return lines


def _stacks(graph: WaitGraph, causes: list[Rank]) -> list[str]:
    """Return the stacks, beginning with the culprits'; equal stacks appear once."""
    groups: dict[str, dict[int, Rank]] = {}
    for rank in [*causes, *graph.ranks.values()]:
        groups.setdefault(rank.stacks, {})[rank.world] = rank
    groups.pop("", None)
    lines = []
    for stacks, ranks in groups.items():
        lines.append(f"Stacks of {rank_list([*ranks])}, innermost call first:")
        lines.append(textwrap.indent(stacks, "    "))
    return lines


def _culprits(graph: WaitGraph, stalled: Waits) -> list[str]:
    """Return a clause for each awaited rank, the likeliest first; one clause if none is known."""
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
    unheard = "ranks wait for others that could not be asked"
    if graph.unreachable:
        hosts = ", ".join(graph.unreachable[:MOST_RANKS])
        return [f"{unheard}; {hosts} didn't answer (is a link cut, or a machine down?)"]
    if any(graph.num_unknown(call) for _, call in stalled):
        return [unheard]
    return [
        "all ranks are in the call that waits: the network is stuck, or much is being sent"
    ]


def describe_rank(graph: WaitGraph, rank: Rank) -> str:
    """Return where a rank is, as a clause."""
    return f"rank {rank.world} (process {rank.pid} on {rank.host}) {describe_state(graph, rank)}"


def describe_state(graph: WaitGraph, rank: Rank) -> str:
    """Return the state of a rank, as the predicate of a clause."""
    last = rank.last_call
    after = ""
    if last is not None:
        after = f", after {_operation(graph, last)}"
    if rank.has_finished:
        if rank.state == GONE:
            return "has ended"
        return f"has ended and waits in {FINALIZE}"
    if rank.state == GONE:
        if last is not None and rank.waits:
            return f"is gone, last seen in {_operation(graph, last)}"
        return f"is gone, last seen in no call{after}"
    if rank.waits:
        calls = [
            f"{_operation(graph, call)} for {_seconds(call.age)}" for call in rank.waits
        ]
        doing = f"waits in {' and in '.join(calls)}"
    elif last is None:
        doing = "is in no call"
    else:
        doing = f"is in no call for {_seconds(last.age)}{after}"
    lines = users_lines(rank.stacks)
    if lines:
        doing += f", at {lines[0]}"
    if rank.state == STOPPED:
        return f"is stopped (SIGSTOP or a debugger) and {doing}"
    return doing


def _operation(graph: WaitGraph, call: Call) -> str:
    """Return the name of a call, and the rank for which it waits."""
    details = []
    whom = graph.peer_name(call)
    if call.operation.startswith(("send", "recv")):
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
    """Return the beginning of faulthandler's text, the main thread first, without numbers."""
    text = re.sub("hread 0x[0-9a-f]+", "hread", stacks.decode(errors="replace"))
    threads = text.rstrip().split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith("Current"))
    return "\n\n".join(threads)[:STACK_CHARACTERS]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"
