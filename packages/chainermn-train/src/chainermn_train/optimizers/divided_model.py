"""Models in parts: a multi-node optimizer must not average what its ranks hold of them."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase


def divisions_of(param: Any) -> list[Any]:
    """Return the ``shardings`` by which ranks have different elements of a parameter, or none."""
    return [
        each
        for each in getattr(param, "shardings", ())
        if each.kind != "replica" and each.group.size > 1
    ]


def refuse_divided(model: Any, communicator: CommunicatorBase) -> None:
    """Raise ValueError if other ranks of the communicator hold other parts of the model.

    Averaging would overwrite shards with those of other ranks. Parameters say by
    ``shardings`` which ranks hold them in parts.
    """
    for name, param in model.namedparams():
        for sharding in divisions_of(param):
            if _share_other_ranks(sharding.group, communicator):
                raise ValueError(
                    f"rank {communicator.rank}: {name} is held in parts ({sharding.kind}) by "
                    "ranks of the optimizer's communicator, which must not average them: give "
                    "the optimizer a communicator of the ranks that hold the same part "
                    "(comm.split), or use Chainer's optimizer as it is"
                )


def _share_other_ranks(first: CommunicatorBase, second: CommunicatorBase) -> bool:
    """Return whether a rank besides this one belongs to both communicators.

    Of communicators that are not built on mpi4py only the same one is known to.
    """
    if first is second:
        return first.size > 1
    mpi_comms: list[Any] = [getattr(each, "mpi_comm", None) for each in (first, second)]
    if None in mpi_comms:
        return False
    groups = [mpi_comm.Get_group() for mpi_comm in mpi_comms]
    common = groups[0].Intersection(*groups)
    is_shared: bool = common.Get_size() > 1
    for group in (*groups, common):
        group.Free()
    return is_shared
