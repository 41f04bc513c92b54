"""What the mean of a model's gradients is compared with, and our communicators beside it."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import chainer
import numpy as np
from mpi4py import MPI
from runner import Case

from chainermn_comm import create_communicator
from chainermn_comm.config import Settings
from chainermn_comm.gradients.bucket import bucket_of
from chainermn_comm.messaging import Handshake
from chainermn_comm.topology import Topology

ONE_RANK = "memcpy, one rank"
ALL_RANKS = "memcpy, all ranks"
HANDOFF = "handoff"
RAW = "MPI_Allreduce"
GLOO = "PyTorch gloo"
BUNDLED = "bundled naive"
HANDSHAKE = "handshake alone"
LINK = "two ranks swap the bytes"  # of two hosts
REPRODUCIBLE = "reproducible=True"  # of any name

ROUNDING = 2.0**-24  # relative error of one float32 operation
LARGEST = 7.0  # of so many numbers from a normal distribution
COARSER = 2.0**13  # float16 rounds so many times as coarsely
SLOT = 64 * 1024  # float32s of the handoff: 256 KiB were the best of 64 to 512 KiB
PIECE = 1 << 18  # float32s of a message of the link
PIECES = 4  # messages under way each way

Shapes = dict[str, tuple[int, ...]]


def resnet50() -> Shapes:
    """Return ResNet-50's 161 arrays: 53 convolutions, as many batch normalizations, fc."""
    shapes: Shapes = {}
    for path, param in chainer.links.ResNet50Layers(None).namedparams():
        if path != "/conv1/b":  # which batch normalization makes useless
            shapes[path.replace("/", "_")] = param.shape
    assert elements(shapes) == 25_557_032
    return shapes


def perceptron(*units: int) -> Shapes:
    """Return the arrays of layers with these numbers of units, from input to output."""
    shapes: Shapes = {}
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(units), start=1):
        shapes[f"l{layer}_W"] = (n_out, n_in)
        shapes[f"l{layer}_b"] = (n_out,)
    return shapes


def elements(shapes: Shapes) -> int:
    """Return how many numbers the arrays hold."""
    return sum(map(prod, shapes.values()))


RESNET = "ResNet-50"
DIGITS = "digits MLP 64-100-100-10"
TINY = "1,000 arrays of 100"
MODELS: dict[str, Shapes] = {
    RESNET: resnet50(),
    "MLP 784-1000-1000-10": perceptron(784, 1000, 1000, 10),
    TINY: {f"tiny{i:03}": (100,) for i in range(1000)},
    DIGITS: perceptron(64, 100, 100, 10),
}


class Gradients:
    """Random gradients of a model, different on each rank.

    Attributes:
        source: what this rank's gradients start from; 1-D float32, all arrays on end.
        flat: scratch of the same size.
        mean: the mean over ranks; likewise.
        tolerance: how far rounding may take any number of it.
        model: a `chainer.Link` with the parameters.
        params: these.
        grads: their gradients, in memory of their own, as Chainer's are.
    """

    def __init__(self, shapes: Shapes, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._size = elements(shapes)
        self.source = self.source_of(comm.rank)
        self.flat = (
            self.source.copy()
        )  # touched, so that nobody's first call pays for it
        self.mean = np.zeros_like(self.source)
        for rank in range(comm.size):
            self.mean += self.source_of(rank)
        self.mean /= comm.size
        # Of a case and of the mean above, each term is added and the sum divided.
        self.tolerance = 2 * (comm.size + 3) * ROUNDING * LARGEST
        self.model = chainer.Link()
        with self.model.init_scope():
            for name, shape in shapes.items():
                zeros = np.zeros(shape, np.float32)
                setattr(self.model, name, chainer.Parameter(zeros))
        self.params = [getattr(self.model, name) for name in shapes]
        self.grads = [np.ones(shape, np.float32) for shape in shapes.values()]

    def source_of(self, rank: int) -> np.ndarray:
        """Return what a rank's gradients start from."""
        return np.random.default_rng(rank).standard_normal(self._size, np.float32)

    def restore(self) -> None:
        """Fill the gradients anew, as a backward would."""
        start = 0
        for param, grad in zip(self.params, self.grads, strict=True):
            piece = self.source[start : start + grad.size]
            np.copyto(grad, piece.reshape(grad.shape))
            param.grad = grad  # a communicator may have put another array there
            start += grad.size

    def on_end(self) -> np.ndarray:
        """Return the gradients as one array."""
        return np.concatenate([param.grad.ravel() for param in self.params])

    def is_mean(self, flat: np.ndarray, coarser: float = 1) -> bool:
        """Return whether this is the mean, bit-identical on all ranks (collective)."""
        near = np.allclose(flat, self.mean, rtol=0, atol=coarser * self.tolerance)
        digests = self.comm.allgather(hashlib.sha1(flat.data).digest())
        return near and digests.count(digests[0]) == len(digests)


def copies(gradients: Gradients) -> list[Case]:
    """The bytes moved by one rank and by all, and nothing else."""
    source = gradients.source
    flat = gradients.flat
    spoil = partial(
        np.negative, source, flat
    )  # brings both into the cache, if they fit
    copy = partial(np.copyto, flat, source)
    is_copied = partial(np.array_equal, flat, source)
    return [
        Case(ONE_RANK, copy, spoil, is_copied, rank_0_only=True),
        Case(ALL_RANKS, copy, spoil, is_copied),
    ]


def raw_mpi(gradients: Gradients) -> Case:
    """The sum of one flat buffer, in place, by MPI alone."""
    reduce = partial(gradients.comm.Allreduce, MPI.IN_PLACE, gradients.flat)
    return _flat_sum(RAW, reduce, gradients)


def gloo(gradients: Gradients) -> list[Case]:
    """PyTorch's allreduce of one flat buffer on CPUs; nothing where PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch  # type: ignore[import-not-found,unused-ignore]
    from torch import distributed

    start_gloo(gradients.comm)
    reduce = partial(distributed.all_reduce, torch.from_numpy(gradients.flat))
    return [_flat_sum(GLOO, reduce, gradients)]


def start_gloo(comm: MPI.Intracomm) -> None:
    """Connect PyTorch's processes, once (collective)."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    torch.set_num_threads(1)
    host = MPI.Get_processor_name()
    if Topology.discover(comm).inter_size == 1:
        host = "127.0.0.1"
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
    host, port = comm.bcast((host, port))
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=comm.rank,
        world_size=comm.size,
    )


def _flat_sum(name: str, reduce: Any, gradients: Gradients) -> Case:
    flat = gradients.flat

    def is_sum() -> bool:
        return gradients.is_mean(flat / np.float32(gradients.comm.size))

    restore = partial(np.copyto, flat, gradients.source)
    return Case(name, reduce, restore, is_sum, kind="mpi")


def link(gradients: Gradients) -> Case:
    """The first ranks of two hosts swap a model's bytes: what any mean has to move."""
    comm = gradients.comm
    nodes = Topology.discover(comm).nodes
    leaders = [nodes.index(0), nodes.index(1)]
    flat = gradients.flat
    if comm.rank not in leaders:
        return Case(LINK, lambda: None, kind="copy")

    (peer,) = {*leaders} - {comm.rank}
    expected = gradients.source_of(peer)

    def swap() -> None:
        # In pieces, several under way: of one message, MPICH may send the two ways in
        # turn.
        requests: list[MPI.Request] = []
        for start in range(0, flat.size, PIECE):
            if len(requests) >= 2 * PIECES:
                MPI.Request.Waitall(requests[:2])
                del requests[:2]
            piece = slice(start, start + PIECE)
            requests.append(comm.Irecv(flat[piece], peer))
            requests.append(comm.Isend(gradients.source[piece], peer))
        MPI.Request.Waitall(requests)

    def is_swapped() -> bool:
        return np.array_equal(flat, expected)

    return Case(LINK, swap, partial(flat.fill, 0), is_swapped, kind="copy")


def handshake_alone(gradients: Gradients) -> Case:
    """All that ranks tell each other of a mean before gradients move."""
    comm = gradients.comm
    handshake = Handshake(comm)
    settings = Settings()

    def call() -> None:
        own = bucket_of(gradients.model, comm.rank, False, settings)
        handshake("allreduce_grad", payload=own.description.digest)

    return Case(HANDSHAKE, call, gradients.restore)


def mean(
    name: str, communicator: Any, gradients: Gradients, kind: str = "ours"
) -> Case:
    """The mean by a ChainerMN communicator."""
    coarser = 1.0
    if name.endswith("float16"):
        coarser = COARSER
    call = partial(communicator.allreduce_grad, gradients.model)

    def is_mean() -> bool:
        return gradients.is_mean(gradients.on_end(), coarser)

    return Case(name, call, gradients.restore, is_mean, kind=kind)


def ours(name: str, comm: MPI.Intracomm) -> Any:
    """Return one of our communicators (collective); "NAME, float16" has that on the wire."""
    if name == REPRODUCIBLE:
        return create_communicator(mpi_comm=comm, reproducible=True)
    name, _, wire = name.partition(", ")
    return create_communicator(name, comm, wire or None)


def bundled(comm: MPI.Intracomm, name: str = "naive", **settings: Any) -> Any:
    """Return a communicator of the ChainerMN that Chainer 7 bundles (collective)."""
    os.environ["CHAINERMN_USE_BUNDLED"] = "1"
    import chainermn

    assert "facade" not in str(chainermn.__file__), "it was imported before"
    return chainermn.create_communicator(name, mpi_comm=comm, **settings)


class Handoff:
    """Copies gradients into slots of a shared window and the next rank's out of them.

    Two alternating slots, which go on from call to call: a rank writes a slot only
    after a barrier that the slot's reader entered after reading it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._turn = 0
        self._window = MPI.Win.Allocate_shared(2 * 4 * SLOT, 4, comm=comm)
        self._next = (comm.rank + 1) % comm.size
        self._mine = self._slots(comm.rank)
        self._theirs = self._slots(self._next)
        self._window.Lock_all()

    def _slots(self, rank: int) -> np.ndarray:
        memory, _ = self._window.Shared_query(rank)
        return np.asarray(memory).view(np.float32).reshape(2, SLOT)

    def case(self, gradients: Gradients) -> Case:
        """Replace a model's gradients by the next rank's."""
        swap = partial(self.swap, [*cut(gradients.grads)])

        def is_swapped() -> bool:
            return np.array_equal(gradients.on_end(), gradients.source_of(self._next))

        return Case(HANDOFF, swap, gradients.restore, is_swapped)

    def swap(self, chunks: Iterable[list[np.ndarray]]) -> None:
        """Replace arrays, as `cut` gives them, by the next rank's (collective)."""
        for pieces in chunks:
            self._turn = 1 - self._turn
            filled = sum(piece.size for piece in pieces)
            np.concatenate(pieces, out=self._mine[self._turn, :filled])
            self._window.Sync()
            self._comm.Barrier()
            self._window.Sync()
            theirs = self._theirs[self._turn]
            start = 0
            for piece in pieces:
                piece[:] = theirs[start : start + piece.size]
                start += piece.size

    def close(self) -> None:
        """Free the window (collective)."""
        del self._mine, self._theirs
        self._window.Unlock_all()
        self._window.Free()


def cut(arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield 1-D views of contiguous arrays in groups, each of which fits one slot."""
    pieces: list[np.ndarray] = []
    room = SLOT
    for array in arrays:
        rest = array.reshape(-1)
        while rest.size >= room:
            yield [*pieces, rest[:room]]
            rest = rest[room:]
            pieces = []
            room = SLOT
        pieces.append(rest)
        room -= rest.size
    if pieces:
        yield pieces
