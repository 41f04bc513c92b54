"""What each rank of `allreduce.py` does: it measures models and sizes, and rank 0 reports."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peers
import plot
import report
import sizes_plot
from counted import counted
from gradients import Gradients
from limits import IN_A_NODE
from measure import measure
from mpi4py import MPI
from rich.console import Console
from shapes import MODELS, QUICK, QUICK_SIZES, SIZES, elements

from chainermn_comm import create_communicator
from chainermn_comm.config import NAMES

MEASURED = [name for name in NAMES if name not in ("pure_nccl", "dummy")] + [
    peers.REPRODUCIBLE
]
# Does all that the others do before gradients move.
IDLE = "dummy"
# Calls that are counted. They go through each way that a communicator has.
COUNTED_CALLS = 4
# Arrays from here on have their turn less often: they take longer, and vary less.
LARGE_BYTES, LESS_OFTEN = 16 << 20, 5

Communicators = dict[str, tuple[str, Any]]  # by name: kind of case, communicator


def run(args: argparse.Namespace) -> bool:
    """Measure what is wanted and write the reports (collective over MPI.COMM_WORLD).

    Returns:
        Whether all results were right.
    """
    comm = MPI.COMM_WORLD.Dup()
    mine = sorted(os.sched_getaffinity(0))
    # Else ranks that wait would keep the others from work.
    args.realtime &= comm.size <= len(mine)
    names = args.communicator or MEASURED
    communicators: Communicators = {peers.BUNDLED: ("bundled", peers.bundled(comm))}
    communicators |= {name: ("ours", peers.ours(name, comm)) for name in names}
    communicators[IDLE] = "part", create_communicator(IDLE, comm)
    handoff = peers.Handoff(comm)
    which: Iterable[str] = (
        [] if args.only == "sizes" else QUICK if args.quick else MODELS
    )
    how_large = [] if args.only == "models" else QUICK_SIZES if args.quick else SIZES
    cores = comm.allgather((MPI.Get_processor_name(), mine))
    models = [model(name, communicators, handoff, args) for name in which]
    results = report.document(cores, args.repeat, args.realtime, models)
    if comm.rank == 0 and models:
        publish_models(results, args.json, args.plot)
    sizes = [size(nbytes, communicators, handoff, args) for nbytes in how_large]
    if comm.rank == 0 and sizes:
        publish_sizes(results | report.of_sizes(sizes), args.json, args.plot)
    handoff.close()
    for _, communicator in communicators.values():
        communicator.finalize()
    return all(row["right"] for part in models + sizes for row in part["cases"])


def model(
    name: str,
    communicators: Communicators,
    handoff: peers.Handoff,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure everything for one model's gradients (collective)."""
    gradients = Gradients(MODELS[name], handoff.comm)
    cases = [*peers.probes(), *peers.copies(gradients, handoff)]
    cases += [peers.raw_mpi(gradients), *peers.gloo(gradients)]
    cases += of(communicators, gradients)
    cases += [peers.handshake_alone(gradients), peers.barrier_alone(gradients)]
    return {
        "model": name,
        "arrays": len(MODELS[name]),
        "floats": elements(MODELS[name]),
        "moved": {
            one: moved(one, gradients) for one in IN_A_NODE if one in communicators
        },
        "cases": measure(cases, handoff.comm, args.repeat, args.realtime),
    }


def size(
    nbytes: int,
    communicators: Communicators,
    handoff: peers.Handoff,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure all that move a gradient of so many bytes (collective)."""
    gradients = Gradients({"array": (nbytes // 4,)}, handoff.comm)
    copies = [one for one in peers.copies(gradients, handoff) if not one.alone]
    cases = [*copies, peers.raw_mpi(gradients), *peers.gloo(gradients)]
    cases += [one for one in of(communicators, gradients) if one.kind != "part"]
    rounds = args.repeat if nbytes < LARGE_BYTES else max(3, args.repeat // LESS_OFTEN)
    return {
        "bytes": nbytes,
        "cases": measure(cases, handoff.comm, rounds, args.realtime),
    }


def of(communicators: Communicators, gradients: Gradients) -> list[peers.Case]:
    """The communicators as cases."""
    return [
        peers.communicator(name, kind, communicator, gradients)
        for name, (kind, communicator) in communicators.items()
    ]


def moved(name: str, gradients: Gradients) -> float:
    """The most bytes that a rank moves in a call, over those of its gradients (collective)."""
    most = 0
    with counted(name, gradients.comm) as (communicator, counts):
        for _ in range(COUNTED_CALLS):
            gradients.restore()
            counts.reset()
            communicator.allreduce_grad(gradients.model)
            most = max(most, counts.moved)
    return float(gradients.comm.allreduce(most, MPI.MAX) / gradients.source.nbytes)


def publish_models(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the models' tables and write the files, whose folders are made."""
    report.show(results, Console())
    _write(results, json_file)
    plot_file.parent.mkdir(parents=True, exist_ok=True)
    plot.draw(results, plot_file)
    print(plot_file, flush=True)


def publish_sizes(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the table of sizes, and write the files anew."""
    Console().print(report.sizes_table(results["sizes"]))
    _write(results, json_file)
    sizes_file = plot_file.with_stem(f"{plot_file.stem}-sizes")
    sizes_file.parent.mkdir(parents=True, exist_ok=True)
    limits = peers.HANDOFF, peers.ALL_RANKS
    sizes_plot.draw(results["sizes"], limits, report.heading(results), sizes_file)
    print(sizes_file, flush=True)


def _write(results: dict[str, Any], json_file: Path) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    print(json_file)
