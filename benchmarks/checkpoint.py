"""What a checkpoint takes in time and on disk: by one rank, by all, and in the background.

    python benchmarks/checkpoint.py [--ranks 2] [--megabytes 100] [--rounds 7]
        [--folder FOLDER]

In each round the same state is saved by Chainer's `save_npz` and by a checkpointer of
one rank, both on rank 0 alone, and by checkpointers of all ranks, at once and in the
background, one after the other, into the same file system. What a save in the
background can't do later, a checksum of all and a copy of a rank's part, is its limit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import runner
from mpi4py import MPI
from report import Limit, Ratio, are_right, judge, save, show, show_verdicts
from runner import Case, measure

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_checkpointer

NPZ = "Chainer's save_npz"
ONE = "one rank"
ALL = "all ranks"
HELD = "in the background: held"
LIMIT = "its limit: checksum and copy"
COLUMNS = (Ratio(f"x {ONE}", ONE), Ratio("x save_npz", NPZ), Ratio("x limit", LIMIT))
OF_ITS_LIMIT = Limit(HELD, LIMIT, 1.3)
OF_ONE_RANK = Limit(ALL, ONE, 0.7)
MOST_BYTES = 1.05  # on disk, of one copy's, of two ranks
ARRAYS = 160  # as many as ResNet-50's parameters
POLL_SECONDS = 0.02


def arguments() -> argparse.Namespace:
    parser = runner.parser(__doc__, rounds=7)
    add = parser.add_argument
    add("--megabytes", type=int, default=100, help="of the state (100)")
    add("--folder", type=Path, default=Path(), help="on the disk to measure (this one)")
    return parser.parse_args()


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure in a folder that is removed then (collective)."""
    name = ""
    if comm.rank == 0:
        name = tempfile.mkdtemp(dir=args.folder)
    folder = Path(comm.bcast(name))
    right = measure_in(folder, args, comm)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
    return right


def measure_in(folder: Path, args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure and report (collective)."""
    communicator = create_communicator("naive", comm)
    target = chainer.Link()
    size = args.megabytes * 10**6 // ARRAYS // 4
    random = np.random.default_rng(0)
    arrays = [random.random(size, np.float32) for _ in range(ARRAYS)]
    copies = [array[: size // comm.size].copy() for array in arrays]
    for number, array in enumerate(arrays):
        target.add_persistent(f"array{number}", array)

    def checkpointer(name: str, among: Any, background: bool = False) -> Any:
        return create_multi_node_checkpointer(
            name, among, 2, 1, folder, background=background
        )

    alone = checkpointer("alone", communicator.split(comm.rank, 0))
    together = checkpointer("together", communicator)
    background = checkpointer("background", communicator, background=True)
    saved = 0  # in the background

    def save_in_background() -> None:
        nonlocal saved
        background.save(target)
        saved += 1

    def end_writing() -> None:
        alone.flush()
        together.flush()
        while saved and not (folder / f"background.{comm.rank}.{saved}").exists():
            time.sleep(POLL_SECONDS)
        os.sync()  # `save_npz` leaves that to others
        time.sleep(POLL_SECONDS)

    def save_npz() -> None:
        chainer.serializers.save_npz(folder / "chainer.npz", target, compression=False)

    def checksum_and_copy() -> None:
        for array, copy in zip(arrays, copies, strict=True):
            zlib.crc32(array.data)
            np.copyto(copy, array[: copy.size])

    cases = [
        Case(NPZ, save_npz, end_writing, rank_0_only=True),
        Case(ONE, lambda: alone.save(target), end_writing, rank_0_only=True),
        Case(ALL, lambda: together.save(target), end_writing, kind="ours"),
        Case(HELD, save_in_background, end_writing, kind="ours"),
        Case(LIMIT, checksum_and_copy, end_writing),
    ]
    rows = measure(comm, cases, args.rounds, warm_up=1, in_a_row=1)
    end_writing()
    comm.Barrier()
    if comm.rank == 0:
        limits = [OF_ITS_LIMIT]
        if comm.size > 1:
            limits.append(OF_ONE_RANK)
        show(f"{args.megabytes} MB, {comm.size} ranks", rows, COLUMNS, limits)
        last = max(int(path.suffix[1:]) for path in folder.glob("together.0.*"))
        files = [path.stat().st_size for path in folder.glob(f"together.*.{last}")]
        share = sum(files) / (ARRAYS * arrays[0].nbytes)
        show_verdicts([judge("bytes on disk of one copy's", share, MOST_BYTES)])
        save(rows, args.json)
        alone.finalize()
    together.finalize()
    background.finalize()
    return are_right(rows)


if __name__ == "__main__":
    sys.exit(runner.main(arguments(), run))
