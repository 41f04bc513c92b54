"""What a checkpoint takes in time and on disk: by one rank, by all, and in the background.

    python benchmarks/checkpoint.py [--ranks 2] [--megabytes 100] [--rounds 7] [--folder
    FOLDER]
        [--realtime]

In each round the same state is saved by Chainer's `save_npz` and by a checkpointer of
one rank, both on rank 0 alone, and by checkpointers of all ranks, at once and in the
background, one after the other, into the same file system. What a save in the
background can't do later, a checksum of all and a copy of a rank's part, is its limit.
Exits 1 where a ratio (the median of the rounds') or the bytes on disk are more than
they may be. With --realtime (root only) it has the cores to itself while it saves,
where others share the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jobs

# Held in the background, of its limit; saved by several ranks, of one rank's time. Of
# one copy's bytes:
HELD, SEVERAL = 1.3, 0.7
BYTES = {1: 1.005, 2: 1.05}  # and 1.1 for more ranks
ARRAYS = 160  # as many as ResNet-50's parameters
POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; made and removed"
    )
    parser.add_argument(
        "--realtime", action="store_true", help="see allreduce.py; needs root"
    )
    options = parser.parse_args()
    if jobs.is_rank():
        return measure(
            options.megabytes, options.rounds, options.folder, options.realtime
        )
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
    generator, size = np.random.default_rng(0), megabytes * 10**6 // ARRAYS // 4
    # In memory of their own.
    arrays = [generator.random(size, np.float32) for _ in range(ARRAYS)]
    for number, array in enumerate(arrays):
        target.add_persistent(f"array{number}", array)
    nbytes, part = ARRAYS * array.nbytes, size // comm.size
    copies = [array[:part].copy() for array in arrays]
    make = create_multi_node_checkpointer
    alone = make("alone", comm.split(comm.rank, 0), 2, 1, folder)
    together = make("together", comm, 2, 1, folder)
    background = make("background", comm, 2, 1, folder, background=True)

    saves = 0  # in the background

    def save_in_background() -> None:
        nonlocal saves
        background.save(target)
        saves += 1

    def end_writing() -> None:
        for each in alone, together:
            each.flush()
        while saves and not (folder / f"background.{comm.rank}.{saves}").exists():
            time.sleep(POLL_SECONDS)
        os.sync()  # `save_npz` leaves that to others
        time.sleep(POLL_SECONDS)

    def save_npz() -> None:
        chainer.serializers.save_npz(folder / "chainer.npz", target, compression=False)

    def checksum_and_copy() -> None:
        for array, copy in zip(arrays, copies, strict=True):
            zlib.crc32(array.data)
            np.copyto(copy, array[:part])

    cases = [
        Timed(save_npz, end_writing, rank_0_only=True),
        Timed(lambda: alone.save(target), end_writing, rank_0_only=True),
        Timed(lambda: together.save(target), end_writing),
        Timed(save_in_background, end_writing),
        Timed(checksum_and_copy, end_writing),
    ]
    seconds = time_in_turn(comm.mpi_comm, cases, rounds + 1, realtime=realtime)[
        1:, :, 0
    ]
    last = f"together.*.{rounds + 1}"
    share = sum(path.stat().st_size for path in folder.glob(last)) / nbytes
    comm.allgather_obj(None)
    for each in together, background:
        each.finalize()
    if comm.rank == 0:
        alone.finalize()
    ratios = np.median(seconds / seconds[:, 1:2], axis=0)
    if comm.rank != 0:
        return 0
    most = BYTES.get(comm.size, 1.1)
    held = float(np.median(seconds[:, 3] / seconds[:, 4]))
    limits = [None, None, SEVERAL if comm.size > 1 else None, None, None]
    names = [
        "Chainer's save_npz",
        "one rank",
        "all ranks",
        "in the background: held",
        "its limit",
    ]
    rows = [
        (name, f"{1e3 * middle:.1f} ms", f"{ratio:.3f}", f"{limit or ''}")
        for name, middle, ratio, limit in zip(
            names, np.median(seconds, axis=0), ratios, limits, strict=True
        )
    ]
    of_chainers = float(np.median(seconds[:, 3] / seconds[:, 0]))
    rows.append(("held, of save_npz's time", "", f"{of_chainers:.3f}", ""))
    rows.append(("held, of its limit", "", f"{held:.3f}", f"{HELD}"))
    rows.append(("bytes on disk of one copy's", "", f"{share:.3f}", f"{most}"))
    title = f"{megabytes} MB, {comm.size} ranks, {rounds} rounds, medians"
    Console().print(make_table("", ("", "of one rank's", "at most"), rows, title))
    over = [
        limit is not None and ratio > limit
        for ratio, limit in zip(ratios, limits, strict=True)
    ]
    return int(any(over) or held > HELD or share > most)


if __name__ == "__main__":
    sys.exit(main())
