"""Which rank is on which node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Topology:
    """The node of each rank.

    Making a topology checks nothing.

    Attributes:
        nodes: the number of each rank's node. Nodes are numbered from 0 in the order of
            their lowest rank. A node's ranks need not be contiguous.
    """

    nodes: tuple[int, ...]

    @classmethod
    def of(cls, labels: Iterable[Hashable]) -> Topology:
        """Return the topology in which ranks with equal labels are on one node (not collective).

        Args:
            labels: one label for each rank, in rank order, such as the names of hosts.

        Raises:
            TypeError: a label isn't hashable.
        """
        numbers: dict[Hashable, int] = {}
        return cls(tuple([numbers.setdefault(it, len(numbers)) for it in labels]))

    @classmethod
    def discover(cls, mpi_comm: MPI.Intracomm) -> Topology:
        """Return the topology in which ranks that can share memory are on one node (collective).

        Args:
            mpi_comm: an mpi4py intracommunicator, which stays the caller's. Anything
                else raises AttributeError, on this rank alone.
        """
        from mpi4py import MPI

        node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            leader = node.bcast(mpi_comm.rank)  # the node's lowest rank, which names it
        finally:
            node.Free()
        return cls.of(mpi_comm.allgather(leader))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def inter_size(self) -> int:
        """Number of nodes."""
        return len(self._intra_sizes)

    @cached_property
    def least_intra_size(self) -> int:
        """Number of ranks on the node with the fewest ranks."""
        return min(self._intra_sizes.values())

    def inter_rank(self, rank: int) -> int:
        """Return the number of the rank's node."""
        return self.nodes[rank]

    def intra_rank(self, rank: int) -> int:
        """Return the rank's number among the ranks of its node."""
        return self._intra_ranks[rank]

    def intra_size(self, rank: int) -> int:
        """Return the number of ranks on the rank's node."""
        return self._intra_sizes[self.nodes[rank]]

    def restrict(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of a communicator whose i-th rank is ``ranks[i]`` here."""
        return Topology.of(self.nodes[rank] for rank in ranks)

    @cached_property
    def _intra_sizes(self) -> Counter[int]:
        return Counter(self.nodes)

    @cached_property
    def _intra_ranks(self) -> list[int]:
        numbers: defaultdict[int, count[int]] = defaultdict(count)
        return [next(numbers[node]) for node in self.nodes]
