"""Checks of ranks on this machine, each with the step that ranks take for it."""

from __future__ import annotations

import os
import pkgutil
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainermn_tools import environment
from chainermn_tools.doctor.check import (
    CheckResult,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.hints import LIST_MPI_VARIABLES, REPORT_IT, hint_for_output
from chainermn_tools.doctor.ranks.job import (
    RankJob,
    StepChecks,
    overload_reason,
    run_local_job,
)
from chainermn_tools.doctor.software import find_launcher, find_library

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# All that `chainermn_comm.create_communicator` knows; importing it here could start its
# hooks.
COMMUNICATORS = (
    *("naive", "flat", "hierarchical", "two_dimensional", "single_node"),
    *("non_cuda_aware", "pure_nccl", "dummy"),
)
# On busy cores a mean of gradients may run at a hundredth of a copy's rate. Where it
# has less than this share, something is in the way.
SLOW_SHARE = 0.004
START, ALLGATHER, MESSAGES = "ranks_start", "ranks_meet", "messages"
NEEDS = ("packages", "mpi4py", "mpiexec", "mpi_match", "shared_memory")
HELLO = "mpiexec -n 2 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.rank)'"
HELLO_HINT = f"{HELLO}   # must print 0 and 1"

checks = StepChecks()


def _start(world: MPI.Intracomm) -> dict[str, Any]:
    level = environment.thread_level()
    return {
        "rank": world.rank,
        "size": world.size,
        "host": socket.gethostname(),
        "level": level,
    }


@checks.add_step(
    START, "Does mpiexec start the ranks?", NEEDS, _start, evaluates_incomplete=True
)
def ranks_start(context: Context, job: RankJob) -> CheckResult:
    began = sum(event.kind == "started" for event in job.output.events)
    up = len(job.results(START))
    if up == job.ranks:
        hosts = {str(one["host"]) for one in job.results(START)}
        return ok(f"{up} ranks on {', '.join(sorted(hosts))}", ranks=up)
    if not job.output.timed_out:
        ended = f"mpiexec ended with status {job.output.status} and said"
        return job.failed(f"{up} of {job.ranks} ranks came up; {ended}", HELLO_HINT)
    if began:
        message = f"MPI hangs as it starts: {up} of {began} ranks came through MPI_Init"
        hint = HELLO_HINT
    else:
        message = f"mpiexec hangs: none of {job.ranks} ranks was started"
        hint = "getent hosts $(hostname)   # must print an address; else add one to /etc/hosts"
    message += f" within {job.timeout:.0f} s"
    if reason := overload_reason(job.ranks):
        message += f", or is just slow: {reason}"
    return failed(message, hint_for_output(job.text, hint))


@checks.add_step(
    ALLGATHER,
    "Do the ranks see one another?",
    (START,),
    lambda world: {"ranks": world.allgather(world.rank)},
    evaluates_incomplete=True,
)
def world_size(context: Context, job: RankJob) -> CheckResult:
    sizes = [one["size"] for one in job.results(START)]
    if job.ranks > 1 and set(sizes) == {1}:
        path = find_launcher(context)["path"]
        vendor = find_library(context)["vendor"]
        return failed(
            f"each of the {job.ranks} ranks says that it is rank 0 of 1: {path} does not belong "
            f"to {vendor}, which mpi4py loads",
            f"put the mpiexec of {vendor} first on PATH   # one from pip is beside python",
        )
    if set(sizes) != {job.ranks}:
        return failed(
            f"{job.ranks} ranks were asked for, and they count {sizes}", HELLO_HINT
        )
    return job.failure_at(ALLGATHER) or ok(f"each sees all {job.ranks}")


@checks.add("thread_level", "May several threads of a rank call MPI?", (START,))
def thread_level(context: Context) -> CheckResult:
    levels = {one["level"] for one in run_local_job(context).results(START)}
    message = f"MPI's thread level is {' and '.join(sorted(levels))}"
    if levels == {"multiple"}:
        return ok(message)
    if os.environ.get("MPI4PY_RC_THREAD_LEVEL"):
        return ok(f"{message}, as MPI4PY_RC_THREAD_LEVEL asks for")
    return warning(
        f"{message}: double buffering then exchanges gradients in the foreground, and gains "
        "nothing",
        "unset MPICH_MAX_THREAD_SAFETY; else use an MPI that was built for threads, such as that "
        "of pip install mpich",
    )


def _test(name: str, *args: Any) -> Callable[[MPI.Intracomm], dict[str, Any]]:
    """Return a function of a module here that only ranks may import: that starts MPI."""
    return lambda world: pkgutil.resolve_name(f"{__package__}.{name}")(world, *args)


@checks.add_step(
    MESSAGES,
    "Do messages arrive as they were sent, and how fast?",
    (ALLGATHER,),
    _test("rank_tests:try_messages"),
)
def messages(context: Context, job: RankJob) -> CheckResult:
    return _evaluate_values(job, MESSAGES, "they arrive")


def _add_communicator(communicator: str) -> None:
    name = f"communicator_{communicator}"

    @checks.add_step(
        name,
        f"Does the communicator {communicator!r} give correct results?",
        (MESSAGES,),
        _test("rank_tests:try_communicator", communicator),
    )
    def evaluate(context: Context, job: RankJob) -> CheckResult:
        reason = job.results(name)[0].get("reason")
        if reason is not None:
            return skipped(f"not for here: {reason}")
        return _evaluate_values(job, name, "all values are right")


for _name in COMMUNICATORS:
    _add_communicator(_name)


def _evaluate_values(job: RankJob, step: str, success: str) -> CheckResult:
    """Evaluate whether values were correct, and no slower than this memory lets them be."""
    found = job.results(step)[0]  # the same on all ranks
    if found["problem"] is not None:
        default = f"this should not be; {REPORT_IT}"
        return failed(
            str(found["problem"]), hint_for_output(str(found["problem"]), default)
        )
    if not found["correct"]:
        wrong = f" of {', '.join(found['wrong'])}" if found.get("wrong") else ""
        hint = f"take another communicator or another MPI, and {REPORT_IT}"
        return failed(f"wrong values{wrong} arrived", hint)
    rate, copied = found.get("bytes_per_second"), found.get("copied_bytes_per_second")
    if rate is None or copied is None:
        return ok(success)
    share = rate / copied
    rates = {"bytes_per_second": rate, "copied_bytes_per_second": copied}
    message = f"{success}, {_format_rate(rate)}, {share:.2g} of a copy in memory"
    message += f" ({_format_rate(copied)})"
    if share >= SLOW_SHARE:
        return ok(message, **rates)
    if reason := overload_reason(job.ranks):
        return ok(f"{message}; {reason}", **rates)
    hint = f"{LIST_MPI_VARIABLES}   # is shared memory switched off?"
    return warning(f"{message}: too slow for one machine", hint, **rates)


def _format_rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g} GB/s" if nbytes >= 1e8 else f"{nbytes / 1e6:.2g} MB/s"


def _finalize(world: MPI.Intracomm) -> dict[str, Any]:
    from mpi4py import MPI

    MPI.Finalize()
    return {}


@checks.add_step(
    "ranks_end", "Do all ranks end, and does mpiexec succeed?", (MESSAGES,), _finalize
)
def ranks_end(context: Context, job: RankJob) -> CheckResult:
    if job.output.timed_out:
        hint = f"{HELLO}; echo $?   # must come to an end"
        return failed("all ranks ended, and mpiexec does not", hint)
    if status := job.output.status:
        hint = f"{HELLO}; echo $?   # must print 0 at the end"
        return job.failed(f"all ranks ended, and mpiexec with status {status}", hint)
    return ok("all do")
