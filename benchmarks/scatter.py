"""Times `scatter_dataset` of an array beside one copy of it and bundled ChainerMN, in one run.

    python benchmarks/scatter.py              starts four ranks by itself
    mpiexec -n 2 python benchmarks/scatter.py

All cases take turns, in another order each round, and each twice in its turn: memory
that was just freed is faster to get than memory that nobody had for a while, above all
in a virtual machine. Memory added is what a node's ranks together have more than
before, as proportional set size, once each rank has read its part: pages that several
map count once. Exits 1 where a limit doesn't hold.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

COPY = "one copy into fresh memory"
# Of the kind that processes can share; in one thread.
SHARED = "one copy into fresh shared memory"
ROW_FLOATS = 784  # of an MNIST image
OURS = "scatter_dataset"
SHUFFLED = f"{OURS}, shuffled"
# What must hold of a 400 MB array over four ranks: the time over that of one copy into
# fresh memory (the first of a turn), median over rounds, and the memory added over its
# size.
COPIES, MEMORY = 1.5, 1.1


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start (4)")
    parser.add_argument(
        "--megabytes", type=float, default=400, help="size of the array (400)"
    )
    parser.add_argument("--repeat", type=int, default=7, help="rounds (7)")
    parser.add_argument(
        "--first", action="store_true", help="before other work; needs root"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for the whole run"
    )
    return parser.parse_args()


def make_calls(comm: Any, whole: Any) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; each returns what holds the memory."""
    os.environ["CHAINERMN_USE_BUNDLED"] = "1"  # `import chainermn` is Chainer's own
    import chainermn  # type: ignore[import-untyped,unused-ignore]
    import numpy as np

    from chainermn_comm import create_communicator
    from chainermn_train import scatter_dataset
    from chainermn_train.datasets.shared_arrays import SharedBytes

    def shared() -> Any:
        if whole is None:
            return None
        content = SharedBytes()
        content.fill(whole.nbytes, [whole.reshape(-1).view("u1")])
        return np.frombuffer(content.content, whole.dtype).reshape(whole.shape)

    ours = create_communicator("hierarchical", comm)
    bundled = chainermn.create_communicator("naive", comm)
    return {
        COPY: lambda: None if whole is None else whole.copy(),
        SHARED: shared,
        OURS: lambda: scatter_dataset(whole, ours),
        SHUFFLED: lambda: scatter_dataset(whole, ours, shuffle=True, seed=1),
        "bundled": lambda: chainermn.scatter_dataset(whole, bundled),
        "bundled, shuffled": lambda: chainermn.scatter_dataset(
            whole, bundled, shuffle=True, seed=1
        ),
    }


def grown(comm: Any, call: Callable[[], Any]) -> float:
    """Bytes that all ranks together have more than before, after each has read its part."""
    before = pss()
    comm.Barrier()
    part = call()
    for begin in range(0, len(part) if hasattr(part, "__len__") else 0, 1000):
        for example in part[begin : begin + 1000]:
            example.sum()
    comm.Barrier()
    after = pss()
    comm.Barrier()
    return float(sum(comm.allgather(after - before)))


def pss() -> int:
    """This process's share of the memory that it maps, in bytes."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(
        int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")
    )


def verdicts(took: dict[str, Any], memory: dict[str, float]) -> list[dict[str, Any]]:
    """What must hold, and whether it does.

    Args:
        took: seconds by case, of shape (rounds, 2).
        memory: what each adds, as a multiple of the array.
    """
    import numpy as np
    from limits import AT_MOST, judge

    ratios = took[OURS][:, 0] / took[COPY][:, 0]
    return [
        judge(f"{OURS}: time over that of {COPY}", AT_MOST, COPIES, ratios),
        *(
            judge(
                f"{name}: memory added over the array's",
                AT_MOST,
                MEMORY,
                np.array([times]),
            )
            for name, times in memory.items()
            if name in (OURS, SHUFFLED)
        ),
    ]


def run(args: argparse.Namespace) -> bool:
    """Measure, and print tables on rank 0 (collective over MPI.COMM_WORLD).

    Returns:
        Whether the limits hold, on rank 0; True elsewhere.
    """
    import numpy as np
    from in_turn import Timed, time_in_turn
    from mpi4py import MPI
    from report import limits_table
    from rich.console import Console
    from tables import make_table

    comm = MPI.COMM_WORLD.Dup()
    rows = max(1, int(args.megabytes * 1e6 / 4 / ROW_FLOATS))
    shape = rows, ROW_FLOATS
    whole = (
        np.random.default_rng(0).random(shape, np.float32) if comm.rank == 0 else None
    )
    nbytes = rows * ROW_FLOATS * 4
    calls = make_calls(comm, whole)
    memory = {name: grown(comm, call) / nbytes for name, call in calls.items()}
    cases = [
        Timed(call, gc.collect, name in (COPY, SHARED)) for name, call in calls.items()
    ]
    seconds = time_in_turn(comm, cases, args.repeat, in_a_row=2)
    if comm.rank:
        return True
    table = make_table(
        "",
        ("ms", "x copy", "at once again, ms", "x copy", "memory added, x size"),
        title=f"{nbytes / 1e6:.0f} MB over {comm.size} ranks, {args.repeat} rounds",
    )
    times = {name: seconds[:, i] for i, name in enumerate(calls)}
    for name in calls:
        cells = []
        for time_of, copy_of in zip(times[name].T, times[COPY].T, strict=True):
            low, middle, high = np.percentile(time_of, (25, 50, 75)) * 1e3
            ratio = np.median(time_of / copy_of)  # round by round: the machine changes
            cells += [f"{middle:.0f} ({low:.0f} - {high:.0f})", f"{ratio:.2f}"]
        table.add_row(name, *cells, f"{memory[name]:.2f}")
    verdict = verdicts(times, memory)
    Console().print(table)
    Console().print(limits_table(verdict))
    return all(row["ok"] for row in verdict)


def main() -> int:
    args = arguments()
    if args.first and jobs.is_rank():
        Path("/proc/self/autogroup").write_text("-20")
        os.nice(-20)
    return jobs.start_and_run(args, args.ranks, run)


if __name__ == "__main__":
    raise SystemExit(main())
