"""An exception at some bytecode of a collective call, as a signal's handler raises it: for jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.testing import assert_equal

from chainermn_comm import CommunicationError, PeerError, create_communicator
from chainermn_comm.messaging import collectives
from tests.support.worlds.models import Model, Param

OURS = "/chainermn_comm/"
LARGE = collectives.SMALL_BYTES // 8 + 1  # numbers that travel by themselves
MEAN_NAMES = ("flat", "hierarchical")
# What a handler may raise: an error of the system, or of another communicator.
PLANTED = (InterruptedError, PeerError)
# Calls before the first that is interrupted: later ones find more in caches.
UNTOUCHED = 3
# All ranks make these calls after each interruption.
IN_STEP = ("allreduce_grad", "allreduce", "gather_obj")

Make = Callable[[], Any]


class Bytecodes:
    """Counts the bytecodes of our code within, and raises at one of them."""

    def __init__(self, at: int = 0):
        self._at = at
        self.count = 0

    def __enter__(self) -> Bytecodes:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument):
        if OURS not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, argument):
        if event == "opcode":
            self.count += 1
            if self.count == self._at:  # Python then traces no more
                raise PLANTED[self._at % 2]("planted")
        return self._step


class CountedComm(MPI.Intracomm):
    """MPI's communicator that counts the handshakes on it, and on its duplicates."""

    handshakes = 0

    def Allgather(self, *arguments):
        CountedComm.handshakes += 1
        super().Allgather(*arguments)


def new(name: str):
    return create_communicator(name, CountedComm(MPI.COMM_WORLD))


def numbers(rank: int) -> np.ndarray:
    return np.full(LARGE, rank + 1.0)


def mean(comm, is_missing: bool = False) -> list[Any]:
    """Means of gradients, one of which may be missing on rank 0."""
    params = [Param(numbers(comm.rank), numbers(comm.rank)) for _ in "vw"]
    if is_missing and comm.rank == 0:
        params[1].grad = None
    comm.multi_node_mean_grad(Model(v=params[0], w=params[1]), zero_fill=is_missing)
    return [param.grad for param in params]


def broadcast(comm) -> list[Any]:
    own = numbers(comm.rank)
    params = [Param(own), Param(own.astype("f4"))]
    comm.bcast_data(Model(v=params[0], w=params[1]))
    return [param.data for param in params]


def calls(comm) -> dict[str, Make]:
    """What is called, by name; each result is the same every time."""
    rank = comm.rank
    root = comm.size - 1
    own = numbers(rank)
    ranks = list(range(comm.size))
    rows = [numbers(it) for it in ranks]
    return {
        "allreduce": lambda: comm.allreduce(own),
        "multi_node_mean": lambda: comm.multi_node_mean(own),
        "reduce_scatter": lambda: comm.reduce_scatter(rows),
        "bcast": lambda: comm.bcast(own, root=root),
        "gather": lambda: comm.gather(own, root),
        "scatter": lambda: comm.scatter(rows, root),
        "alltoall": lambda: comm.alltoall(rows),
        "allgather": lambda: comm.allgather(own),
        "bcast_obj": lambda: comm.bcast_obj([rank], root=root),
        "gather_obj": lambda: comm.gather_obj(rank, root),
        "scatter_obj": lambda: comm.scatter_obj(ranks, root),
        "alltoall_obj": lambda: comm.alltoall_obj(ranks),
        "allgather_obj": lambda: comm.allgather_obj(rank),
        "allreduce_obj": lambda: comm.allreduce_obj(rank),
        "bcast_data": lambda: broadcast(comm),
        "handshake": lambda: comm.handshake("save", payload=bytes([rank]) * 99),
        "allreduce_grad": lambda: mean(comm),
        "allreduce_grad zeros": lambda: mean(comm, is_missing=True),
        # Of new communicators, only that they are there.
        "split": lambda: comm.split(0, 0).size,
        "create_communicator": lambda: new("naive").size,
        "finalize": lambda: comm.finalize(),
    }


# The communicator of one rank has what `calls` asks for; the last is of a new one.
NAMES = (*calls(MPI.COMM_SELF), "allreduce_grad first")


def prepare(name: str, comm) -> tuple[Any, Make]:
    """Return the next call of that name, of `comm` or of a new communicator (collective)."""
    if name in ("finalize", "allreduce_grad first"):
        comm = new(comm.communicator_name)
        if name == "finalize":
            mean(comm)
    return comm, calls(comm)[name.removesuffix(" first")]


def run(base: str, name: str, odd: int, path: Path, places: list[float]):
    """Interrupt rank `odd` at each of those places of a call, from 0 to 1.

    `path` gets the number of the last. Before the next one, all ranks have raised or
    made the call, and make others.
    """
    world = MPI.COMM_WORLD.Dup()
    is_odd = world.rank == odd
    comm = new(base)
    expected = {key: calls(comm)[key]() for key in IN_STEP}
    for _ in range(UNTOUCHED):
        _, make = prepare(name, comm)
        with Bytecodes() as bytecodes:
            wanted = make()
    for number, place in enumerate(places):
        _, make = prepare(name, comm)
        begun = CountedComm.handshakes
        at = 1 + int(place * bytecodes.count)
        raise_at = 0
        if is_odd:
            raise_at = at
        world.Barrier()
        error: BaseException | None = None
        try:
            if is_odd:
                path.write_text(f"{number} {at} of {bytecodes.count}")
            with Bytecodes(raise_at):
                result = make()
        except (InterruptedError, CommunicationError) as raised:
            error = raised
        is_waited_for = CountedComm.handshakes == begun
        if is_odd and error is not None and is_waited_for:
            error = None
            result = make()
        if error is None:
            assert_equal(result, wanted)
        errors = world.allgather(type(error))
        others = errors[:odd] + errors[odd + 1 :]
        assert len(set(others)) == 1, errors
        handshakes = world.allgather(CountedComm.handshakes)
        assert len(set(handshakes)) == 1, handshakes
        for key, found in expected.items():
            assert_equal(calls(comm)[key](), found)
    print("DONE", flush=True)
