"""Checks of cores, of how processes are started, and of the scheduler."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Answer, Context, check, failed, ok, skipped, warning
from chainermn_tools.jobs import THREAD_VARIABLES, available_cores

INFINIBAND = Path("/sys/class/infiniband")
# From this kernel on a fork copies the pages that a network card writes to.
SAFE_KERNEL = (5, 12)
FORK_VARIABLES = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")


@check("cores", "Are there cores enough for the ranks and the threads of their BLAS?")
def cores(context: Context) -> Answer:
    found = available_cores()
    usable, ranks = found["usable"], context.ranks_here()
    said = f"{usable} of the machine's {found['machine']} cores may be used"
    chosen = [name for name in THREAD_VARIABLES if os.environ.get(name, "").strip()]
    if ranks is not None and ranks > usable:
        return warning(
            f"{said}, for {ranks} ranks: they take turns",
            f"start at most {usable} ranks here, or ask for more cores",
            **found,
        )
    for name in chosen:
        value = os.environ[name].split(",")[0].strip()
        if value.isdigit() and int(value) * (ranks or 1) > usable:
            return warning(
                f"{said}; {name} is {value}" + (f", for each of {ranks} ranks" if ranks else ""),
                f"export {name}={max(1, usable // (ranks or 1))}",
                **found,
            )
    if chosen:
        return ok(f"{said}; {', '.join(f'{n} is {os.environ[n]}' for n in chosen)}", **found)
    return ok(f"{said}; communicators limit the BLAS of each rank to its share", **found)


@check("start method", "Is the way in which Python starts processes safe beside MPI?")
def start_method(context: Context) -> Answer:
    # Asked plainly, multiprocessing would settle it.
    method = multiprocessing.get_start_method(True) or multiprocessing.get_all_start_methods()[0]
    cards = sorted(card.name for card in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if method != "fork":
        return ok(f"{method}; import mpi4py.MPI in the script's main part alone")
    if not cards:
        return ok("fork, and there is no InfiniBand card that it could disturb")
    if any(os.environ.get(name, "0") not in ("", "0") for name in FORK_VARIABLES):
        return ok(f"fork, which {' or '.join(FORK_VARIABLES)} makes safe for {', '.join(cards)}")
    release = platform.release()
    if _numbers(release) >= SAFE_KERNEL:
        return ok(f"fork, which Linux {release} makes safe for {', '.join(cards)}")
    return warning(
        f"fork, after which {', '.join(cards)} may write to the wrong memory on Linux {release}: "
        "data loaders' processes crash",
        "multiprocessing.set_start_method('forkserver')   # first thing, before MPI starts",
    )


@check("scheduler", "Does a scheduler grant what the ranks need?")
def scheduler(context: Context) -> Answer:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        if shutil.which("sbatch") is None:
            return skipped("no Slurm here")
        return skipped("Slurm is here, but this is none of its jobs (salloc makes one)")
    granted = slurm(os.environ)
    said = f"Slurm's job {job} grants {granted['text']}"
    tasks, ranks = granted["tasks"], context.ranks
    if ranks is not None and tasks is not None and ranks > tasks:
        return failed(f"{said}; {ranks} ranks don't fit", f"salloc -n {ranks}   # or sbatch")
    nodes = _nodes(context)
    outside = [host.name for host in context.hosts if nodes and not _is_among(host.name, nodes)]
    if outside:
        return failed(
            f"{said}, and not {', '.join(outside)}",
            f"name hosts of the job: {','.join(nodes)}",
        )
    return ok(said, **granted)


def slurm(variables: Mapping[str, str]) -> dict[str, Any]:
    """What a job of Slurm was granted, in numbers and in words; None for what isn't said."""

    def number(name: str) -> int | None:
        found = re.match(r"\d+", variables.get(name, ""))
        return int(found[0]) if found else None

    nodes, cores = number("SLURM_JOB_NUM_NODES"), number("SLURM_CPUS_ON_NODE")
    each, gpus = number("SLURM_CPUS_PER_TASK"), number("SLURM_GPUS_ON_NODE")
    tasks = number("SLURM_NTASKS")
    if tasks is None:
        tasks = _sum_of_tasks(variables.get("SLURM_TASKS_PER_NODE", ""))
    listed = variables.get("SLURM_JOB_NODELIST")
    parts = [
        *_counted(nodes, f"node{f' ({listed})' if listed else ''}", f"nodes ({listed})"),
        *_counted(tasks, "task", "tasks"),
        *_counted(each, "core a task", "cores a task"),
        *_counted(cores, "core on this node", "cores on this node"),
        *_counted(gpus, "GPU on this node", "GPUs on this node"),
    ]
    text = ", ".join(parts)
    return {"text": text or "nothing that it names", "nodes": nodes, "tasks": tasks, "gpus": gpus}


def _counted(count: int | None, one: str, many: str) -> list[str]:
    return [] if count is None else [f"{count} {one if count == 1 else many}"]


def _sum_of_tasks(text: str) -> int | None:
    """The tasks in Slurm's ``2(x3),1``."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(parts):
        return None
    return sum(int(part[1]) * int(part[2] or 1) for part in parts if part)


def _nodes(context: Context) -> list[str]:
    """The names of the job's nodes; empty where Slurm doesn't say."""
    listed, scontrol = os.environ.get("SLURM_JOB_NODELIST"), shutil.which("scontrol")
    if not context.hosts or listed is None or scontrol is None:
        return []
    ended = jobs.run([scontrol, "show", "hostnames", listed], facts.seconds(context))
    return ended.stdout.split() if ended.returncode == 0 else []


def _is_among(host: str, nodes: list[str]) -> bool:
    """Whether a host is one of the nodes, whose names may be given with or without a domain."""
    if re.fullmatch(r"[\d.]+", host):
        return True  # an address; nobody says whose
    return host.split(".")[0] in {node.split(".")[0] for node in nodes}


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", release)[:2])
