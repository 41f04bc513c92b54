"""Spares multi-node optimizers the broadcast of parameters that were loaded equal on all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from chainer.backends import cuda

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from ..trainer_introspection import updater_of
from .multi_node_optimizer import MultiNodeOptimizer


def mark_synchronized_if_equal(comm: CommunicatorBase, target: Any, optimizer: Any = None) -> None:
    """Tell optimizers that their parameters are synchronized, if they are (collective).

    Args:
        comm: the ranks that train together.
        target: a trainer or an updater, whose optimizers are told; others are left alone.
        optimizer: another optimizer to tell.
    """
    updater = updater_of(target)
    optimizers = [] if updater is None else list(updater.get_all_optimizers().values())
    if all(optimizer is not each for each in optimizers):
        optimizers.append(optimizer)
    ours = [each for each in optimizers if isinstance(each, MultiNodeOptimizer) and each.target]
    views = allgather_checked(
        comm, "comparison of parameters", [_digest(each.target) for each in ours]
    )
    for index, each in enumerate(ours):
        if len({tuple(view[index : index + 1]) for view in views}) == 1:
            each.assume_synchronized()


def _digest(model: Any) -> str:
    """A checksum of the names, dtypes, shapes and values of a model's initialised parameters."""
    digest = hashlib.sha256()
    for name, param in sorted(model.namedparams()):
        if param.is_initialized:
            array = cuda.to_cpu(param.array)
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
