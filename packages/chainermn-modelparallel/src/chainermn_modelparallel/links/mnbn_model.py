"""`create_mnbn_model`: a model whose batch normalizations share their batches among ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import chainer
import chainer.links as L

from chainermn_comm import CommunicatorBase
from chainermn_comm.numbers import wrong_kind

from ..functions import check_communicator, get_communication_backend
from .batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(
    link: chainer.Link, comm: CommunicatorBase, communication_backend: str = "auto"
) -> Any:
    """Copy a model, with multi-node batch normalizations for ordinary ones (not collective).

    The copy has the classes, structure, parameters, persistent values, update rules and
    names of the original, but its own arrays. It shares link hooks and communicators
    with the original. Each :class:`chainer.links.BatchNormalization` at any depth of the
    model is a :class:`MultiNodeBatchNormalization` in the copy. A link that occurs in
    several places of the model is one link in the same places of the copy.

    Args:
        link: any link: a chain, chain list, sequential, or a batch normalization
            itself. Copy the model before an optimizer is set up with it.
        comm: the communicator whose ranks share their batches.
        communication_backend: as for :class:`MultiNodeBatchNormalization`.

    Returns:
        The copy. A link of a subclass of :class:`chainer.links.BatchNormalization` is
        converted if the subclass adds no more than a constructor. Other subclasses may
        compute something else, so their links are left as they are, with a warning.

    Raises:
        TypeError: ``link`` is no link, or ``comm`` no communicator.
        ValueError: there is no such ``communication_backend``.
    """
    check_communicator(comm)
    get_communication_backend(comm, communication_backend)
    if not isinstance(link, chainer.Link):
        raise wrong_kind("link must be a chainer.Link", link, comm.rank)
    # Objects that the deep copy must share are entered as copies of themselves.
    memo = {}
    sequentials = []
    for part in link.links():
        memo.update({id(hook): hook for hook in part.local_link_hooks.values()})
        # The copy methods of Sequential refuse lambdas.
        if isinstance(part, chainer.Sequential) and id(part) not in memo:
            kind: Any = type(part)
            memo[id(part)] = kind.__new__(kind)
            sequentials.append(part)
    for part in sequentials:
        vars(memo[id(part)]).update(copy.deepcopy(vars(part), memo))
    converted = copy.deepcopy(link, memo)
    for path, part in converted.namedlinks():
        if _is_convertible(part):
            part.__class__ = MultiNodeBatchNormalization
            part.comm = comm
            part.communication_backend = communication_backend
        elif isinstance(part, L.BatchNormalization) and not isinstance(
            part, MultiNodeBatchNormalization
        ):
            warnings.warn(
                f"create_mnbn_model leaves {path} as it is: {type(part).__name__} is a subclass "
                "of BatchNormalization, which may compute something else",
                stacklevel=2,
            )
    return converted


def _is_convertible(link: Any) -> bool:
    """Return whether the link's class adds only a constructor to Chainer's class."""
    for kind in type(link).__mro__:
        if kind is L.BatchNormalization:
            return True
        own = vars(kind).keys() - {"_abc_impl"}
        if "__call__" in own or not all(name.startswith("__") for name in own):
            return False
    return False
