"""Times `scatter_dataset` of an array beside one copy of it and bundled ChainerMN, in one run.

    python benchmarks/scatter.py              starts four ranks by itself
    mpiexec -n 2 python benchmarks/scatter.py

All cases take turns, in another order each round. Memory added is what a node's ranks
together have more than before, as proportional set size, once each rank has read its
part: pages that several map count once.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
import runner
from mpi4py import MPI
from report import Limit, Ratio, are_right, save, show, show_table
from runner import Case, measure

from chainermn_comm import create_communicator
from chainermn_train import scatter_dataset

COPY = "one copy into fresh memory"
OURS = "scatter_dataset"
SHUFFLED = "scatter_dataset, shuffled"
BUNDLED = "bundled"
COLUMNS = (Ratio("x copy", COPY), Ratio("x bundled", BUNDLED))
# What must hold of a 400 MB array over four ranks: the time over that of one copy, and
# the memory added over its size.
COPIES = Limit(OURS, COPY, 1.5)
MEMORY = 1.1
ROW_FLOATS = 784  # of an MNIST image


def arguments() -> argparse.Namespace:
    parser = runner.parser(__doc__, rounds=7, ranks=(4,))
    parser.add_argument("--megabytes", type=float, default=400, help="to scatter (400)")
    return parser.parse_args()


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure and report (collective)."""
    rows = max(1, int(args.megabytes * 1e6 / 4 / ROW_FLOATS))
    whole = None
    if comm.rank == 0:
        whole = np.random.default_rng(0).random((rows, ROW_FLOATS), np.float32)
    calls = make_calls(comm, whole)
    added = {name: memory_of(comm, call) for name, call in calls.items()}
    cases = []
    for name, call in calls.items():
        cases.append(Case(name, call, gc.collect, rank_0_only=name == COPY))
    found = measure(comm, cases, args.rounds, warm_up=1, in_a_row=1)
    if comm.rank == 0:
        show(f"{args.megabytes:g} MB over {comm.size} ranks", found, COLUMNS, [COPIES])
        cells = []
        for name, nbytes in added.items():
            cells.append([name, f"{nbytes / (rows * ROW_FLOATS * 4):.2f}"])
        title = f"Memory added, times the array's (ours: at most {MEMORY})"
        show_table(title, ["case", "times"], cells)
        save(found, args.json)
    return are_right(found)


def make_calls(comm: MPI.Intracomm, whole: Any) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name; each returns what holds the memory."""
    bundled = peers.bundled(comm)
    import chainermn

    ours = create_communicator("hierarchical", comm)

    def copy() -> Any:
        if whole is not None:
            return whole.copy()

    def shuffled() -> Any:
        return scatter_dataset(whole, ours, shuffle=True, seed=1)

    def bundled_shuffled() -> Any:
        return chainermn.scatter_dataset(whole, bundled, shuffle=True, seed=1)

    return {
        COPY: copy,
        OURS: lambda: scatter_dataset(whole, ours),
        SHUFFLED: shuffled,
        BUNDLED: lambda: chainermn.scatter_dataset(whole, bundled),
        f"{BUNDLED}, shuffled": bundled_shuffled,
    }


def memory_of(comm: MPI.Intracomm, call: Callable[[], Any]) -> float:
    """Return the bytes that all ranks together have more than before, once each read its part."""
    before = memory_held()
    comm.Barrier()
    part = call()
    if part is not None:
        for example in part:
            example.sum()
    comm.Barrier()
    after = memory_held()
    comm.Barrier()
    return float(sum(comm.allgather(after - before)))


def memory_held() -> int:
    """Return this process's share of the memory that it maps, in bytes."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return 1024 * int(kib)


if __name__ == "__main__":
    sys.exit(runner.main(arguments(), run))
