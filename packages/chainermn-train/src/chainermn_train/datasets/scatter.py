"""Data sets divided among ranks: ``scatter_dataset``, ``scatter_index``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn_comm import CommunicatorBase, create_communicator

from ..collective_errors import raise_together, require_communicator, require_integer
from .transfer import scatter_parts


def scatter_dataset(
    dataset: Any,
    comm: Any,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
) -> SubDataset:
    """Divide the data set of one rank among all ranks, in almost equal parts (collective).

    Each rank receives only its own examples. NumPy arrays and lists are divided into
    arrays and lists, also inside Chainer's ``TupleDataset``, ``DictDataset``,
    ``SubDataset``, ``ConcatenatedDataset``, ``TransformDataset``, ``ImageDataset`` and
    ``LabeledImageDataset``, and inside subclasses that override none of
    ``__getitem__``, ``get_example`` and ``__len__``. Paths stay paths: no example is
    computed or read on the way. A data set of any other class can't be divided, so each
    rank receives it whole: the result is ``SubDataset(dataset, begin, end, order)``, as
    with :func:`scatter_index`, and its attribute ``_dataset`` is the whole data set.

    The arrays lie in a file without a name, in ``/dev/shm`` or, if there is no room, in
    the temporary folder, as long as the data set lives. Examples are views of the
    arrays; changes in place stay in this process. A pickle of the data set refers to
    the file, so that worker processes share the arrays. The pickle can be loaded on the
    same machine, by the same user, while the process that made it has the data set;
    otherwise loading raises OSError. Arrays of Python objects, lists, and single
    examples are pickled as usual.

    Args:
        dataset: at ``root`` anything with ``len()`` and integer indices; ignored on
            other ranks. It may be empty, or have fewer examples than there are ranks.
        comm: a ChainerMN communicator or an mpi4py intracommunicator.
        root: the rank whose data set is divided.
        shuffle: whether examples are put in random order first. Only ``root``'s value
            counts, as for the following arguments.
        seed: from 0 to 2**32 - 1. The same seed gives the same parts if the numbers of
            examples and ranks are the same. None for another order each time.
        max_buf_len: accepted for scripts of ChainerMN 1.3, without effect. Messages
            have at most 1 MiB, and the tag 32001, which no other message may have
            meanwhile.
        force_equal_length: whether all ranks get the same number of examples, and so
            make the same number of iterations per epoch. If the number of ranks doesn't
            divide the number of examples, some examples go to two ranks, at most one
            per rank. If False, each example goes to exactly one rank, and the first
            ranks get one example more than the other ranks.

    Returns:
        This rank's part, a :class:`chainer.datasets.SubDataset`.

    Warns:
        RuntimeWarning: at the root: the data set is a tuple of arrays of one length, so
            that a whole array counts as an example.

    Raises:
        TypeError, ValueError: an argument on this rank is not as above; or the root
            fails to take or pickle a part, or this rank to unpickle its part
            (:class:`~chainermn_comm.errors.PeerError` on the other ranks).
        RankMismatchError: ranks name different roots; raised on all ranks.
        OSError: there is no room for the arrays (PeerError on the other ranks).
        TypeError: ``comm`` is no communicator; raised at once on this rank alone.
    """
    with _chainermn_communicator(comm, "scatter_dataset") as communicator:
        order = None

        def count_here() -> int:
            nonlocal order
            number = length_of(dataset)
            _warn_of_columns(dataset)
            if shuffle:
                # NumPy has frozen the stream of RandomState.
                order = np.random.RandomState(seed).permutation(number)
            return number

        index, count = ask_root(communicator, "scatter_dataset", root, count_here)
        size = communicator.size
        shares = [_share(count, rank, size, force_equal_length) for rank in range(size)]
        return scatter_parts(communicator, index, dataset, shares, order)


def scatter_index(
    n_total_samples: int, comm: Any, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Divide among all ranks the indices of a data set that every rank has (collective).

    With an order that is equal on all ranks, ``SubDataset(dataset, begin, end, order)``
    is the same as the result of :func:`scatter_dataset`, and no example is sent.

    Args:
        n_total_samples: at ``root`` the number of examples; ignored on other ranks.
        comm: a ChainerMN communicator or an mpi4py intracommunicator.
        root: the rank whose ``n_total_samples`` counts.
        force_equal_length: as in :func:`scatter_dataset`.

    Returns:
        ``(begin, end)``: this rank's indices are ``range(begin, end)``.

    Raises:
        TypeError, ValueError: as in :func:`scatter_dataset`.
    """
    with _chainermn_communicator(comm, "scatter_index") as communicator:
        _, count = ask_root(
            communicator,
            "scatter_index",
            root,
            lambda: require_integer("n_total_samples", n_total_samples, 0),
        )
        return _share(count, communicator.rank, communicator.size, force_equal_length)


def create_empty_dataset(dataset: Any) -> list[tuple[()]]:
    """Return a list as long as ``dataset`` whose examples are all ``()`` (not collective).

    The result is for the ranks of a model-parallel network that neither take inputs nor
    give outputs. Chainer's converter turns a batch of these examples into ``()``, so the
    model is called without arguments.

    Args:
        dataset: anything with ``len()``.
    """
    return [()] * len(dataset)


def _chainermn_communicator(
    comm: Any, caller: str
) -> AbstractContextManager[CommunicatorBase, bool | None]:
    """Return ``comm``, or a communicator over mpi4py's that is freed after use (collective)."""
    if not isinstance(comm, CommunicatorBase):
        from mpi4py import MPI  # the import starts MPI, which most calls don't need

        if isinstance(comm, MPI.Intracomm):
            return create_communicator("naive", comm)
    comm = require_communicator(
        comm, f"{caller}, unless it is given an mpi4py intracommunicator,"
    )
    return nullcontext(comm)


def ask_root(
    comm: CommunicatorBase, operation: str, root: int, count: Callable[[], int]
) -> tuple[int, int]:
    """Return the root that all ranks name, and the number that ``count`` gives there (collective).

    All ranks raise what ``count`` raises at the root, and RankMismatchError if they name
    different roots.
    """
    with raise_together(comm.handshake, operation) as call:
        index = require_integer("root", root, 0, comm.size - 1)
        call.signature = (("root", index),)
        if comm.rank == index:
            call.payload = str(count()).encode()
    return index, int(call.payloads[index])


def length_of(dataset: Any) -> int:
    """Return the number of examples; raise if the data set has no length or no indices."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "the root's data set must have a len(), and examples of indices 0, 1, ...; a "
            f"{type(dataset).__name__} has not: pass a list of the examples"
        )
    return len(dataset)


def _warn_of_columns(dataset: Any) -> None:
    """Warn if a tuple of arrays of one length would be divided as if arrays were examples."""
    if not isinstance(dataset, tuple) or len(dataset) < 2:
        return
    lengths = {len(each) for each in dataset if getattr(each, "ndim", 0) > 0}
    if len(lengths) == 1 and min(lengths) > len(dataset):
        warnings.warn(
            f"scatter_dataset divides a tuple of {len(dataset)} arrays, each of which counts as "
            "one example; did you mean chainer.datasets.TupleDataset(*arrays), whose examples "
            "have a row of each array?",
            RuntimeWarning,
            stacklevel=4,
        )


def _share(count: int, rank: int, size: int, equal: bool) -> tuple[int, int]:
    """Return (begin, end) of a rank's share of ``range(count)``."""
    # Equal shares are as long as the longest share, and may overlap. The first unequal
    # shares are longer by one example. A seed gives ranks the same examples as in
    # Chainer 7.
    if equal:
        begin = count * rank // size
        return begin, begin + -(-count // size)
    shortest, longer = divmod(count, size)
    begin = shortest * rank + min(rank, longer)
    return begin, begin + shortest + int(rank < longer)
