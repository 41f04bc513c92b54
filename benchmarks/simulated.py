"""Runs the communicators' own algorithms with a clock in place of wires and of arithmetic.

One rank is simulated, and of all others it is taken that they do at each moment what it
does: of an exchange in which it sends to the d-th rank after it, it receives from the
d-th rank before it as much, as soon as what it sends arrives. This is so since every
rank's schedule is the same, but for the ranks in it and for sizes that differ by an
element.

Each node has a link, which sends one message after the other and receives at the same
time; its leaders share it. Each message takes its latency, and time of the processor
where it is sent and where it is received; arithmetic and copies take the time of their
bytes. A node's ranks have a core each, and a barrier of theirs takes some time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np

from chainermn_comm.communicators import COMMUNICATORS
from chainermn_comm.config import Settings
from chainermn_comm.layout import Chunk
from chainermn_comm.messaging import ProcessGroup
from chainermn_comm.sums import (
    Operand,
    circulant,
    pairwise,
    shared_memory,
    two_level,
)
from chainermn_comm.topology import Topology


@dataclass(frozen=True)
class Constants:
    """What things cost.

    Attributes:
        latency: seconds from when a message has been sent to when it has arrived.
        bandwidth: bytes a second that a node can send, and receive at the same time.
        message: seconds of the processor for a message, at either end.
        memory: bytes a second that arithmetic and copies read and write.
        barrier: seconds of a barrier of a node's ranks.
    """

    latency: float
    bandwidth: float
    message: float
    memory: float
    barrier: float


# A network of 25 Gbit/s and 20 us, and processors like those that `scaling_hosts.py`
# measured.
LINK_25G = Constants(20e-6, 25e9 / 8, message=6e-6, memory=20e9, barrier=10e-6)


@dataclass
class Counts:
    """What a rank did until now.

    Attributes:
        seconds: its clock.
        messages, sent: to other nodes, and their bytes.
        received: likewise.
        touched: bytes that arithmetic and copies read and wrote.
    """

    seconds: float = 0.0
    messages: int = 0
    sent: int = 0
    received: int = 0
    touched: int = 0


class Machine:
    """A rank's clock, and its part of its node's link."""

    def __init__(self, constants: Constants, leaders: int) -> None:
        self.constants, self.counts = constants, Counts()
        self._bandwidth = constants.bandwidth / leaders
        self._link_is_free = 0.0  # from when on

    def work(self, seconds: float) -> None:
        self.counts.seconds += seconds

    def touch(self, nbytes: int) -> None:
        self.counts.touched += nbytes
        self.work(nbytes / self.constants.memory)

    def send(self, nbytes: int) -> float:
        """Send a message; return when all of it has left."""
        self.work(self.constants.message)
        self.counts.messages += 1
        self.counts.sent += nbytes
        begun = max(self._link_is_free, self.counts.seconds)
        self._link_is_free = begun + nbytes / self._bandwidth
        return self._link_is_free


@dataclass(frozen=True)
class Request:
    """A message, or a barrier, that is waited for."""

    machine: Machine
    done: Callable[[], float]  # when it is

    @staticmethod
    def Testall(requests: Sequence[Request]) -> bool:
        return all(
            request.done() <= request.machine.counts.seconds for request in requests
        )

    @staticmethod
    def Waitall(requests: Sequence[Request]) -> None:
        for request in requests:
            counts = request.machine.counts
            counts.seconds = max(counts.seconds, request.done())


class NoHandshake:
    """In place of a handshake: nothing is agreed on, as one thread simulates all ranks."""

    under_way: Any = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, *_: Any, **__: Any) -> list[bytes]:
        return []

    def begin(self, _: str) -> None:
        pass

    def leave(self, _: BaseException | None) -> None:
        pass


class NodeRanks:
    """In place of the communicator of a node's ranks, and of their window."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.rank, self.size = 0, size
        self._machine = machine
        self.buffers: list[np.ndarray] = []

    def Ibarrier(self) -> Request:
        ends = self._machine.counts.seconds + self._machine.constants.barrier
        return Request(self._machine, lambda: ends)

    def open(self, _: Any, node: Any, sizes: Sequence[int]) -> NodeRanks:
        self.buffers = [np.zeros(size, np.uint8) for size in sizes]
        return self

    def barrier(self) -> None:
        if self.size > 1:
            Request.Waitall([self.Ibarrier()])

    def sync(self) -> None:
        pass


class Ranks:
    """In place of a communicator whose ranks are on different nodes."""

    def __init__(self, machine: Machine, size: int, rank: int) -> None:
        self.rank, self.size = rank, size
        self._machine = machine
        # By the distance to the peer and the tag, for each exchange: when its messages
        # arrive.
        self._arrivals: dict[tuple[int, int], list[list[float]]] = {}

    def Irecv(self, buffer: Any, source: int, tag: int) -> Request:
        self._machine.work(self._machine.constants.message)
        self._machine.counts.received += memoryview(buffer[0]).nbytes
        exchanges = self._arrivals.setdefault(
            ((self.rank - source) % self.size, tag), []
        )
        if not exchanges or exchanges[-1]:  # each receives first
            exchanges.append([])
        return Request(self._machine, partial(max, exchanges[-1]))

    def Isend(self, buffer: Any, dest: int, tag: int) -> Request:
        left = self._machine.send(memoryview(buffer[0]).nbytes)
        exchanges = self._arrivals[(dest - self.rank) % self.size, tag]
        exchanges[-1].append(left + self._machine.constants.latency)
        return Request(self._machine, lambda: left)


class AllRanks(Ranks):
    """In place of the communicator of all ranks of all nodes."""

    def __init__(self, machine: Machine, topology: Topology, rank: int) -> None:
        super().__init__(machine, topology.size, rank)
        self.node = NodeRanks(machine, topology.intra_size(rank))
        self._parts = [
            Ranks(machine, topology.inter_size, topology.inter_rank(rank)),
            self.node,
        ]

    def Split(self, color: int, key: int) -> Any:
        return self._parts.pop(0)  # between nodes, and then within one


def tree_latency(nodes: int, constants: Constants) -> float:
    """Return the latencies of a binomial tree's messages, there and back."""
    return 2 * (nodes - 1).bit_length() * constants.latency


def bandwidth_limit(nodes: int, nbytes: int, constants: Constants) -> float:
    """Return the seconds that the bytes take which every node must send, for any sum of so many."""
    return 2 * (nodes - 1) / nodes * nbytes / constants.bandwidth


def simulate(
    name: str,
    nodes: int,
    nbytes: int,
    constants: Constants,
    ranks_a_node: int = 1,
    chunk_bytes: int | None = None,
    node: int = 0,
) -> Counts:
    """Take the mean of an array of float32 on the first rank of a node.

    Args:
        name: of a communicator; one whose ranks all exchange by messages has one a
            node.
        nodes: two or more.
        nbytes: of the array; a number for each rank at least, so that no message is
            empty.
        constants: what things cost.
        ranks_a_node: on each.
        chunk_bytes: as a communicator takes it.
        node: that of the rank, from 0 on.
    """
    if nodes < 2 or nbytes < 4 * nodes * ranks_a_node:
        raise ValueError(
            f"{nbytes} bytes on {nodes} nodes of {ranks_a_node} can't be simulated"
        )
    if ranks_a_node > 1 and name in ("naive", "flat"):
        raise ValueError(
            f"{name} uses messages within a node, which can't be simulated"
        )
    topology = Topology(
        tuple(rank // ranks_a_node for rank in range(nodes * ranks_a_node))
    )
    leaders = ranks_a_node if name == "two_dimensional" else 1
    machine = Machine(constants, leaders)
    comm = AllRanks(machine, topology, node * ranks_a_node)
    # Nothing is agreed on; one thread simulates all ranks.
    handshake = NoHandshake(comm.rank)
    group = ProcessGroup(
        cast(Any, comm),
        cast(Any, handshake),
        0,
        topology,
        lambda: None,
        Settings(chunk_bytes=chunk_bytes),
    )
    gradient = [np.empty(nbytes // 4, np.float32)]
    with _clocked(machine, comm.node):
        host, _ = COMMUNICATORS[name](group)
        host.gradient_sum().allreduce(
            Operand(gradient, gradient, [gradient[0].dtype], topology.size)
        )
    return machine.counts


def slowest(
    name: str, nodes: int, nbytes: int, constants: Constants, **how: Any
) -> float:
    """Return the seconds of the slowest of some nodes, whose blocks lie otherwise in memory."""
    chosen = {0, nodes // 2, nodes - 1}
    return max(
        simulate(name, nodes, nbytes, constants, node=node, **how).seconds
        for node in chosen
    )


@contextlib.contextmanager
def _clocked(machine: Machine, node: NodeRanks) -> Iterator[None]:
    """Meanwhile arithmetic and copies take the clock's time, and nothing else."""

    def sum_rows(rows: Sequence[np.ndarray], out: np.ndarray, *_: Any) -> None:
        machine.touch(sum(row.nbytes for row in rows) + out.nbytes)

    def combine_into(total: np.ndarray, term: np.ndarray, _: Any) -> None:
        sum_rows([total, term], total)

    def write_into(source: np.ndarray, *rest: Any) -> None:
        sum_rows([source], rest[-1])

    def pack(chunk: Chunk, *_: Any) -> None:
        machine.touch(2 * chunk.nbytes)

    mpi = SimpleNamespace(Intracomm=lambda comm: comm, COMM_NULL=None, UNDEFINED=None)
    with contextlib.ExitStack() as patches:
        for place, what in {
            (circulant, "combine_into"): combine_into,
            (circulant, "cast_into"): write_into,
            (circulant, "divide_into"): write_into,
            (pairwise, "sum_rows"): sum_rows,
            (shared_memory, "sum_rows"): sum_rows,
            (Chunk, "pack"): pack,
            (Chunk, "unpack"): pack,
            (shared_memory, "SharedWindow"): node,
            (two_level, "MPI"): mpi,
            (shared_memory, "MPI"): mpi,
        }.items():
            patches.enter_context(mock.patch.object(*place, what))
        yield
