"""State that was loaded equal on all ranks is marked, so that rank 0's is not broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from ..host_arrays import to_host
from ..optimizer_state import array_of, keys_of, updates_of
from ..optimizers import MultiNodeOptimizer
from ..trainer_introspection import updater_of
from .dealing import same_on_all
from .shards import State


def mark_synchronized_if_equal(comm: CommunicatorBase, target: Any, optimizer: Any = None) -> None:
    """Mark ``optimizer`` and those of ``target`` as synchronized, if they are (collective)."""
    updater = updater_of(target)
    optimizers = [] if updater is None else list(updater.get_all_optimizers().values())
    if all(optimizer is not each for each in optimizers):
        optimizers.append(optimizer)
    multi_node = [it for it in optimizers if isinstance(it, MultiNodeOptimizer) and it.target]
    for each in multi_node:
        state: State = {
            f"{key} of {name}": np.asarray(to_host(array_of(param, key)))
            for name, param in each.target.namedparams()
            for key in keys_of(param)
        }
        counts = [getattr(each, name, None) for name in ("t", "_loss_scale")]
        counts += [updates_of(param) for _, param in sorted(each.target.namedparams())]
        state["counts"] = np.array(f"{counts}")
        is_alike = len(same_on_all(comm, state)) == len(state)
        if all(allgather_checked(comm, "comparison of parameters", lambda: is_alike)):  # noqa: B023
            each.assume_synchronized()
