"""How long a checkpoint holds training: written at once, and in the background.

    python benchmarks/checkpoint.py [--ranks 1] [--megabytes 200] [--rounds 7] [--folder FOLDER]
        [--realtime]

In each round a rank's state is saved both ways, one after the other, into the same file system.
A save in the background also commits the one before, whose writing has ended by then, as it has
in training. Exits 1 if it holds training for more than a tenth of the other (median of the
rounds' ratios). With --realtime (root only) it has the cores to itself while it saves, where
others share the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import jobs

LIMIT = 0.1
ARRAYS = 160  # as many as ResNet-50's parameters
POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; made and removed")
    parser.add_argument("--realtime", action="store_true", help="see allreduce.py; needs root")
    options = parser.parse_args()
    if jobs.is_rank():
        return measure(options.megabytes, options.rounds, options.folder, options.realtime)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return jobs.start(options.ranks, [f"--folder={folder}"], TIMEOUT_SECONDS)


def measure(megabytes: int, rounds: int, folder: Path, realtime: bool) -> int:
    """What every rank does; the slowest rank counts."""
    import chainer
    import numpy as np
    from in_turn import Timed, time_in_turn
    from rich.console import Console
    from tables import make_table

    from chainermn_comm import create_communicator
    from chainermn_train import create_multi_node_checkpointer

    comm = create_communicator("naive")
    target = chainer.Link()
    for number in range(ARRAYS):
        array = np.random.default_rng(number).random(megabytes * 10**6 // ARRAYS // 4, np.float32)
        target.add_persistent(f"array{number}", array)
    make = create_multi_node_checkpointer
    blocking = make("blocking", comm, 2, 1, folder)
    background = make("background", comm, 2, 1, folder, background=True)

    saves = 0  # in the background

    def save_in_background() -> None:
        nonlocal saves
        background.save(target)
        saves += 1

    def end_writing() -> None:
        while saves and not (folder / f"background.{comm.rank}.{saves}.new").exists():
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)

    cases = [
        Timed(lambda: blocking.save(target), end_writing),
        Timed(save_in_background, end_writing),
    ]
    seconds = time_in_turn(comm.mpi_comm, cases, rounds + 1, realtime=realtime)[:, :, 0]
    blocking.finalize()
    background.finalize()
    first, times = seconds[0, 1], seconds[1:]  # the first copy goes into fresh memory
    ratio = float(np.median(times[:, 1] / times[:, 0]))
    if comm.rank == 0:
        at_once, held = (
            f"{milliseconds:.1f} ms" for milliseconds in 1e3 * np.median(times, axis=0)
        )
        rows = [
            ("written at once", at_once, ""),
            ("in the background: held", held, f"the first time {1000 * first:.1f} ms"),
            ("ratio", f"{ratio:.3f}", f"at most {LIMIT}"),
        ]
        title = f"{megabytes} MB a rank, {comm.size} ranks, {rounds} rounds, medians"
        Console().print(make_table("", ("", ""), rows, title))
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
