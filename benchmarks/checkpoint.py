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
from collections.abc import Callable
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
    from measure import priority

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

    def slowest(action: Callable[[], None]) -> float:
        comm.allgather_obj(None)
        with priority(realtime):
            begin = time.perf_counter()
            action()
            took = time.perf_counter() - begin
        return float(max(comm.allgather_obj(took)))

    first, seconds = 0.0, []
    for number in range(rounds + 1):
        at_once = slowest(lambda: blocking.save(target))
        held = slowest(lambda: background.save(target))
        while not (folder / f"background.{comm.rank}.{number + 1}.new").exists():
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)
        if number == 0:  # its copy goes into fresh memory
            first = held
        else:
            seconds.append((at_once, held))
    blocking.finalize()
    background.finalize()
    times = np.array(seconds)
    ratio = float(np.median(times[:, 1] / times[:, 0]))
    if comm.rank == 0:
        at_once, held = 1000 * np.median(times, axis=0)
        print(f"{megabytes} MB a rank, {comm.size} ranks, {rounds} rounds, medians")
        print(f"written at once          {at_once:8.1f} ms")
        print(f"in the background: held  {held:8.1f} ms (the first time {1000 * first:.1f} ms)")
        print(f"ratio                    {ratio:8.3f}, at most {LIMIT}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
