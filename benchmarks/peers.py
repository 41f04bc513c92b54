"""What is timed: memcpy, the handoff, raw MPI, bundled ChainerMN, and our communicators."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gradients import Gradients
from in_turn import Timed
from mpi4py import MPI

from chainermn_comm import RankMismatchError, create_communicator
from chainermn_comm.config import Settings
from chainermn_comm.gradients.bucket import bucket_of
from chainermn_comm.messaging import Handshake
from chainermn_comm.runtime import barrier
from chainermn_comm.topology import Topology

SLOT = 64 * 1024  # float32s in a slot: 256 KiB were the best of 64 to 512 KiB
ONE_RANK, ALL_RANKS = "memcpy, one rank", "memcpy, all ranks"
ONE_COUNTS, ALL_COUNT = "arithmetic, one rank", "arithmetic, all ranks"
HANDOFF, BUNDLED, GLOO = "handoff", "bundled naive", "PyTorch gloo"
RAW, HANDSHAKE, BARRIER = "MPI_Allreduce", "handshake alone", "barrier alone"
REPRODUCIBLE = "reproducible=True"  # by whatever name
LINK = "two ranks swap the bytes"  # of two hosts


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        name: as it is printed.
        kind: "probe", "copy", "mpi", "bundled", "ours", or "part" of what ours do.
        prepare: called before each call, not timed.
        call: what is timed, on every rank.
        right: whether the last call did what it should; collective.
        alone: only rank 0 calls it, while the other ranks sleep.
    """

    name: str
    kind: str
    prepare: Callable[[], object]
    call: Callable[[], object]
    right: Callable[[], bool]
    alone: bool = False

    @property
    def timed(self) -> Timed:
        return Timed(self.call, self.prepare, self.alone)


def probes() -> list[Case]:
    """Arithmetic in a core's own cache, which only ranks that share a core slow down."""
    numbers = np.ones(4096)  # 32 KiB

    def work() -> None:
        for _ in range(100):
            np.sqrt(numbers, out=numbers)

    def nothing() -> bool:
        return True

    return [
        Case(ONE_COUNTS, "probe", nothing, work, nothing, alone=True),
        Case(ALL_COUNT, "probe", nothing, work, nothing),
    ]


def copies(gradients: Gradients, handoff: Handoff) -> list[Case]:
    """The bytes moved and nothing else: memcpy and the handoff."""
    comm, flat, source, grads = (
        gradients.comm,
        gradients.flat,
        gradients.source,
        gradients.grads,
    )
    # Brings both into the cache, if they fit.
    spoil = partial(np.negative, source, flat)
    copy = partial(np.copyto, flat, source)
    chunks = cut(grads)

    def copied(on: range) -> bool:
        mine = comm.rank not in on or np.array_equal(flat, source)
        return bool(comm.allreduce(mine, MPI.LAND))

    def handed_off() -> bool:
        views = gradients.views(gradients.peer)
        return bool(comm.allreduce(all(map(np.array_equal, grads, views)), MPI.LAND))

    first, everyone = partial(copied, range(1)), partial(copied, range(comm.size))
    return [
        Case(ONE_RANK, "copy", spoil, copy, first, alone=True),
        Case(ALL_RANKS, "copy", spoil, copy, everyone),
        Case(HANDOFF, "copy", gradients.restore, partial(handoff, chunks), handed_off),
    ]


def raw_mpi(gradients: Gradients) -> Case:
    """The sum of one flat buffer, in place, by MPI alone."""
    comm, flat = gradients.comm, gradients.flat
    return Case(
        RAW,
        "mpi",
        partial(np.copyto, flat, gradients.source),
        partial(comm.Allreduce, MPI.IN_PLACE, flat),
        lambda: gradients.is_mean(gradients.views(flat / np.float32(comm.size))),
    )


def gloo(gradients: Gradients) -> list[Case]:
    """PyTorch's allreduce of one flat buffer on CPUs; nothing where PyTorch is not installed."""
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
        from torch import distributed
    except ImportError:
        return []
    comm, flat = gradients.comm, gradients.flat
    start_gloo(comm)
    return [
        Case(
            GLOO,
            "mpi",
            partial(np.copyto, flat, gradients.source),
            partial(distributed.all_reduce, torch.from_numpy(flat)),
            lambda: gradients.is_mean(gradients.views(flat / np.float32(comm.size))),
        )
    ]


def start_gloo(comm: MPI.Intracomm) -> None:
    """Connect PyTorch's processes, once (collective)."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    torch.set_num_threads(1)
    one_node = Topology.discover(comm).inter_size == 1
    free = None
    if comm.rank == 0:
        with socket.create_server(("", 0)) as listening:
            free = listening.getsockname()[1]
    port, host = comm.bcast((free, MPI.Get_processor_name()))
    where = f"tcp://{'127.0.0.1' if one_node else host}:{port}"
    distributed.init_process_group(
        "gloo", init_method=where, rank=comm.rank, world_size=comm.size
    )


def barrier_alone(gradients: Gradients) -> Case:
    """What the handshake also serves as, in a call whose gradients are packed by then."""
    comm = gradients.comm
    return Case(
        BARRIER, "part", gradients.restore, partial(barrier, comm), lambda: True
    )


def handshake_alone(gradients: Gradients) -> Case:
    """All that ranks tell each other of a call of `allreduce_grad` before gradients move."""
    comm, handshake, settings = gradients.comm, Handshake(gradients.comm), Settings()

    def call() -> None:
        own = bucket_of(gradients.model, comm.rank, False, settings)
        handshake("allreduce_grad", payload=own.description.digest)

    def tells_a_difference() -> bool:
        try:
            handshake("allreduce_grad", (("rank", comm.rank),))
        except RankMismatchError:
            return True
        return comm.size == 1

    return Case(
        HANDSHAKE,
        "part",
        gradients.restore,
        call,
        lambda: comm.allreduce(tells_a_difference(), MPI.LAND),
    )


def communicator(name: str, kind: str, communicator: Any, gradients: Gradients) -> Case:
    """The mean by a ChainerMN communicator; as a "part", by `dummy`, which takes none."""
    wanted = gradients.are_own if kind == "part" else gradients.is_mean
    return Case(
        name,
        kind,
        gradients.restore,
        partial(communicator.allreduce_grad, gradients.model),
        lambda: wanted([param.grad for param in gradients.params]),
    )


def ours(name: str, comm: MPI.Intracomm) -> Any:
    """One of our communicators (collective)."""
    if name == REPRODUCIBLE:
        return create_communicator(mpi_comm=comm, reproducible=True)
    return create_communicator(name, comm)


def bundled(comm: MPI.Intracomm, name: str = "naive", **settings: Any) -> Any:
    """A communicator of the ChainerMN that Chainer 7 bundles.

    Raises:
        RuntimeError: `import chainermn` gives ours all the same.
    """
    os.environ["CHAINERMN_USE_BUNDLED"] = "1"
    import chainermn

    if "facade" in str(chainermn.__file__):
        raise RuntimeError(
            f"`import chainermn` gave {chainermn.__file__} and not Chainer's own: "
            "set CHAINERMN_USE_BUNDLED=1 before Python starts"
        )
    return chainermn.create_communicator(name, mpi_comm=comm, **settings)


class Handoff:
    """Packs gradients into slots of a shared window and copies the next rank's out.

    Two alternating slots, which go on from call to call: a rank writes a slot only
    after a barrier that the slot's reader entered after reading it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.turn = 0
        self.window = MPI.Win.Allocate_shared(2 * 4 * SLOT, 4, comm=comm)
        self.mine = self._slots(comm.rank)
        self.theirs = self._slots((comm.rank + 1) % comm.size)
        self.window.Lock_all()

    def _slots(self, rank: int) -> np.ndarray:
        memory, _ = self.window.Shared_query(rank)
        return np.asarray(memory).view(np.float32).reshape(2, SLOT)

    def __call__(self, chunks: list[list[np.ndarray]]) -> None:
        """Replace the arrays by the next rank's (collective).

        Args:
            chunks: what :func:`cut` gives; the same sizes on all ranks.
        """
        for pieces in chunks:
            self.turn = 1 - self.turn
            filled = sum(piece.size for piece in pieces)
            np.concatenate(pieces, out=self.mine[self.turn, :filled])
            self.window.Sync()
            self.comm.Barrier()
            self.window.Sync()
            slot, start = self.theirs[self.turn], 0
            for piece in pieces:
                piece[:] = slot[start : start + piece.size]
                start += piece.size

    def close(self) -> None:
        """Free the window (collective)."""
        del self.mine, self.theirs
        self.window.Unlock_all()
        self.window.Free()


def cut(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Cut contiguous arrays into 1-D views, grouped so that each group fills one slot."""
    chunks: list[list[np.ndarray]] = [[]]
    room = SLOT
    for array in arrays:
        rest = array.reshape(-1)
        while rest.size:
            if not room:
                chunks.append([])
                room = SLOT
            piece, rest = rest[:room], rest[room:]
            chunks[-1].append(piece)
            room -= piece.size
    return chunks
