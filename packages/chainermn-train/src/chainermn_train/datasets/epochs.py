"""Epochs as numbers of iterations, which are the same on all ranks."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import bcast_checked, require_communicator, require_integer


def get_n_iterations_for_one_epoch(
    dataset: Any, local_batch_size: int, comm: CommunicatorBase
) -> int:
    """Return in how many iterations rank 0 goes through its data set once (collective).

    The last batch may be smaller. With :func:`scatter_dataset`, the parts of other
    ranks take as many (or, with ``force_equal_length=False``, perhaps one less).

    Args:
        dataset: on rank 0 its part of the data set, anything with ``len()``; ignored
            elsewhere.
        local_batch_size: on rank 0 the number of examples in its batches; ignored
            elsewhere.
        comm: the ranks.

    Raises:
        TypeError, ValueError: on rank 0, an argument is not as above (PeerError on the
            others).
        TypeError: ``comm`` is not a communicator; raised at once on this rank only.
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
    """Return ``n_epochs`` of :func:`get_n_iterations_for_one_epoch` as a trigger (collective).

    The trigger is ``(number, "iteration")``, and fires at the same iterations on all
    ranks, also where the epochs of their data sets don't end at the same time.
    ``dataset``, ``local_batch_size`` and ``comm`` are those of that function, which
    raises the errors.
    """
    return n_epochs * get_n_iterations_for_one_epoch(
        dataset, local_batch_size, comm
    ), "iteration"
