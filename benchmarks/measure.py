"""Measures all contestants in turn on this rank, and has rank 0 report."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import peers
import plot
import report
from chainermn_comm import create_communicator
from chainermn_comm.catalogue import RECIPES
from gradients import Gradients
from mpi4py import MPI
from rich.console import Console
from shapes import MODELS, QUICK, elements

NAP_SECONDS = 0.0005


def run(args: argparse.Namespace) -> None:
    """Measure every model and write the reports (collective over MPI.COMM_WORLD)."""
    comm = MPI.COMM_WORLD.Dup()
    communicators = {peers.BUNDLED: ("bundled", peers.bundled(comm))}
    for name in args.communicator or RECIPES:
        communicators[name] = "ours", create_communicator(name, comm)
    handoff = peers.Handoff(comm)
    models = []
    for model in QUICK if args.quick else MODELS:
        gradients = Gradients(MODELS[model], comm)
        contestants = [*peers.copies(gradients, handoff), peers.raw_mpi(gradients)]
        for name, (kind, communicator) in communicators.items():
            contestants.append(peers.communicator(name, kind, communicator, gradients))
        models.append(
            {
                "model": model,
                "arrays": len(MODELS[model]),
                "floats": elements(MODELS[model]),
                "contestants": measure(contestants, comm, args.repeat),
            }
        )
    handoff.close()
    cores = comm.allgather((MPI.Get_processor_name(), sorted(os.sched_getaffinity(0))))
    if comm.rank == 0:
        publish(report.document(cores, args.repeat, models), args.json, args.plot)
    comm.Barrier()


def publish(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the table and write the two files, whose folders are made."""
    for file in (json_file, plot_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    plot.draw(results, plot_file)
    report.show(results, Console())
    print(f"{json_file}\n{plot_file}")


def measure(
    contestants: list[peers.Contestant], comm: MPI.Intracomm, rounds: int
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
        time_one(contestant, comm)  # not counted: the first call allocates
        extra.append(comm.allreduce(peak() - before, MPI.MAX) if before else None)
        right.append(contestant.right())
    seconds = np.zeros((rounds, len(contestants)))
    gc.collect()
    gc.disable()
    for turn, i in np.ndindex(seconds.shape):
        seconds[turn, i] = time_one(contestants[i], comm)
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


def time_one(contestant: peers.Contestant, comm: MPI.Intracomm) -> float:
    """Seconds that one call took on this rank."""
    contestant.prepare()
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
