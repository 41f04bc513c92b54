"""Says whether a job was good, and otherwise which rank failed first and how."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chainermn_tools.explain import Kind, search
from chainermn_tools.launch.job import WATCHDOG_ENDS, Outcome

# What mpiexec says of a rank that ended badly, MPICH and then Open MPI (which breaks lines).
HYDRA_SAYS = re.compile(
    r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\s*\n(?:\[\d+\] )?=\s+EXIT CODE: (?P<code>\d+)"
)
HYDRA_SIGNAL = re.compile(r"EXIT STRING: .* \(signal (\d+)\)")
PRTE_SIGNAL = re.compile(
    r"process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited\s+on\s+signal (?P<signal>\d+)"
)
# Whom the watchdog waited for, before it ended the ranks by signals, which would be blamed on the
# first of them.
WATCHDOG_SAYS = re.compile(
    r"ChainerMN: ((?:likely culprit|ranks wait for others|all ranks are in the call)[^\n]*)"
)
# And of the rank that died first. MPICH's mpiexec kills the others at once, and then names the
# lowest of all that are dead.
WATCHDOG_MISSES = re.compile(r"ChainerMN: rank (\d+) \(process \d+ on \S+\) is (gone[^\n]*)")
# And the abort hook, in a rank that leaves by os._exit: of that no record tells.
HOOK_SAYS = re.compile(r"ChainerMN: rank (\d+) of \d+: (os\._exit\([^\n]*), ending the job")
PRTE_CODE = re.compile(r"Process name: \[[^\]]*,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)")


@dataclass(frozen=True)
class Verdict:
    """What became of a job.

    Attributes:
        good: whether all ranks said goodbye, and mpiexec reports success.
        status: what the launcher exits with: the failed rank's own status where it is known.
        text: what went wrong; empty for a good job.
        again: whether starting again may help: the ranks had begun.
    """

    good: bool
    status: int
    text: str = ""
    again: bool = True


def judge(outcome: Outcome, ranks: int) -> Verdict:
    """Judge a job by what its ranks and mpiexec said.

    Args:
        outcome: how it ended.
        ranks: how many were started.
    """
    hellos, goodbyes = outcome.of_kind("hello"), outcome.of_kind("goodbye")
    failures = outcome.of_kind("failed")
    if not hellos:
        return Verdict(False, outcome.status or 1, _why_none_began(outcome.tail), again=False)
    if ranks > 1 and sum(record["size"] == 1 for record in _all(outcome, "goodbye")) == ranks:
        text = f"each of the {ranks} ranks is alone in its MPI: mpiexec is not that of mpi4py's MPI"
        return Verdict(False, 1, f"{text}; see `chainermn env`", again=False)
    first = next((rank for rank, said in failures.items() if not said["echo"]), None)
    if first is None:
        ended, why = _blamed(outcome, hellos), _ended_by_watchdog(outcome)
        if why:
            text = f"the watchdog ended the job: {why}"
            return Verdict(False, ended[2] if ended else outcome.status or 1, text)
        if ended is not None:
            rank, how, status = ended
            return Verdict(False, status, f"{_place(rank, hellos)} failed first: {how}")
    if first is None and failures:
        first = next(iter(failures))
    if first is not None:
        return Verdict(False, failures[first]["status"], _failure(first, failures, hellos))
    silent = [rank for rank in range(ranks) if rank not in goodbyes]
    if silent:
        text = (
            f"{_listed(silent)} of {ranks} ended without saying goodbye: killed, or left by "
            "os._exit before the end of the script"
        )
        return Verdict(False, outcome.status or 1, text)
    if outcome.status:
        text = f"all ranks said goodbye, but mpiexec ended with status {outcome.status}"
        return Verdict(False, outcome.status, text)
    return Verdict(True, 0)


def _why_none_began(tail: bytes) -> str:
    """What is known of what mpiexec printed, and what to do."""
    for found in search(io.BytesIO(tail)):
        if found.known.kind in (Kind.CAUSE, Kind.GENERAL):
            fixes = "".join(f"\n    {fix}" for fix in found.known.fix)
            return f"no rank began. {found.known.meaning}{fixes}"
    return "no rank began; what mpiexec printed above says why"


def _all(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    return [record for _, record in outcome.records if record.get("kind") == kind]


def _failure(
    first: int, failures: dict[int, dict[str, Any]], hellos: dict[int, dict[str, Any]]
) -> str:
    said = failures[first]
    lines = [f"{_place(first, hellos)} failed first: {said['what']} (exit status {said['status']})"]
    if said.get("traceback"):
        lines.append(said["traceback"].rstrip("\n"))
    others = [rank for rank in failures if rank != first]
    if others:
        lines.append(f"then {_listed(others)} failed too")
    return "\n".join(lines)


def _place(rank: int, hellos: dict[int, dict[str, Any]]) -> str:
    return f"rank {rank} on {hellos[rank]['host']}" if rank in hellos else f"rank {rank}"


def _blamed(outcome: Outcome, hellos: dict[int, dict[str, Any]]) -> tuple[int, str, int] | None:
    """The rank that ended first, how, and its exit status, by whoever knows best."""
    tail = outcome.tail.decode(errors="replace")
    left, missed = HOOK_SAYS.search(tail), WATCHDOG_MISSES.search(tail)
    if left:
        return int(left[1]), left[2], outcome.status or 1
    ended = _ended_by(outcome, hellos)
    if missed and (ended is None or ended[0] != int(missed[1])):
        return int(missed[1]), f"it is {missed[2]}", outcome.status or 1
    return ended


def _ended_by(outcome: Outcome, hellos: dict[int, dict[str, Any]]) -> tuple[int, str, int] | None:
    """The rank that mpiexec blames, what ended it, and its exit status."""
    tail = outcome.tail.decode(errors="replace")
    found = PRTE_SIGNAL.search(tail)
    if found:
        number = int(found["signal"])
        return int(found["rank"]), _signal(number), 128 + number
    found = PRTE_CODE.search(tail)
    if found:
        return int(found["rank"]), f"exit status {found['code']}", int(found["code"])
    found = HYDRA_SAYS.search(tail)
    blamed = [rank for rank, said in hellos.items() if found and said["pid"] == int(found["pid"])]
    if found is None or len(blamed) != 1:
        return None
    by_signal = HYDRA_SIGNAL.search(tail)
    if by_signal:
        return blamed[0], _signal(int(by_signal[1])), 128 + int(by_signal[1])
    return blamed[0], f"exit status {found['code']}", int(found["code"]) or 1


def _ended_by_watchdog(outcome: Outcome) -> str:
    """What the watchdog said when it ended the job, in a line; "" if it didn't."""
    ends = WATCHDOG_ENDS.search(outcome.tail)
    if ends is None:
        return ""
    if ends[1]:
        return ends[1].decode(errors="replace")
    said = WATCHDOG_SAYS.findall(outcome.tail[: ends.start()].decode(errors="replace"))
    return said[-1] if said else "see its report above"


def _signal(number: int) -> str:
    try:
        return f"ended by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"ended by signal {number}"


def _listed(ranks: Sequence[int]) -> str:
    """Ranks in words, shortened where there are many."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
