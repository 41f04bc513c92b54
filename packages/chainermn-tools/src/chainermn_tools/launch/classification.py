"""Classifies jobs: whether they succeeded, and otherwise which rank failed first and how."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from _chainermn_events import (
    LEAVING_STATUS,
    NOT_STARTED_STATUS,
    SIGNAL_STATUS,
    TIMEOUT_STATUS,
)
from _chainermn_verdict import users_lines
from chainermn_tools.explain import next_step, root_cause
from chainermn_tools.formatting import join_first
from chainermn_tools.jobs import SIGNAL_NAMES, Event, JobOutput

MAX_LISTED_RANKS = 8


@dataclass(frozen=True)
class JobResult:
    """What became of a job."""

    success: bool
    status: int  # what the launcher exits with: the failed rank's own where it is known
    cause: str = ""  # what went wrong
    next_step: str = ""  # what to do about it
    rank: int | None = None  # that failed first, where one did
    restartable: bool = True  # whether starting again may help: the ranks had begun

    @property
    def message(self) -> str:
        return "\n".join(filter(None, (self.cause, self.next_step)))


def classify(output: JobOutput, ranks: int) -> JobResult:
    """Classify a job by the events of its ranks, and by what mpiexec reports.

    A job succeeds when mpiexec says so and no rank reports a failure. Otherwise all
    ranks may have left together, with LEAVING_STATUS, or the first of these that there
    is gets the blame:

    1. an error of a rank's own, which is not secondary (see rank.py);
    2. the watchdog's reason (``watchdog_abort``, sent by chainermn_comm's monitor);
    3. a rank that exited at once (``exited``), or was lost: the monitor
       (``rank_lost``), or mpiexec on its standard error, says which;
    4. a secondary error, which may be a consequence of another rank's.
    """
    if not output.events:
        why = _why_none_began(output.tail)
        return JobResult(False, NOT_STARTED_STATUS, *why, restartable=False)
    finished = output.first_of("finished")
    if ranks > 1 and sum(event["size"] == 1 for event in finished.values()) == ranks:
        alone = f"each of the {ranks} ranks is alone in its MPI: mpiexec is not that of mpi4py's"
        return JobResult(
            False, 1, f"{alone} MPI; see `chainermn env`", restartable=False
        )
    failed = output.first_of("failed")
    if len(failed) == ranks and {event["status"] for event in failed.values()} == {
        LEAVING_STATUS
    }:
        how = "all ranks have saved and left, as a signal warned of the end"
        return JobResult(False, LEAVING_STATUS, how, next_step(how), restartable=False)
    primary = [event for event in failed.values() if not event["secondary"]]
    if primary:  # of ranks that fail alike it is the lowest
        alike = (event for event in primary if event["what"] == primary[0]["what"])
        return _of_failure(min(alike, key=lambda event: event.rank), output)
    stalls = [event for event in output.events if event.kind == "watchdog_abort"]
    ended = _first_ended(output)
    if stalls:  # its SIGTERM is no rank's fault
        cause = f"the watchdog ended the job: {stalls[0]['reason']}"
        step = next_step(stalls[0]["how"] or "")
        return JobResult(False, TIMEOUT_STATUS, cause, step)
    if ended is not None:
        rank, how, status = ended
        who = _place(rank, output)
        return JobResult(
            False, status, f"{who} failed first: {how}", next_step(how), rank
        )
    if failed:
        return _of_failure(next(iter(failed.values())), output)
    if not output.status:
        return JobResult(True, 0)
    silent = [rank for rank in range(ranks) if rank not in finished]
    message = f"all ranks said goodbye, but mpiexec ended with status {output.status}"
    if silent:
        message = (
            f"{_listed(silent)} of {ranks} ended without saying goodbye: killed, or left by "
            "os._exit before the end of the script"
        )
    return JobResult(False, output.status, message, next_step(message))


def of_signal(number: int) -> JobResult:
    """Return the result of a job that was ended as this program got a signal."""
    name = f"signal {number} ({SIGNAL_NAMES[number]})"
    how = f"ended by {'Ctrl-C' if number == signal.SIGINT else name}"
    return JobResult(False, SIGNAL_STATUS + number, how, next_step(how))


def _why_none_began(tail: bytes) -> tuple[str, str]:
    match = root_cause(tail)
    if match is None:
        return "no rank began; what mpiexec printed above says why", ""
    fixes = "\n".join(f"    {fix}" for fix in match.rule.fix)
    return f"no rank began. {match.rule.meaning}", fixes


def _of_failure(first: Event, output: JobOutput) -> JobResult:
    status = int(first["status"] or 1)
    place = _place(first.rank, output)
    lines = [f"{place} failed first: {first['what']} (exit status {status})"]
    trace = (first["traceback"] or "").rstrip("\n")
    # The rank has printed it, unless its standard error was closed or somebody else's.
    if trace.rpartition("\n")[2].encode() not in output.tail:
        lines.append(trace)
    others = sorted(rank for rank in output.first_of("failed") if rank != first.rank)
    if others:
        lines.append(f"then {_listed(others)} failed too")
    step = next_step(first["what"], *users_lines(trace)[-1:])
    return JobResult(False, status, "\n".join(lines), step, first.rank)


def _first_ended(output: JobOutput) -> tuple[int, str, int] | None:
    """Return the rank that ended first without an error of its own, how, and its exit status."""
    failed = output.first_of("failed")
    for event in output.events:
        if event.kind in ("aborted", "exited") and event.rank not in failed:
            return (
                event.rank,
                str(event["what"]),
                int(event["status"] or output.status or 1),
            )
    lost = _lost(output)
    reported = next(
        (event for event in output.events if event.kind == "rank_lost"), None
    )
    # MPICH's mpiexec kills the others at once, and then names the lowest of all that
    # are dead.
    if reported is None or (lost is not None and lost[0] == reported["lost"]):
        return lost
    # What faulthandler prints: MPICH mixes the signals of all ranks.
    crash = re.search(rb"Fatal Python error: (?:\[\d+\] )?([\w ]+)", output.tail)
    how = f"Fatal Python error: {crash[1].decode()}" if crash else str(reported["how"])
    status = lost[2] if lost else output.status or 1
    return int(reported["lost"]), how.removeprefix("is "), status


def _lost(output: JobOutput) -> tuple[int, str, int] | None:
    """Return the rank that mpiexec blames, what ended it, and its exit status."""
    if not output.status:
        return None
    for rank, lost in output.lost_ranks().items():
        if lost.signal is not None:
            name = SIGNAL_NAMES.get(lost.signal)
            how = f"ended by signal {lost.signal}{f' ({name})' if name else ''}"
            return rank, how, SIGNAL_STATUS + lost.signal
        if lost.code is not None:
            return rank, f"exit status {lost.code}", lost.code or 1
    return None


def _place(rank: int, output: JobOutput) -> str:
    started = output.first_of("started")
    return (
        f"rank {rank} on {started[rank]['host']}" if rank in started else f"rank {rank}"
    )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {join_first(ranks, MAX_LISTED_RANKS)}"
