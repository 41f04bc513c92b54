"""Checks of what Slurm grants to the job in which the doctor runs, and of ranks of its srun."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from datetime import datetime

from chainermn_tools import jobs
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.cluster.facts import ClusterFacts, over_hosts
from chainermn_tools.doctor.hints import most_telling_line
from chainermn_tools.doctor.placement import MAX_RANKS_PER_HOST, NEEDS, exchange
from chainermn_tools.doctor.ranks.job import run_ranks
from chainermn_tools.doctor.software import mpi_vendor

SHORT_SECONDS = 300  # in which hardly a job gets anywhere
# States of nodes; those with a star don't answer.
BROKEN = re.compile(r"\*$|^(?:down|fail)")
JOB_TIME = (30.0, 0.2, 0.5)  # as placement's
ASK_SECONDS = 10.0

checks, rank_checks = Checks(), Checks()


@checks.add("scheduler", "Does the scheduler grant what the ranks need?")
def scheduler(context: Context) -> CheckResult:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        if shutil.which("sbatch") is None:
            return skipped("no Slurm here")
        return skipped("Slurm is here, but this is none of its jobs (salloc makes one)")
    listed, ranks = os.environ.get("SLURM_JOB_NODELIST", ""), context.ranks
    granted: tuple[jobs.Host, ...] = ()
    with suppress(ValueError):  # what can't be read, chainermn launch names
        granted = (jobs.find_allocation(os.environ) or ("", ()))[1]
    tasks = sum(host.slots or 1 for host in granted) or None
    message = f"Slurm's job {job} grants {tasks or 'its'} tasks on {listed}"
    if ranks is not None and tasks is not None and ranks > tasks:
        return failed(
            f"{message}; {ranks} ranks don't fit", f"salloc -n {ranks}   # or sbatch"
        )
    nodes = [host.name for host in granted]
    short = {node.split(".")[0] for node in nodes}  # either name may lack the domain
    # Nobody says whose an address is.
    names = [
        host.name for host in context.hosts if not re.fullmatch(r"[\d.]+", host.name)
    ]
    outside = [name for name in names if name.split(".")[0] not in short]
    if nodes and outside:
        hint = f"name hosts of the job: {','.join(nodes)}"
        return failed(f"{message}, and not {', '.join(outside)}", hint)
    for line in _ask("sinfo", "-h", "-N", "-n", listed, "-o", "%N %T %E").splitlines():
        node, state, reason = line.split(maxsplit=2)
        if BROKEN.search(state):
            hint = f"sbatch --exclude={node} ...   # or ask: scontrol show node"
            return failed(f"{node} is {state} ({reason})", hint, node=node)
    left = None  # it may have no limit
    with suppress(ValueError):
        end = datetime.fromisoformat(
            _ask("squeue", "-h", "-j", job, "-o", "%e").strip()
        )
        left = int((end - datetime.now()).total_seconds())
    if left is not None and left < SHORT_SECONDS:
        hint = f"sbatch --time=...   # a longer one; or scontrol update JobId={job} TimeLimit=..."
        return warning(f"{message}, and ends in {left} s", hint, seconds_left=left)
    return ok(message, tasks=tasks, seconds_left=left)


def _ask(program: str, *words: str) -> str:
    """Return what a program of Slurm prints; nothing where it fails or is missing."""
    with suppress(jobs.Unavailable):
        return jobs.check_output([program, *words], ASK_SECONDS)
    return ""


@rank_checks.add(
    "srun_ranks", "Do ranks that srun itself starts see one another?", NEEDS
)
@over_hosts
def ranks_of_srun(context: Context, _: ClusterFacts) -> CheckResult:
    if not jobs.starts_by_srun():
        return skipped("this is no job of Slurm")
    assigned = jobs.assign_slots(context.hosts, context.ranks)
    shares = {host: min(ranks, MAX_RANKS_PER_HOST) for host, ranks in assigned.items()}
    found = jobs.find_srun(str(mpi_vendor(context)))
    variables = {"SLURM_NNODES": str(len(shares))}
    timeout, tried = context.time_for(*JOB_TIME), {"communicators": ("hierarchical",)}
    by_default = {"path": found["path"], "vendor": None}  # a plugin would be named
    job = run_ranks(
        context, exchange, shares, timeout, 1, variables, by_default, **tried
    )
    plugin = found["plugin"]
    hint = f"export SLURM_MPI_TYPE={plugin}   # or srun --mpi={plugin}; or start ranks by mpiexec"
    sizes = [len(one["hosts"]) for one in job.reports("hosts")]
    if job.ranks > 1 and sizes == [1] * job.ranks:
        message = (
            f"each of {job.ranks} ranks is rank 0 of 1: srun names no others to its MPI"
        )
        return warning(message, hint)
    if "mpi/pmi2: " in job.text:
        hint = "export MPIR_CVAR_CH4_NETMOD=ofi   # where srun starts ranks of MPICH"
        return warning(
            "MPICH over UCX sends more than Slurm's PMI 2 takes, and may hang", hint
        )
    if job.output.timed_out or job.output.status or not job.reports("communicator"):
        said = (
            "nothing in time" if job.output.timed_out else most_telling_line(job.text)
        )
        return failed(f"they come to no end, and say: {said}", hint)
    return ok(f"all {job.ranks} do")
