"""State that was loaded equal on all ranks is marked, so that rank 0's is not broadcast."""

from __future__ import annotations

import hashlib
from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from ..host_arrays import to_host
from ..optimizer_state import array_of, keys_of, updates_of
from ..optimizers import MultiNodeOptimizer
from ..trainer_introspection import updater_of


def mark_synchronized_if_equal(comm: CommunicatorBase, target: Any, optimizer: Any = None) -> None:
    """Mark ``optimizer`` and those of ``target`` as synchronized, if they are (collective)."""
    updater = updater_of(target)
    optimizers = [] if updater is None else list(updater.get_all_optimizers().values())
    if all(optimizer is not each for each in optimizers):
        optimizers.append(optimizer)
    multi_node = [
        each for each in optimizers if isinstance(each, MultiNodeOptimizer) and each.target
    ]
    views = allgather_checked(
        comm, "comparison of parameters", lambda: [_digest(each) for each in multi_node]
    )
    for index, each in enumerate(multi_node):
        if len({tuple(view[index : index + 1]) for view in views}) == 1:
            each.assume_synchronized()


def _digest(optimizer: Any) -> str:
    """Return a checksum of names, dtypes, shapes and values of parameters, and of their state."""
    counts = [getattr(optimizer, name, None) for name in ("t", "_loss_scale")]
    digest = hashlib.sha256(f"{counts}".encode())
    for name, param in sorted(optimizer.target.namedparams()):
        digest.update(f"{name} {updates_of(param)}\n".encode())
        for key in keys_of(param):
            array = to_host(array_of(param, key))
            digest.update(f"{key} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
