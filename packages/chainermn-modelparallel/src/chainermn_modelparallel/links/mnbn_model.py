"""`create_mnbn_model`: a model whose batch normalizations share their batches among ranks."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import chainer
import chainer.links as L

from chainermn_comm import CommunicatorBase

from ..functions import check_communicator, get_communication_backend
from .batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(
    link: chainer.Link, comm: CommunicatorBase, communication_backend: str = "auto"
) -> Any:
    """Copy a model, with every batch normalization made a multi-node one (not collective).

    The copy has the classes, structure, parameters, persistent values, update rules and
    names of the original, and arrays of its own; link hooks and communicators are
    shared with it. Each :class:`chainer.links.BatchNormalization` in it, at whatever
    depth, is a :class:`MultiNodeBatchNormalization` in the copy. A link that occurs in
    several places occurs in the same ones there, as one.

    Args:
        link: any link: a chain, chain list, sequential, or a batch normalization
            itself. Call it before an optimizer is set up with the model.
        comm: the communicator whose ranks share their batches.
        communication_backend: as for :class:`MultiNodeBatchNormalization`.

    Returns:
        The copy. A subclass of :class:`chainer.links.BatchNormalization` is converted
        if it has no more than a constructor of its own; others, which may compute
        something else, are left as they are, with a warning.

    Raises:
        TypeError: ``link`` is no link, or ``comm`` no communicator.
        ValueError: there is no such ``communication_backend``.
    """
    check_communicator(comm)
    get_communication_backend(comm, communication_backend)
    if not isinstance(link, chainer.Link):
        raise TypeError(
            f"rank {comm.rank}: link must be a chainer.Link, got {type(link).__name__}"
        )
    # Objects that the deep copy must share are entered as copies of themselves.
    memo: dict[int, Any] = {}
    pairs: list[tuple[chainer.Link, chainer.Link]] = []
    for path, part in link.namedlinks():
        memo.update({id(hook): hook for hook in part.local_link_hooks.values()})
        kind: Any = type(part)
        if _is_convertible(part):
            kind = MultiNodeBatchNormalization
        elif not isinstance(part, chainer.Sequential):
            # Whose copy method refuses lambdas.
            already = isinstance(part, MultiNodeBatchNormalization)
            if isinstance(part, L.BatchNormalization) and not already:
                warnings.warn(
                    f"create_mnbn_model leaves {path} as it is: {kind.__name__} is a subclass of "
                    "BatchNormalization, which may compute something else",
                    stacklevel=2,
                )
            continue
        if id(part) not in memo:
            replacement = memo[id(part)] = kind.__new__(kind)
            pairs.append((part, replacement))
    for part, replacement in pairs:
        vars(replacement).update(copy.deepcopy(vars(part), memo))
        if _is_convertible(part):
            vars(replacement).update(
                comm=comm, communication_backend=communication_backend
            )
    return copy.deepcopy(link, memo)


def _is_convertible(link: chainer.Link) -> bool:
    """Return whether it is a batch normalization that has a constructor of its own at most."""
    if not isinstance(link, L.BatchNormalization):
        return False
    classes = type(link).__mro__
    own = {
        name
        for each in classes[: classes.index(L.BatchNormalization)]
        for name in vars(each)
    }
    methods = own - {"__init__", "_abc_impl"}
    return "__call__" not in own and all(
        re.fullmatch("__.*__", name) for name in methods
    )
