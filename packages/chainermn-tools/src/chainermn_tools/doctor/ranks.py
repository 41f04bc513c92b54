"""The job of ranks that the doctor starts here or on hosts, and the checks of ranks here."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor import rank_program
from chainermn_tools.doctor.check import (
    DEFAULT_RANKS,
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.hints import (
    REPORT_IT,
    hint_for,
    most_telling_line,
)
from chainermn_tools.doctor.rank_program import (
    END,
    FACTS,
    MEET,
    MESSAGES,
    START,
    on_gpus,
)
from chainermn_tools.formatting import format_count

# The names that `chainermn_comm.create_communicator` knows. Importing it here could
# start its hooks.
COMMUNICATORS = (
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "single_node",
    "non_cuda_aware",
    "pure_nccl",
    "dummy",
)
# Variables that keep ranks on this machine even if a scheduler granted other hosts:
# Hydra's, Intel MPI's, Open MPI 5's and 4's.
HERE = "localhost"
STAY_HERE = {
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
    "PRTE_MCA_ras": "^slurm",
    "PRTE_MCA_plm": "ssh",
    "OMPI_MCA_ras": "^slurm",
    "OMPI_MCA_plm": "rsh",
}
# Waiting ranks of Open MPI leave their core to other ranks. Otherwise ranks on few
# cores are far slower.
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# How long after its time limit a rank ends itself, if nobody has ended it.
SPARE_SECONDS = 3
# The share of the remaining time, if hosts are examined after these ranks.
SHARE_BEFORE_HOSTS = 0.4
HELLO = "mpiexec -n 2 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.rank)'"
HELLO_HINT = f"{HELLO}   # must print 0 and 1"
# The last steps of a rank's life need these checks.
NEEDS = ("packages", "mpi4py", "mpiexec", "mpi_match", "shared_memory")

checks = Checks()


@dataclass(frozen=True)
class RankJob:
    """The result of a job of ranks."""

    ranks_per_host: Mapping[str, int]  # how many ranks each host should have got
    timeout: float  # how many seconds the ranks had
    # mpiexec's end, the ranks' reports, and the output.
    output: jobs.JobOutput

    @property
    def ranks(self) -> int:
        return sum(self.ranks_per_host.values())

    @property
    def text(self) -> str:
        return self.output.text

    def results(self, step: str) -> list[dict[str, Any]]:
        """Return the reports of the ranks that finished a step."""
        return [
            event["result"]
            for event in self.output.events
            if event.kind == rank_program.EVENT and event["step"] == step
        ]

    def ended(self, message: str, hint: str) -> CheckResult:
        """Return a failure: the job has ended too early, or had to be ended."""
        if self.output.timed_out:
            message = f"{message} within {self.timeout:.0f} s"
            how = "if it is just slow, use --timeout; mpiexec says"
        else:
            how = f"mpiexec ended with status {self.output.status}"
        message = f"{message}; {how}: {most_telling_line(self.text)}"
        return failed(message, hint_for(self.text, hint))

    def evaluate(self, steps: Sequence[str], success: str, hint: str) -> CheckResult:
        """Check that every rank finished these steps, and that none of them has a problem.

        The hint is for a job that hangs or ends in one of them.
        """
        tried = []
        reason = "nothing was tried"
        for step in steps:
            found = self.results(step)
            if len(found) < self.ranks:
                message = f"{step}: {len(found)} of {self.ranks} ranks finished"
                return self.ended(message, hint)
            problem = found[0].get("problem")
            if problem is not None:
                message = f"{step}: {problem}"
                default = f"use another communicator or MPI, and {REPORT_IT}"
                return failed(message, hint_for(message, default))
            reason = found[0].get("reason", reason)
            if "reason" not in found[0]:
                tried.append(step)
        if not tried:
            return skipped(reason)
        return ok(success, tried=tried)

    def evaluate_meeting(self, context: Context) -> CheckResult:
        """Check that MPI_Init has ended on all ranks, and that they see one another."""
        found = self.results(START)
        if len(found) < self.ranks:
            message = f"MPI starts on {len(found)} of {self.ranks} ranks"
            return self.ended(message, HELLO_HINT)
        sizes = {one["size"] for one in found}
        if sizes == {1} and self.ranks > 1:
            mpi = context.facts["mpi"]
            vendor = mpi["library"]["vendor"]
            return failed(
                f"each of {self.ranks} ranks is rank 0 of 1: {mpi['launcher']['path']} does not "
                f"belong to {vendor}, which mpi4py loads",
                f"put the mpiexec of {vendor} first on PATH   # one from pip is beside python",
            )
        success = f"each rank sees all {self.ranks}"
        if self.ranks == 1:
            success = "the only rank sees itself"
        return self.evaluate([MEET], success, NETWORK_HINT)


NETWORK_HINT = (
    "name the network: export HYDRA_IFACE=eth0 UCX_NET_DEVICES=eth0 (MPICH), or "
    "OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI); or use plain TCP: UCX_TLS=tcp,self, or "
    "OMPI_MCA_pml=ob1"
)


def run_ranks(
    ranks_per_host: Mapping[str, int],
    timeout: float,
    launcher: Mapping[str, Any],
    communicators: Sequence[str] = (),
    variables: Mapping[str, str] = {},
) -> RankJob:
    """Run ranks as `chainermn launch` does, without showing what they print."""
    ranks = sum(ranks_per_host.values())
    order = {
        "seconds": int(timeout) + SPARE_SECONDS,
        "ranks": ranks,
        "communicators": communicators,
    }
    # The text has no spaces, at which a site's wrapper of mpiexec might split it.
    words = json.dumps(order, separators=(",", ":"))
    env = {**YIELDING, **jobs.BESIDE, **os.environ, "OMP_NUM_THREADS": "1", **variables}
    hosts: Mapping[str, int] | None = ranks_per_host
    if launcher["vendor"] is None:
        hosts = None  # the option that names hosts isn't known
    args = jobs.mpiexec_command(
        launcher,
        ranks,
        ["-m", rank_program.__name__, words],
        flags=["-P"],  # so the current folder has no influence
        hosts=hosts,
        threads=1,
        variables=env,
    )
    grace = jobs.TERM_GRACE_SECONDS  # the job must be gone soon after the time-out
    output = jobs.run_job(
        args, env, ranks=ranks, timeout=timeout, forward=False, term_grace=grace
    )
    return RankJob(ranks_per_host, timeout, output)


@functools.cache
def run_local_job(context: Context) -> RankJob:
    """Run the ranks on this machine."""
    ranks = context.max_ranks_per_host() or DEFAULT_RANKS
    share = 1.0
    # The hosts run the ranks; here start as many ranks as can meet and have cores.
    if context.hosts:
        usable = context.facts["machine"]["cores"]["usable"]
        ranks = max(DEFAULT_RANKS, min(ranks, usable))
        share = SHARE_BEFORE_HOSTS
    launcher = context.facts["mpi"]["launcher"]
    timeout = context.share(share)
    return run_ranks({HERE: ranks}, timeout, launcher, COMMUNICATORS, STAY_HERE)


@checks.add("ranks_start", "Does mpiexec start the ranks?", NEEDS)
def ranks_start(context: Context) -> CheckResult:
    job = run_local_job(context)
    began = len(job.results(FACTS))
    if began < job.ranks:
        message = f"{began} of {job.ranks} ranks were started"
        hint = "getent hosts $(hostname)   # must print an address; else add one to /etc/hosts"
        return job.ended(message, hint)
    return ok(format_count(began, "rank"))


@checks.add("ranks_meet", "Do the ranks see one another?", ("ranks_start",))
def ranks_meet(context: Context) -> CheckResult:
    return run_local_job(context).evaluate_meeting(context)


@checks.add("thread_level", "May several threads of a rank call MPI?", ("ranks_meet",))
def thread_level(context: Context) -> CheckResult:
    level = run_local_job(context).results(START)[0]["level"]
    message = f"MPI's thread level is {level}"
    if level == "multiple" or os.environ.get("MPI4PY_RC_THREAD_LEVEL"):
        return ok(message)
    return warning(
        f"{message}: double buffering gains nothing from it",
        "unset MPICH_MAX_THREAD_SAFETY   # else use an MPI that was built for threads",
    )


@checks.add("messages", "Do messages arrive as they were sent?", ("ranks_meet",))
def messages(context: Context) -> CheckResult:
    job = run_local_job(context)
    return job.evaluate([MESSAGES], "all values are right", NETWORK_HINT)


@checks.add("communicators", "Do communicators give correct results?", ("messages",))
def communicators(context: Context) -> CheckResult:
    job = run_local_job(context)
    return job.evaluate(COMMUNICATORS, "all values are right", REPORT_IT)


@checks.add("gpu_communicators", "And on GPUs?", ("communicators", "nccl"))
def gpu_communicators(context: Context) -> CheckResult:
    job = run_local_job(context)
    steps = [on_gpus(name) for name in COMMUNICATORS]
    return job.evaluate(steps, "all values are right", REPORT_IT)


@checks.add("ranks_end", "Do all ranks end?", ("gpu_communicators",))
def ranks_end(context: Context) -> CheckResult:
    job = run_local_job(context)
    if job.output.timed_out or job.output.status:
        hint = f"{HELLO}; echo $?   # must print 0 at the end"
        return job.ended("all ranks ended, but mpiexec did not end well", hint)
    return job.evaluate([END], "all ranks ended", HELLO_HINT)
