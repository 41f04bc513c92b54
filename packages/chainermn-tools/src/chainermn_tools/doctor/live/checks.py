"""Checks that judge what ranks on this machine did, step by step."""

from __future__ import annotations

import os
import re

from chainermn_tools.doctor import facts
from chainermn_tools.doctor.advice import advice, telling_line
from chainermn_tools.doctor.check import Answer, Check, Context, check, failed, ok, skipped, warning
from chainermn_tools.doctor.live import job, rank, steps

NEEDS = ("packages", "mpi4py", "mpiexec", "mpi match", "shared memory")
REPORT = "this should not be; please report it: chainermn doctor --report"
WRONG = "take another communicator or another MPI, and please report it: chainermn doctor --report"
SLOW = "env | grep -E '^(UCX|FI|OMPI|MPICH|MV2)_'   # is shared memory switched off?"
HELLO = "mpiexec -n 2 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.rank)'"
# On two cores that others used too, a mean of gradients went at 0.01 to 0.6 of a copy's rate. Where
# it is so much slower, something is in the way.
SLOW_SHARE = 0.004


@check(steps.START, "Do the ranks come up that mpiexec starts?", NEEDS)
def ranks_start(context: Context) -> Answer:
    found = context.once(job.run)
    up, began = len(found.found(steps.START)), len(found.notes)
    if up == found.ranks:
        return ok(f"{up} ranks on {', '.join(sorted(_hosts(found)))}", ranks=up)
    if found.ended.returncode is None:
        if not began:
            said = f"mpiexec hangs: none of {found.ranks} ranks was started"
            fix = "getent hosts $(hostname)   # must print an address; else add one to /etc/hosts"
        else:
            said = f"MPI hangs as it starts: {up} of {began} ranks came through MPI_Init"
            fix = f"{HELLO}   # must print 0 and 1"
        slow = job.busy(found.ranks)
        said += f" within {found.seconds:.0f} s" + (f", or is just slow: {slow}" if slow else "")
        return failed(said, advice(found.output, fix))
    said = telling_line(found.output)
    return failed(
        f"{up} of {found.ranks} ranks came up; mpiexec ended with status {found.ended.returncode} "
        f"and said: {said}",
        advice(found.output, f"{HELLO}   # must print 0 and 1"),
    )


@check(steps.MEET, "Do the ranks see one another?", (steps.START,))
def ranks_meet(context: Context) -> Answer:
    found = context.once(job.run)
    sizes = [one["size"] for one in found.found(steps.START)]
    if found.ranks > 1 and set(sizes) == {1}:
        path, vendor = context.once(facts.launcher)["path"], context.once(facts.library)["vendor"]
        return failed(
            f"each of the {found.ranks} ranks says that it is rank 0 of 1: {path} does not belong "
            f"to {vendor}, which mpi4py loads",
            f"put the mpiexec of {vendor} first on PATH   # one from pip is beside python",
        )
    if set(sizes) != {found.ranks}:
        return failed(
            f"{found.ranks} ranks were asked for, and they count {sizes}",
            f"{HELLO}   # must print 0 and 1",
        )
    lacking = job.come_to(steps.MEET, found)
    if lacking is not None:
        return lacking
    return ok(f"each sees all {found.ranks}")


@check("thread level", "May several threads of a rank call MPI?", (steps.START,))
def thread_level(context: Context) -> Answer:
    levels = {one["level"] for one in context.once(job.run).found(steps.START)}
    said = f"MPI's thread level is {' and '.join(sorted(levels))}"
    if levels == {"multiple"}:
        return ok(said)
    if os.environ.get("MPI4PY_RC_THREAD_LEVEL"):
        return ok(f"{said}, as MPI4PY_RC_THREAD_LEVEL asks for")
    return warning(
        f"{said}: double buffering then exchanges gradients in the foreground, and gains nothing",
        "unset MPICH_MAX_THREAD_SAFETY; else use an MPI that was built for threads, such as that "
        "of pip install mpich",
    )


@check(steps.ORDER, "Does mpiexec show what ranks print one after another?", (steps.MEET,))
def order(context: Context) -> Answer:
    found = context.once(job.run)
    lacking = job.come_to(steps.ORDER, found)
    if lacking is not None:
        return lacking
    turns = [int(one) for one in re.findall(rf"{rank.TURN} (\d+) ", found.ended.stdout)]
    if turns == list(range(found.ranks)):
        return ok(f"ranks 0 to {found.ranks - 1} in this order")
    if sorted(turns) == list(range(found.ranks)):
        return ok(f"all of it, but mixed: {turns}; chainermn launch --prefix shows whose it is")
    return failed(
        f"of {found.ranks} ranks' lines these came: {turns}",
        f"{HELLO}   # must print 0 and 1; what becomes of ranks' output?",
    )


@check(steps.MESSAGES, "Do messages arrive as they were sent, and how fast?", (steps.ORDER,))
def messages(context: Context) -> Answer:
    found = context.once(job.run)
    lacking = job.come_to(steps.MESSAGES, found)
    if lacking is not None:
        return lacking
    return _judged(found, steps.MESSAGES, "they arrive")


def _communicator(name: str) -> Check:
    """The check of a communicator."""
    step = steps.of_communicator(name)

    @check(step, f"Does the communicator {name!r} give what it must?", (steps.MESSAGES,))
    def look(context: Context) -> Answer:
        found = context.once(job.run)
        lacking = job.come_to(step, found)
        if lacking is not None:
            return lacking
        why = found.found(step)[0].get("why_not")
        if why is not None:
            return skipped(f"not for here: {why}")
        return _judged(found, step, "all values are right")

    return look


@check(steps.DEVICE, "Does MPI take memory of GPUs, and sum it?", (steps.MESSAGES,))
def device_reduce(context: Context) -> Answer:
    found = context.once(job.run)
    lacking = job.come_to(steps.DEVICE, found)
    if lacking is not None:
        return lacking
    one = found.found(steps.DEVICE)[0]
    if "why_not" in one:
        return skipped(one["why_not"])
    if not one["aware"]:
        said = "MPI says that it takes no memory of GPUs"
        if context.once(facts.library)["vendor"].startswith("MVAPICH"):
            return warning(said, "export MV2_USE_CUDA=1   # on every host")
        return skipped(f"{said}: communicators take the way through host memory")
    if not one["right"]:
        return failed(
            "MPI says that it takes memory of GPUs, and sums it wrongly",
            "use the communicator 'non_cuda_aware', or another build of this MPI",
        )
    return ok("it does, and the sum is right")


@check(steps.END, "Do all ranks end, and mpiexec with success?", (steps.MESSAGES,))
def ranks_end(context: Context) -> Answer:
    found = context.once(job.run)
    lacking = job.come_to(steps.END, found)
    if lacking is not None:
        return lacking
    if found.ended.returncode is None:
        fix = f"{HELLO}; echo $?   # must come to an end"
        return failed("all ranks ended, and mpiexec does not", fix)
    if found.ended.returncode:
        said = telling_line(found.output)
        return failed(
            f"all ranks ended, and mpiexec with status {found.ended.returncode}: {said}",
            advice(found.output, f"{HELLO}; echo $?   # must print 0 at the end"),
        )
    return ok("all do")


CHECKS = (
    ranks_start,
    ranks_meet,
    thread_level,
    order,
    messages,
    *(_communicator(name) for name in steps.COMMUNICATORS),
    device_reduce,
    ranks_end,
)


def _hosts(found: job.Job) -> set[str]:
    return {str(one["host"]) for one in found.found(steps.START)}


def _judged(found: job.Job, step: str, well: str) -> Answer:
    """Whether values were right, and no slower than this memory lets them be."""
    one = found.found(step)[0]  # the same on all ranks
    if one["problem"] is not None:
        return failed(str(one["problem"]), advice(str(one["problem"]), REPORT))
    if not one["right"]:
        wrong = f" of {', '.join(one['wrong'])}" if one.get("wrong") else ""
        return failed(f"wrong values{wrong} arrived", WRONG)
    rate, copied = one.get("bytes_per_second"), one.get("copied_bytes_per_second")
    if rate is None or copied is None:
        return ok(well)
    share = rate / copied
    rates = {"bytes_per_second": rate, "copied_bytes_per_second": copied}
    said = f"{well}, {_in_words(rate)}/s, {share:.2g} of a copy in memory ({_in_words(copied)}/s)"
    if share < SLOW_SHARE:
        if job.busy(found.ranks):
            return ok(f"{said}; {job.busy(found.ranks)}", **rates)
        return warning(f"{said}: too slow for one machine", SLOW, **rates)
    return ok(said, **rates)


def _in_words(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2g} MB"
