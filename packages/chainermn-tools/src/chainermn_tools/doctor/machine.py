"""Checks of how processes are started, of cores, and of the scheduler."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _chainermn_limits import chosen_thread_variables
from chainermn_tools import jobs
from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped, warning

INFINIBAND_FOLDER = Path("/sys/class/infiniband")
# From this kernel on a fork copies the pages that a network card writes to.
SAFE_KERNEL = (5, 12)
FORK_VARIABLES = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")

checks = Checks()


@checks.add("start method", "Is the way in which Python starts processes safe beside MPI?")
def start_method(context: Context) -> CheckResult:
    # get_start_method() without an argument would settle it for the whole process.
    method = multiprocessing.get_start_method(True) or multiprocessing.get_all_start_methods()[0]
    folder = INFINIBAND_FOLDER
    cards = ", ".join(sorted(card.name for card in folder.iterdir()) if folder.is_dir() else [])
    if method != "fork":
        return ok(f"{method}; import mpi4py.MPI in the script's main part alone")
    if not cards:
        return ok("fork, and there is no InfiniBand card that it could disturb")
    if any(os.environ.get(name, "0") not in ("", "0") for name in FORK_VARIABLES):
        return ok(f"fork, which {' or '.join(FORK_VARIABLES)} makes safe for {cards}")
    release = platform.release()
    if tuple(int(number) for number in re.findall(r"\d+", release)[:2]) >= SAFE_KERNEL:
        return ok(f"fork, which Linux {release} makes safe for {cards}")
    return warning(
        f"fork, after which {cards} may write to the wrong memory on Linux {release}: "
        "data loaders' processes crash",
        "multiprocessing.set_start_method('forkserver')   # first thing, before MPI starts",
    )


@checks.add("cores", "Are there cores enough for the ranks and the threads of their BLAS?")
def cores(context: Context) -> CheckResult:
    found = jobs.available_cores()
    usable, ranks = found["usable"], context.local_ranks()
    message = f"{usable} of the machine's {found['machine']} cores may be used"
    if ranks is not None and ranks > usable:
        return warning(
            f"{message}, for {ranks} ranks: they take turns",
            f"start at most {usable} ranks here, or ask for more cores",
            **found,
        )
    chosen = chosen_thread_variables({})
    for name in chosen:
        value = os.environ[name].split(",")[0].strip()
        if value.isdigit() and int(value) * (ranks or 1) > usable:
            return warning(
                f"{message}; {name} is {value}" + (f", for each of {ranks} ranks" if ranks else ""),
                f"export {name}={max(1, usable // (ranks or 1))}",
                **found,
            )
    if chosen:
        return ok(f"{message}; {', '.join(f'{n} is {os.environ[n]}' for n in chosen)}", **found)
    return ok(f"{message}; communicators limit the BLAS of each rank to its share", **found)


@checks.add("scheduler", "Does a scheduler grant what the ranks need?")
def scheduler(context: Context) -> CheckResult:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        if shutil.which("sbatch") is None:
            return skipped("no Slurm here")
        return skipped("Slurm is here, but this is none of its jobs (salloc makes one)")
    granted = slurm_allocation(os.environ)
    message = f"Slurm's job {job} grants {granted['text']}"
    tasks, ranks = granted["tasks"], context.ranks
    if ranks is not None and tasks is not None and ranks > tasks:
        return failed(f"{message}; {ranks} ranks don't fit", f"salloc -n {ranks}   # or sbatch")
    nodes = _slurm_nodes(context)
    outside = [host.name for host in context.hosts if nodes and not _is_among(host.name, nodes)]
    if outside:
        hint = f"name hosts of the job: {','.join(nodes)}"
        return failed(f"{message}, and not {', '.join(outside)}", hint)
    return ok(message, **granted)


def slurm_allocation(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what a job of Slurm was granted, in numbers and as text; None for what isn't said."""

    def number(name: str) -> int | None:
        found = re.match(r"\d+", variables.get(name, ""))
        return int(found[0]) if found else None

    nodes, gpus, tasks = map(number, ("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS"))
    if tasks is None:
        tasks = _count_tasks(variables.get("SLURM_TASKS_PER_NODE", ""))
    listed = variables.get("SLURM_JOB_NODELIST")
    counts = (
        (nodes, f"node{f' ({listed})' if listed else ''}", f"nodes ({listed})"),
        (tasks, "task", "tasks"),
        (number("SLURM_CPUS_PER_TASK"), "core a task", "cores a task"),
        (number("SLURM_CPUS_ON_NODE"), "core on this node", "cores on this node"),
        (gpus, "GPU on this node", "GPUs on this node"),
    )
    parts = [f"{n} {one if n == 1 else many}" for n, one, many in counts if n is not None]
    text = ", ".join(parts) or "nothing that it names"
    return {"text": text, "nodes": nodes, "tasks": tasks, "gpus": gpus}


def _count_tasks(text: str) -> int | None:
    """Return the number of tasks in Slurm's ``2(x3),1``."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(parts):
        return None
    return sum(int(part[1]) * int(part[2] or 1) for part in parts if part)


def _slurm_nodes(context: Context) -> list[str]:
    """Return the names of the job's nodes; empty where Slurm doesn't say."""
    listed, scontrol = os.environ.get("SLURM_JOB_NODELIST"), shutil.which("scontrol")
    if not context.hosts or listed is None or scontrol is None:
        return []
    args = [scontrol, "show", "hostnames", listed]
    completed = jobs.run(args, context.program_timeout())
    return completed.stdout.split() if completed.returncode == 0 else []


def _is_among(host: str, nodes: list[str]) -> bool:
    """Return whether a host is one of the nodes; either name may lack the domain."""
    if re.fullmatch(r"[\d.]+", host):
        return True  # an address; nobody says whose
    return host.split(".")[0] in {node.split(".")[0] for node in nodes}
