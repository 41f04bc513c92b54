"""The job that the doctor starts on this machine: its ranks take one step after another.

    python rank_job.py RANKS SECONDS

runs a rank. It reports the result of each step as an event, so that this is known however the
rank ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _chainermn_events import emit
from chainermn_tools import jobs
from chainermn_tools.doctor.check import CheckResult, Context, failed, skipped
from chainermn_tools.doctor.hints import REPORT_IT, hint_for_output, most_telling_line
from chainermn_tools.doctor.mpi import find_launcher

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# The kind of the events by which ranks report.
EVENT = "doctor"
# As few as can find one another.
DEFAULT_RANKS = 2
# Ranks stay on this machine even where a scheduler granted others: Hydra, Intel's, Open MPI 5, 4.
HERE = "localhost"
STAY_HERE = {
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
    "PRTE_MCA_ras": "^slurm",
    "PRTE_MCA_plm": "ssh",
    "OMPI_MCA_ras": "^slurm",
    "OMPI_MCA_plm": "rsh",
}
# Ranks of Open MPI that wait leave the core to others, without which few cores are far slower.
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# A rank that nobody ends any more ends itself so much later than it should have been.
SPARE_SECONDS = 10

# What each rank does, by the name of the check that judges it. The check's file adds it, in the
# order in which the steps are taken: what may crash a rank comes late.
STEPS: dict[str, Callable[[MPI.Intracomm], dict[str, Any]]] = {}


@dataclass(frozen=True)
class RankJob:
    """What became of the ranks.

    Attributes:
        ranks: how many should have been started.
        timeout: how many seconds they had.
        output: how mpiexec ended, what ranks reported, and what was printed.
    """

    ranks: int
    timeout: float
    output: jobs.JobOutput

    @property
    def text(self) -> str:
        """All that mpiexec and the ranks printed."""
        return f"{self.output.stdout}\n{self.output.stderr}"

    def results(self, step: str) -> list[dict[str, Any]]:
        """Return the result of each process in a step, of those that finished it."""
        events = [event for event in self.output.events if event.kind == EVENT]
        return [event["result"] for event in events if event["step"] == step]

    def failure_at(self, step: str) -> CheckResult | None:
        """Return why there is nothing to judge of a step; None when all ranks finished it."""
        stopped = next((one for one in STEPS if len(self.results(one)) < self.ranks), step)
        order = list(STEPS)
        if order.index(stopped) < order.index(step):
            message = f"the ranks came no further than {stopped!r}"
            return skipped(message, blocked_by=stopped)
        finished = len(self.results(step))
        if finished == self.ranks:
            return None
        where = f"{finished} of {self.ranks} ranks came through it"
        if not self.output.timed_out:
            return failed(
                f"{where}; then the job ended with status {self.output.status}: "
                f"{most_telling_line(self.text)}",
                hint_for_output(self.text, f"this should not be; {REPORT_IT}"),
            )
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


def run_job(context: Context) -> RankJob:
    """Run the job; for ``context.cached``.

    Raises:
        Unavailable: mpiexec can't be started.
    """
    launcher = context.cached(find_launcher)
    ranks = ranks_to_start(context)
    timeout = context.remaining()
    hosts = None if launcher["vendor"] is None else {HERE: ranks}
    threads = jobs.threads_per_rank(ranks)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    command = jobs.rank_command(__file__, str(ranks), f"{timeout:.0f}")
    output = run_ranks(context, ranks, command, hosts, timeout, threads, {**STAY_HERE, **chosen})
    return RankJob(ranks, timeout, output)


def run_ranks(
    context: Context,
    ranks: int,
    command: Sequence[str],
    hosts: Mapping[str, int] | None,
    timeout: float,
    threads: int | None,
    variables: Mapping[str, str],
) -> jobs.JobOutput:
    """Run ranks as `chainermn launch` does, without showing what they print.

    Args:
        context: of the check.
        ranks: how many, in all.
        command: that each runs.
        hosts: how many ranks each host gets; None where mpiexec's options aren't known.
        timeout: of the job, in seconds.
        threads: that each rank computes with; None where the user chose.
        variables: in addition to the environment's.

    Raises:
        Unavailable: there is no mpiexec.
        OSError: it can't be started.
    """
    env = {**YIELDING, **os.environ, **variables}
    args = jobs.mpiexec_command(
        context.cached(find_launcher), ranks, command, hosts=hosts, threads=threads, variables=env
    )
    grace = jobs.TERM_GRACE_SECONDS  # it must be gone soon after the time-out
    return jobs.run_job(args, env, timeout=timeout, forward=False, term_grace=grace)


def ranks_to_start(context: Context) -> int:
    """Return as many as the user wants; where hosts are to run them, as can meet and have cores."""
    wanted = context.max_ranks_per_host()
    if wanted is None:
        return DEFAULT_RANKS
    usable: int = jobs.available_cores()["usable"]
    return max(DEFAULT_RANKS, min(wanted, usable)) if context.hosts else wanted


def overload_reason(ranks: int = 0) -> str:
    """Return why so many ranks may just be slow on this machine; empty if they may not.

    Args:
        ranks: how many; 0 to ask for the load of the machine alone.
    """
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
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(int(float(sys.argv[2])) + SPARE_SECONDS)
    # The module of this name, another one than this script, has its STEPS filled by the package.
    from chainermn_tools.doctor import rank_job

    rank_job.take_steps(int(sys.argv[1]))
