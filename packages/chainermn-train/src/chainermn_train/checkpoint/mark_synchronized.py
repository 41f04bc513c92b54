"""Parameters that were loaded equal on all ranks are marked, so that none are broadcast."""

from __future__ import annotations

import hashlib
from typing import Any

from chainer.backends import cuda

from chainermn_comm import CommunicatorBase

from ..collective_errors import run_on_all_ranks
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
    views = run_on_all_ranks(
        comm, "comparison of parameters", lambda: [_digest(each.target) for each in multi_node]
    )
    for index, each in enumerate(multi_node):
        if len({tuple(view[index : index + 1]) for view in views}) == 1:
            each.assume_synchronized()


def _digest(model: Any) -> str:
    """Return a checksum of a model's initialised parameters: names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, param in sorted(model.namedparams()):
        if param.is_initialized:
            array = cuda.to_cpu(param.array)
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
