"""Measures all contestants in turn on this rank, and has rank 0 report."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peers
import plot
import report
from gradients import Gradients
from mpi4py import MPI
from rich.console import Console
from shapes import MODELS, QUICK, elements

from chainermn_comm import create_communicator
from chainermn_comm.catalogue import RECIPES

# One of each way to take a mean on CPUs.
MEASURED = [name for name in RECIPES if name not in ("non_cuda_aware", "pure_nccl", "dummy")]
NAP_SECONDS = 0.0005


def run(args: argparse.Namespace) -> bool:
    """Measure every model and write the reports (collective over MPI.COMM_WORLD).

    Returns:
        Whether all results were right.
    """
    comm = MPI.COMM_WORLD.Dup()
    communicators = {peers.BUNDLED: ("bundled", peers.bundled(comm))}
    for name in args.communicator or MEASURED:
        communicators[name] = "ours", create_communicator(name, comm)
    handoff = peers.Handoff(comm)
    models: list[dict[str, Any]] = []
    for model in QUICK if args.quick else MODELS:
        gradients = Gradients(MODELS[model], comm)
        contestants = [*peers.probes(), *peers.copies(gradients, handoff)]
        contestants += [peers.raw_mpi(gradients), *peers.gloo(gradients)]
        for name, (kind, communicator) in communicators.items():
            contestants.append(peers.communicator(name, kind, communicator, gradients))
        models.append(
            {
                "model": model,
                "arrays": len(MODELS[model]),
                "floats": elements(MODELS[model]),
                "contestants": measure(contestants, comm, args.repeat, args.realtime),
            }
        )
    handoff.close()
    for _, communicator in communicators.values():
        communicator.finalize()
    cores = comm.allgather((MPI.Get_processor_name(), sorted(os.sched_getaffinity(0))))
    if comm.rank == 0:
        publish(report.document(cores, args.repeat, args.realtime, models), args.json, args.plot)
    comm.Barrier()
    return all(row["right"] for model in models for row in model["contestants"])


def publish(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the table and write the two files, whose folders are made."""
    for file in (json_file, plot_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    plot.draw(results, plot_file)
    report.show(results, Console())
    print(f"{json_file}\n{plot_file}")


def measure(
    contestants: list[peers.Contestant], comm: MPI.Intracomm, rounds: int, realtime: bool
) -> list[dict[str, Any]]:
    """Time the contestants in turn, each once a round (collective).

    Returns:
        For each its name and kind; ``ms``, of a round's slowest rank, for each round;
        ``right``, whether the results of its first and last calls were; ``extra_bytes``,
        the most that its first call added to a rank's memory, or None where unknown.
    """
    extra, right = [], []
    for contestant in contestants:
        before = forget_peak()
        time_one(contestant, comm, realtime)  # not counted: the first call allocates
        grown = comm.allgather(peak() - before if before else None)
        extra.append(None if None in grown else max(grown))
        right.append(contestant.right())
    seconds = np.zeros((rounds, len(contestants)))
    gc.collect()
    gc.disable()
    for turn, i in np.ndindex(seconds.shape):
        seconds[turn, i] = time_one(contestants[i], comm, realtime)
        if turn == rounds - 1:
            right[i] &= contestants[i].right()
    gc.enable()
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return [
        {
            "name": contestant.name,
            "kind": contestant.kind,
            "ms": (seconds[:, i] * 1e3).round(6).tolist(),
            "right": right[i],
            "extra_bytes": extra[i],
        }
        for i, contestant in enumerate(contestants)
    ]


def time_one(contestant: peers.Contestant, comm: MPI.Intracomm, realtime: bool) -> float:
    """Seconds that one call took on this rank."""
    contestant.prepare()
    with priority(realtime):
        return _time_call(contestant, comm)


def _time_call(contestant: peers.Contestant, comm: MPI.Intracomm) -> float:
    comm.Barrier()
    took = 0.0
    if comm.rank == 0 or not contestant.alone:
        start = time.perf_counter()
        contestant.call()
        took = time.perf_counter() - start
    if contestant.alone:  # a rank that waits in a barrier would keep its core busy
        done = comm.Ibarrier()
        while not done.Test():
            time.sleep(NAP_SECONDS)
    return took


@contextlib.contextmanager
def priority(realtime: bool) -> Iterator[None]:
    """Let nothing else have this rank's core meanwhile, if wanted.

    Only for the milliseconds of one call: what shares the machine should hardly notice.
    """
    if not realtime:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def forget_peak() -> int:
    """Let the peak of this process's memory begin anew.

    Returns:
        The bytes it holds now, or 0 where Linux doesn't let us.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that this process held since `forget_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
