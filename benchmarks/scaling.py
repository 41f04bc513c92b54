"""Tells how long a mean of gradients takes on up to 1,024 nodes, by simulation.

    python benchmarks/scaling.py

The network is one of --gigabits and --microseconds; what processors take was measured
on one of our machines. `hosts.py --many` measures means over up to eight hosts.
Exits 1 where a limit is missed.

The communicators' own algorithms run with a clock in place of wires and of arithmetic.
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

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from report import Verdict, judge, show_table, show_verdicts

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
from chainermn_tools.formatting import format_bytes

MODEL = 102_228_128  # bytes
SMALL = 100_000
NODES = (2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024)
# Nodes and how much longer than its bytes a mean of MODEL may take; and a mean of SMALL
# on as many nodes than a binomial tree's latency there and back.
OVER_BYTES = {2: 1.05, 16: 1.1, 128: 1.2, 1024: 1.5}
OVER_TREE = {17: 3, 128: 2.6, 1024: 2.5}
# Communicators with the ranks of a node.
WAYS = {"flat": 1, "hierarchical": 4, "two_dimensional": 4}


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


# A network of 25 Gbit/s and 20 us; processors, memory and barriers as our machines had them.
LINK_25G = Constants(20e-6, 25e9 / 8, message=6e-6, memory=20e9, barrier=10e-6)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gigabits", type=float, default=25, help="a node's link (25)")
    add("--microseconds", type=float, default=20, help="its latency (20)")
    args = parser.parse_args()
    if args.gigabits <= 0 or args.microseconds < 0:
        parser.error("--gigabits must be more than 0, and --microseconds not less")
    return args


def main() -> int:
    args = arguments()
    latency = 1e-6 * args.microseconds
    link = replace(LINK_25G, bandwidth=args.gigabits * 1e9 / 8, latency=latency)
    print(f"{args.gigabits:g} Gbit/s and {args.microseconds:g} us; {link}")
    show_nodes(link)
    verdicts = list(limits(link))
    show_verdicts(verdicts)
    if all(verdict.ok for verdict in verdicts):
        return 0
    return 1


def limits(link: Constants) -> Iterator[Verdict]:
    """Yield the figures that must be kept."""
    for nodes, most in OVER_BYTES.items():
        took = slowest("flat", nodes, MODEL, link)
        ratio = took / bandwidth_limit(nodes, MODEL, link)
        what = f"flat, {format_bytes(MODEL)} on {nodes} nodes, over its bytes' time"
        yield judge(what, ratio, most)
    for nodes, most in OVER_TREE.items():
        ratio = slowest("flat", nodes, SMALL, link) / tree_latency(nodes, link)
        what = f"flat, {format_bytes(SMALL)} on {nodes} nodes, over a tree's latency, twice"
        yield judge(what, ratio, most)


def show_nodes(link: Constants) -> None:
    """Print the time of MODEL, how much longer that is than its bytes', and its messages."""
    cells = []
    for name, ranks in WAYS.items():
        for nodes in NODES:
            counts = simulate(name, nodes, MODEL, link, ranks)
            ratio = counts.seconds / bandwidth_limit(nodes, MODEL, link)
            ms = f"{1e3 * counts.seconds:.1f}"
            case = f"{name}, {ranks} a node, {nodes} nodes"
            cells.append([case, ms, f"{ratio:.3f}", str(counts.messages)])
    columns = ["", "ms", "x its bytes' time", "messages"]
    show_table(f"Mean of {format_bytes(MODEL)}", columns, cells)


@dataclass
class Counts:
    """What a rank did until now.

    Attributes:
        seconds: its clock.
        messages, sent: to other nodes, and their bytes.
        received: likewise.
    """

    seconds: float = 0.0
    messages: int = 0
    sent: int = 0
    received: int = 0


class Machine:
    """A rank's clock, and its part of its node's link."""

    def __init__(self, constants: Constants, leaders: int) -> None:
        self.constants = constants
        self.counts = Counts()
        self._bandwidth = constants.bandwidth / leaders
        self._link_is_free = 0.0  # from when on

    def work(self, seconds: float) -> None:
        self.counts.seconds += seconds

    def touch(self, nbytes: int) -> None:
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
        return all(each.done() <= each.machine.counts.seconds for each in requests)

    @staticmethod
    def Waitall(requests: Sequence[Request]) -> None:
        for request in requests:
            counts = request.machine.counts
            counts.seconds = max(counts.seconds, request.done())


class NodeRanks:
    """In place of the communicator of a node's ranks, and of their window."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.rank = 0
        self.size = size
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
        self.rank = rank
        self.size = size
        self._machine = machine
        # By the distance to the peer and the tag, for each exchange: when its messages
        # arrive.
        self._arrivals: dict[tuple[int, int], list[list[float]]] = {}

    def Irecv(self, buffer: Any, source: int, tag: int) -> Request:
        self._machine.work(self._machine.constants.message)
        self._machine.counts.received += memoryview(buffer[0]).nbytes
        distance = (self.rank - source) % self.size
        exchanges = self._arrivals.setdefault((distance, tag), [])
        if not exchanges or exchanges[-1]:  # each receives first
            exchanges.append([])
        return Request(self._machine, partial(max, exchanges[-1]))

    def Isend(self, buffer: Any, dest: int, tag: int) -> Request:
        left = self._machine.send(memoryview(buffer[0]).nbytes)
        distance = (dest - self.rank) % self.size
        arrives = left + self._machine.constants.latency
        self._arrivals[distance, tag][-1].append(arrives)
        return Request(self._machine, lambda: left)


class AllRanks(Ranks):
    """In place of the communicator of all ranks of all nodes."""

    def __init__(self, machine: Machine, topology: Topology, rank: int) -> None:
        super().__init__(machine, topology.size, rank)
        self.node = NodeRanks(machine, topology.intra_size(rank))
        between = Ranks(machine, topology.inter_size, topology.inter_rank(rank))
        self._parts = [between, self.node]

    def Split(self, color: int, key: int) -> Any:
        return self._parts.pop(0)  # between nodes, and then within one


def tree_latency(nodes: int, constants: Constants) -> float:
    """Return the latencies of a binomial tree's messages, there and back."""
    return 2 * (nodes - 1).bit_length() * constants.latency


def bandwidth_limit(nodes: int, nbytes: int, constants: Constants) -> float:
    """Return the seconds that the bytes take which every node must send, for any sum of so many."""
    return 2 * (nodes - 1) / nodes * nbytes / constants.bandwidth


def simulate(
    name: str,  # of a communicator; one that only sends messages has one rank a node
    nodes: int,  # two or more
    nbytes: int,  # of the array; a number for each rank at least
    constants: Constants,
    ranks_a_node: int = 1,
    chunk_bytes: int | None = None,  # as a communicator takes it
    node: int = 0,  # that of the rank
) -> Counts:
    """Take the mean of an array of float32 on the first rank of a node."""
    size = nodes * ranks_a_node
    if nodes < 2 or nbytes < 4 * size:
        raise ValueError(f"{nbytes} bytes on {size} ranks can't be simulated")
    if ranks_a_node > 1 and name in ("naive", "flat"):
        raise ValueError(f"messages of {name} in a node can't be simulated")
    topology = Topology(tuple(rank // ranks_a_node for rank in range(size)))
    leaders = 1
    if name == "two_dimensional":
        leaders = ranks_a_node
    machine = Machine(constants, leaders)
    comm: Any = AllRanks(machine, topology, node * ranks_a_node)
    # Nothing is agreed on, as one thread simulates all ranks.
    handshake = mock.MagicMock(return_value=[], rank=comm.rank, under_way=None)
    settings = Settings(chunk_bytes=chunk_bytes)
    group = ProcessGroup(comm, handshake, 0, topology, lambda: None, settings)
    gradient = [np.empty(nbytes // 4, np.float32)]
    with _clocked(machine, comm.node):
        host, _ = COMMUNICATORS[name](group)
        operand = Operand(gradient, gradient, [gradient[0].dtype], topology.size)
        host.gradient_sum().allreduce(operand)
    return machine.counts


def slowest(name: str, nodes: int, nbytes: int, constants: Constants) -> float:
    """Return the seconds of the slowest of some nodes, whose blocks lie otherwise in memory."""
    seconds = []
    for node in {0, nodes // 2, nodes - 1}:
        counts = simulate(name, nodes, nbytes, constants, node=node)
        seconds.append(counts.seconds)
    return max(seconds)


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
    replaced: dict[tuple[Any, str], Any] = {
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
    }
    with contextlib.ExitStack() as patches:
        for (place, name), what in replaced.items():
            patches.enter_context(mock.patch.object(place, name, what))
        yield


if __name__ == "__main__":
    sys.exit(main())
