"""The verdict on a job: whether it succeeded, and otherwise which rank failed first and how."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from _chainermn_events import (
    LEAVING_STATUS,
    NOT_STARTED_STATUS,
    SIGNAL_STATUS,
    TIMEOUT_STATUS,
)
from _chainermn_verdict import users_lines
from chainermn_tools.explain import find_crash, next_step, root_cause
from chainermn_tools.formatting import join_first
from chainermn_tools.jobs import SIGNAL_NAMES, Event, JobOutput

MAX_LISTED_RANKS = 8


@dataclass(frozen=True)
class JobResult:
    """The verdict on a job."""

    success: bool
    status: int  # the launcher's exit status: the failed rank's, if known
    cause: str = ""  # what went wrong
    next_step: str = ""  # what to do about it
    rank: int | None = None  # the rank that failed first, if any
    restartable: bool = True  # whether starting again may help: the ranks had begun
    traceback: str = ""  # the traceback of that rank's error, if it isn't printed yet

    @property
    def message(self) -> str:
        return "\n".join(filter(None, (self.cause, self.next_step)))


def classify(output: JobOutput, ranks: int) -> JobResult:
    """Classify a job by the events of its ranks, and by what mpiexec reports.

    A job succeeds if mpiexec reports success and no rank reports a failure. Otherwise
    all ranks may have left together, with LEAVING_STATUS, or the first of these is
    blamed:

    1. an error of a rank's own, which is not secondary (see rank.py);
    2. the watchdog's reason (``watchdog_abort``, sent by chainermn_comm's monitor);
    3. a rank that exited at once (``exited``), or was lost: the monitor
       (``rank_lost``), or mpiexec on its standard error, says which;
    4. a secondary error, which may be a consequence of another rank's.
    """
    if not output.events:
        return _of_no_start(output)
    failed = list(output.first_of("failed").values())
    sizes = [event["size"] for event in output.first_of("finished").values()]
    if ranks > 1 and sizes.count(1) == ranks:
        cause = (
            f"each of the {ranks} ranks is alone in its MPI: this mpiexec belongs to "
            "another MPI than mpi4py's"
        )
        return _of_job(cause, 1, restartable=False)
    statuses = {event["status"] for event in failed}
    if statuses == {LEAVING_STATUS} and len(output.first_of("leaving")) == ranks:
        cause = "all ranks have saved and left, as a signal warned of the end"
        return _of_job(cause, LEAVING_STATUS, restartable=False)

    if output.status == LEAVING_STATUS:  # the status says that all ranks have saved
        output.status = 1
    primary = [event for event in failed if not event["secondary"]]
    if primary:  # if ranks fail alike, blame the lowest
        alike = [event for event in primary if event["what"] == primary[0]["what"]]
        return _of_error(min(alike, key=lambda event: event.rank), output)
    for event in output.events:
        # A SIGTERM to this program is no rank's fault.
        if event.kind == "watchdog_abort":
            cause = f"the watchdog ended the job: {event['reason']}"
            step = next_step(event["how"] or "")
            return JobResult(False, TIMEOUT_STATUS, cause, step)
    ended = _first_ended(output)
    if ended is not None:
        return ended
    if failed:
        return _of_error(failed[0], output)
    if output.status == 0:
        return JobResult(True, 0)
    return _of_silence(output, ranks)


def of_signal(number: int) -> JobResult:
    """Return the result of a job that was ended because this program got a signal."""
    cause = _signal_text(number)
    if number == signal.SIGINT:
        cause = "ended by Ctrl-C"
    return _of_job(cause, SIGNAL_STATUS + number)


def _of_job(cause: str, status: int, restartable: bool = True) -> JobResult:
    """Return the result of a job whose failure no single rank has caused."""
    return JobResult(False, status, cause, next_step(cause), restartable=restartable)


def _of_no_start(output: JobOutput) -> JobResult:
    match = root_cause(output.tail)
    if match is None:
        cause = f"no rank started; mpiexec ended with status {output.status}"
        return _of_job(cause, NOT_STARTED_STATUS, restartable=False)
    cause = f"no rank started. {match.rule.meaning}"
    fixes = "\n".join(f"    {fix}" for fix in match.fix)
    return JobResult(False, NOT_STARTED_STATUS, cause, fixes, restartable=False)


def _of_error(event: Event, output: JobOutput) -> JobResult:
    """Return the result of a job in which a rank raised an error, or left by sys.exit."""
    status = event["status"] or 1
    how = f"exit status {status}"
    if status == LEAVING_STATUS:
        how = "reported as 1, because 75 means that all ranks have saved"
    how = f"{event['what']} ({how})"
    trace = event["traceback"] or ""
    result = _of_rank(
        event.rank,
        how,
        status,
        output,
        next_step(how, *users_lines(trace)[-1:]),
    )
    # The rank has printed the traceback, unless its standard error was closed or
    # replaced.
    if trace.strip().rpartition("\n")[2].encode() in output.tail:
        return result
    return replace(result, traceback=trace)


def _of_silence(output: JobOutput, ranks: int) -> JobResult:
    """Return the result of a job that has failed by mpiexec's report, without any other report."""
    finished = output.first_of("finished")
    silent = [rank for rank in range(ranks) if rank not in finished]
    cause = f"all ranks ended well, but mpiexec ended with status {output.status}"
    if silent:
        listed = join_first(silent, MAX_LISTED_RANKS)
        cause = (
            f"of {ranks} ranks these ended without a report: {listed}; they were killed, "
            "or left by os._exit before the end of the script"
        )
    return _of_job(cause, output.status)


def _first_ended(output: JobOutput) -> JobResult | None:
    """Return the result of a job in which a rank ended without an error of its own."""
    failed = output.first_of("failed")
    for event in output.events:
        if event.kind in ("aborted", "exited") and event.rank not in failed:
            status = event["status"] or output.status or 1
            return _of_rank(event.rank, event["what"], status, output)
    blamed = _blamed_by_mpiexec(output)
    reported = list(output.first_of("rank_lost").values())
    # MPICH's mpiexec kills the other ranks at once, and then names the lowest of all
    # dead ranks. If it names another rank than the monitor, the monitor is right.
    if reported and (blamed is None or blamed.rank != reported[0]["lost"]):
        status = output.status or 1
        if blamed is not None:
            status = blamed.status
        how = find_crash(output.text)
        how = how or reported[0]["how"].removeprefix("is ")
        return _of_rank(reported[0]["lost"], how, status, output)
    return blamed


def _blamed_by_mpiexec(output: JobOutput) -> JobResult | None:
    if output.status == 0:
        return None
    for rank, lost in output.lost_ranks().items():
        if lost.signal is not None:
            status = SIGNAL_STATUS + lost.signal
            return _of_rank(rank, _signal_text(lost.signal), status, output)
        if lost.code is not None:
            return _of_rank(rank, f"exit status {lost.code}", lost.code or 1, output)
    return None


def _of_rank(
    rank: int, how: str, status: int, output: JobOutput, step: str = ""
) -> JobResult:
    """Return the result of a job in which this rank failed first."""
    place = f"rank {rank}"
    started = output.first_of("started").get(rank)
    if started is not None:
        place = f"{place} on {started['host']}"
    step = step or next_step(how)
    if status == LEAVING_STATUS:
        status = 1
    return JobResult(False, status, f"{place} failed first: {how}", step, rank)


def _signal_text(number: int) -> str:
    return f"ended by signal {number} ({SIGNAL_NAMES.get(number, 'unknown')})"
