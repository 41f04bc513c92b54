"""``share_dataset``: every rank has the whole data set, with one copy on each machine."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together, require_communicator
from .scatter import ask_root, length_of
from .transfer import scatter_parts

_OPERATION = "share_dataset"


def share_dataset(dataset: Any, comm: CommunicatorBase, root: int = 0) -> Any:
    """Give one rank's data set to all, with one copy of its arrays on each machine (collective).

    The result is for iterators with a :class:`DistributedOrderSampler`, which divides
    the examples among ranks anew in each epoch. Arrays lie in memory that the ranks of
    a machine share, as with :func:`scatter_dataset`. Lists and data sets of other
    classes are copied to each rank.

    Args:
        dataset: at ``root`` anything with ``len()`` and integer indices; ignored on
            other ranks.
        comm: a ChainerMN communicator.
        root: the rank that has the data set.

    Returns:
        A data set with all examples in their order.

    Raises:
        TypeError, ValueError, RankMismatchError, OSError: as :func:`scatter_dataset`
            raises them.
    """
    comm = require_communicator(comm, _OPERATION)
    root, count = ask_root(comm, _OPERATION, root, lambda: length_of(dataset))
    # The first rank of each node gets all examples.
    leads = comm.allgather_obj(comm.intra_rank == 0)
    shares = [(0, count if is_first else 0) for is_first in leads]
    part = scatter_parts(comm, root, dataset, shares)
    with (
        comm.split(comm.inter_rank, comm.rank) as node,
        raise_together(comm.handshake, _OPERATION),
    ):
        return node.bcast_obj(part._dataset)
