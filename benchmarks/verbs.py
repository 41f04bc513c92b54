"""Times what users call on arrays beside MPI's own call into a fresh array, all in one run.

    python benchmarks/verbs.py              starts two ranks by itself, and then four
    mpiexec -n 3 python benchmarks/verbs.py

Cases take turns, in another order each round; ratios are taken round by round before
their median. Exits 1 where a ratio is larger than it may be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

RAW, OURS = "MPI's own", "ours"
# What ours over MPI's own may be of arrays of 64 MB, on the numbers of ranks that this
# starts.
MOST = {"allreduce": 0.7, "bcast": 1.0, "allgather": 1.0, "reduce_scatter": 1.0}


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="to start (2 4)"
    )
    parser.add_argument(
        "--megabytes", type=float, default=64, help="of each array (64)"
    )
    parser.add_argument("--repeat", type=int, default=15, help="rounds (15)")
    parser.add_argument("--communicator", default="hierarchical", metavar="NAME")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the ratios"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for each number"
    )
    return parser.parse_args()


def make_calls(
    world: Any, comm: Any, nbytes: float
) -> dict[tuple[str, str], Callable[[], Any]]:
    """What is timed, by the verb and whose it is; each returns its result."""
    import numpy as np

    size, rank = world.size, world.rank
    each = max(1, int(nbytes / 4 / size))
    mine = np.full(each * size, rank + 1.0, "f4")
    parts = list(mine.reshape(size, -1))

    def into_fresh(call: Callable[..., Any], elements: int) -> np.ndarray:
        out = np.empty(elements, "f4")
        call(mine, out)
        return out

    def bcast() -> np.ndarray:
        out = mine if rank == 0 else np.empty_like(mine)
        world.Bcast(out)
        return out

    return {
        ("allreduce", RAW): lambda: into_fresh(world.Allreduce, mine.size),
        ("allreduce", OURS): lambda: comm.allreduce(mine),
        ("bcast", RAW): bcast,
        ("bcast", OURS): lambda: comm.bcast(mine),
        ("allgather", RAW): lambda: into_fresh(world.Allgather, mine.size * size),
        ("allgather", OURS): lambda: comm.allgather(mine),
        ("reduce_scatter", RAW): lambda: into_fresh(world.Reduce_scatter_block, each),
        ("reduce_scatter", OURS): lambda: comm.reduce_scatter(parts),
    }


def run(args: argparse.Namespace) -> bool:
    import numpy as np
    from in_turn import Timed, time_in_turn
    from mpi4py import MPI
    from rich.console import Console
    from tables import make_table

    from chainermn_comm import create_communicator

    world = MPI.COMM_WORLD
    with create_communicator(args.communicator, world) as comm:
        calls = make_calls(world, comm, args.megabytes * 1e6)
        cases = [Timed(call) for call in calls.values()]
        # Means are measured first to choose their way.
        seconds = time_in_turn(world, cases, args.repeat, warm_up=14)[:, :, 0]
    took = dict(zip(calls, seconds.T, strict=True))
    ratios = {
        verb: float(np.median(took[verb, OURS] / took[verb, RAW]))
        for verb, _ in list(calls)[::2]
    }
    if world.rank == 0:
        head = f"{world.size} ranks, {args.megabytes:g} MB, {args.communicator}"
        rows = [
            (
                verb,
                f"{np.median(took[verb, RAW]) * 1e3:.1f} ms",
                f"{np.median(took[verb, OURS]) * 1e3:.1f} ms",
                f"{ratio:.2f}",
                f"{MOST[verb]:g}",
            )
            for verb, ratio in ratios.items()
        ]
        Console().print(make_table("", (RAW, OURS, "ratio", "at most"), rows, head))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(
                json.dumps({"ranks": world.size, "ratios": ratios}, indent=1)
            )
    return all(ratio <= MOST[verb] for verb, ratio in ratios.items())


def main() -> int:
    args = arguments()
    if jobs.is_rank():
        return jobs.run_as_rank(args, run)
    return max([jobs.start(ranks, [], args.timeout) for ranks in args.ranks])


if __name__ == "__main__":
    raise SystemExit(main())
