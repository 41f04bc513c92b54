"""Epochs as numbers of iterations, which are the same on all ranks."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import bcast_checked, require_communicator, require_integer


def get_n_iterations_for_one_epoch(
    dataset: Any, local_batch_size: int, comm: CommunicatorBase
) -> int:
    """Return the number of iterations in which rank 0 goes through its data set (collective).

    The last batch may be smaller. Parts of :func:`scatter_dataset` take as many
    iterations on other ranks, or with ``force_equal_length=False`` perhaps one less.

    Args:
        dataset: on rank 0 its part of the data set, anything with ``len()``; ignored on
            other ranks.
        local_batch_size: on rank 0 the number of examples in a batch; ignored on other
            ranks.
        comm: the communicator of the ranks that train together.

    Raises:
        TypeError, ValueError: on rank 0, an argument is not as above (PeerError on the
            other ranks).
        TypeError: ``comm`` is no communicator; raised at once on this rank alone.
    """
    operation = "get_n_iterations_for_one_epoch"
    comm = require_communicator(comm, operation)
    number: int = bcast_checked(
        comm,
        operation,
        lambda: (
            -(-len(dataset) // require_integer("local_batch_size", local_batch_size, 1))
        ),
    )
    return number


def get_epoch_trigger(
    n_epochs: float, dataset: Any, local_batch_size: int, comm: CommunicatorBase
) -> tuple[float, str]:
    """Return ``n_epochs`` epochs as a trigger ``(number, "iteration")`` (collective).

    The trigger fires at the same iterations on all ranks, even if the epochs of their
    data sets don't end at the same time. ``dataset``, ``local_batch_size``, ``comm`` and
    the errors that are raised are those of :func:`get_n_iterations_for_one_epoch`.
    """
    return n_epochs * get_n_iterations_for_one_epoch(
        dataset, local_batch_size, comm
    ), "iteration"
