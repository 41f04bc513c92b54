"""The jobs that the doctor starts, on this machine and on the hosts, whose ranks try things.

    python job.py ORDER

runs a rank. ORDER is JSON: the ``seconds`` after which the rank ends itself, and the
module and the name of the ``task`` that it calls with the ``options``. It reports what
it finds as events, so that this is known however the rank ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chainermn_tools import jobs
from chainermn_tools.doctor.check import (
    Check,
    CheckResult,
    Checks,
    Context,
    failed,
    skipped,
)
from chainermn_tools.doctor.hints import REPORT_IT, hint_for_output, most_telling_line
from chainermn_tools.doctor.machine import DEFAULT_RANKS
from chainermn_tools.doctor.software import find_launcher
from chainermn_tools.long_events import emit

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# The kind of the events by which ranks report.
EVENT = "doctor"
# Ranks stay on this machine even where a scheduler granted others: Hydra, Intel's, Open
# MPI 5, 4.
HERE = "localhost"
STAY_HERE = {
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
    "PRTE_MCA_ras": "^slurm",
    "PRTE_MCA_plm": "ssh",
    "OMPI_MCA_ras": "^slurm",
    "OMPI_MCA_plm": "rsh",
}
# Ranks of Open MPI that wait leave the core to others, without which few cores are far
# slower.
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# How long after its time limit a rank ends itself, if nobody has ended it.
SPARE_SECONDS = 3

# What each rank here does, by the name of the check that evaluates it. The check's file
# adds it, in the order in which the steps are taken: what may crash a rank comes late.
STEPS: dict[str, Callable[[MPI.Intracomm], dict[str, Any]]] = {}


@dataclass(frozen=True)
class RankJob:
    """What became of the ranks."""

    ranks_per_host: Mapping[str, int]  # how many of them each host should have got
    options: Mapping[str, Any]  # of their task
    timeout: float  # how many seconds they had
    # How mpiexec ended, what ranks reported, and what was printed.
    output: jobs.JobOutput

    @property
    def ranks(self) -> int:
        return sum(self.ranks_per_host.values())

    @property
    def text(self) -> str:
        return f"{self.output.stdout}\n{self.output.stderr}"

    def reports(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of the ranks' events that have one of this name, in order."""
        events = [event.fields for event in self.output.events if event.kind == EVENT]
        return [fields for fields in events if name in fields]

    def results(self, step: str) -> list[dict[str, Any]]:
        """Return the result of each process in a step, of those that finished it."""
        return [one["result"] for one in self.reports("step") if one["step"] == step]

    def failed(self, message: str, default_hint: str, **details: Any) -> CheckResult:
        """Return the failure that a message begins; what was printed ends it and gives the hint."""
        hint = hint_for_output(self.text, default_hint)
        return failed(f"{message}: {most_telling_line(self.text)}", hint, **details)

    def failure_at(self, step: str) -> CheckResult | None:
        """Return why there is nothing to evaluate of a step; None when all ranks finished it."""
        stopped = next(
            (one for one in STEPS if len(self.results(one)) < self.ranks), step
        )
        order = list(STEPS)
        if order.index(stopped) < order.index(step):
            return skipped(
                f"the ranks came no further than {stopped!r}", blocked_by=stopped
            )
        finished = len(self.results(step))
        if finished == self.ranks:
            return None
        where = f"{finished} of {self.ranks} ranks came through it"
        if not self.output.timed_out:
            message = f"{where}; then the job ended with status {self.output.status}"
            return self.failed(message, f"this should not be; {REPORT_IT}")
        if reason := overload_reason(self.ranks):
            return failed(
                f"it hangs, or {reason}: {where} within {self.timeout:.0f} s",
                "give it more time with --timeout; else wait until others are done, or take fewer "
                "ranks",
            )
        return failed(
            f"it hangs: {where} within {self.timeout:.0f} s",
            "MPI's messages get stuck; try another way for them: export UCX_TLS=tcp,self (MPICH), "
            "or OMPI_MCA_pml=ob1 (Open MPI)",
        )


@Context.cached
def run_local_job(context: Context) -> RankJob:
    """Run the ranks on this machine; raise Unavailable if mpiexec can't be started."""
    ranks = context.max_ranks_per_host() or DEFAULT_RANKS
    if context.hosts:  # which run the ranks; here as many as can meet and have cores
        ranks = max(DEFAULT_RANKS, min(ranks, jobs.available_cores()["usable"]))
    threads = jobs.threads_per_rank(ranks)
    ranks_per_host, timeout = {HERE: ranks}, context.remaining()
    return run_ranks(
        context, take_steps, ranks_per_host, timeout, threads, STAY_HERE, ranks=ranks
    )


class StepChecks(Checks):
    """Checks; each evaluates a step that the ranks on this machine take."""

    def add_step(
        self,
        name: str,
        question: str,
        needs: tuple[str, ...],
        probe: Callable[[MPI.Intracomm], dict[str, Any]],
        evaluates_incomplete: bool = False,
    ) -> Callable[[Callable[[Context, RankJob], CheckResult]], Check]:
        """Return a decorator that makes a check of a function that evaluates what all ranks found.

        ``probe`` is what each rank does (collective); it returns what JSON can hold.
        Where a rank doesn't come through it there is nothing to evaluate, unless that
        ``evaluates_incomplete``.
        """
        STEPS[name] = probe

        def register(evaluate: Callable[[Context, RankJob], CheckResult]) -> Check:
            def run(context: Context) -> CheckResult:
                job = run_local_job(context)
                return (not evaluates_incomplete and job.failure_at(name)) or evaluate(
                    context, job
                )

            return self.add(name, question, needs)(run)

        return register


def run_ranks(
    context: Context,
    task: Callable[..., None],
    ranks_per_host: Mapping[str, int],
    timeout: float,
    threads: int | None = 1,
    variables: Mapping[str, str] = {},
    launcher: Mapping[str, Any] | None = None,
    **options: Any,
) -> RankJob:
    """Run ranks as `chainermn launch` does, without showing what they print.

    Each calls the task, a function at the top level of a module, with the options,
    which JSON must be able to hold. ``threads`` is None where the user chose. A
    ``launcher`` in place of mpiexec knows the hosts itself. Raise Unavailable without
    either.
    """
    found = launcher or find_launcher(context)
    seconds, name = int(timeout) + SPARE_SECONDS, (task.__module__, task.__name__)
    order = {"seconds": seconds, "task": name, "options": options}
    # Without spaces, at which a site's wrapper of mpiexec may split it.
    script = [__file__, json.dumps(order, separators=(",", ":"))]
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    env = {**YIELDING, **jobs.BESIDE, **os.environ, **variables, **chosen}
    # The option that names hosts isn't known for an mpiexec of no known MPI.
    is_known = launcher is None and (found["vendor"] or [*ranks_per_host] != [HERE])
    ranks = sum(ranks_per_host.values())
    hosts = ranks_per_host if is_known else None
    args = jobs.mpiexec_command(
        found, ranks, script, hosts=hosts, threads=threads, variables=env
    )
    grace = jobs.TERM_GRACE_SECONDS  # it must be gone soon after the time-out
    output = jobs.run_job(args, env, timeout=timeout, forward=False, term_grace=grace)
    return RankJob(ranks_per_host, options, timeout, output)


def overload_reason(ranks: int) -> str:
    """Return why ``ranks`` may just be slow on this machine; empty if they may not."""
    usable = jobs.available_cores()["usable"]
    if ranks > usable:
        return f"{ranks} ranks are too many for {usable} cores"
    if os.getloadavg()[0] > usable:
        return f"there is more to do than {usable} cores can"
    return ""


def take_steps(ranks: int) -> None:
    """Take all steps as one of the ranks, and report each (collective)."""
    for step, probe in STEPS.items():
        from mpi4py import MPI  # starts MPI, which is the first step

        result = probe(MPI.COMM_WORLD)
        emit(EVENT, step=step, result=result)
        if result.get("size", ranks) != ranks:
            return  # whether it is alone or not, it is not what was asked for


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(order["seconds"])
    module, name = order["task"]
    getattr(importlib.import_module(module), name)(**order["options"])
