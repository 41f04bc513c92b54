"""Models that ranks hold in parts; no multi-node optimizer may average different parts."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase


def divisions_of(param: Any) -> list[Any]:
    """Return the ``shardings`` of a parameter by which other ranks hold other elements."""
    return [
        each
        for each in getattr(param, "shardings", ())
        if each.kind != "replica" and each.group.size > 1
    ]


def refuse_divided(model: Any, communicator: CommunicatorBase) -> None:
    """Raise ValueError if other ranks of the communicator hold other parts of the model.

    The mean of different parts would overwrite them all. The attribute ``shardings`` of
    a parameter says which ranks hold it in parts.
    """
    for name, param in model.namedparams():
        for sharding in divisions_of(param):
            if len(common_ranks(communicator, sharding.group)) > 1:
                raise ValueError(
                    f"rank {communicator.rank}: {name} is held in parts ({sharding.kind}) by "
                    "ranks of the optimizer's communicator, which must not average them: give "
                    "the optimizer a communicator of the ranks that hold the same part "
                    "(comm.split), or use Chainer's optimizer as it is"
                )


def common_ranks(communicator: CommunicatorBase, other: CommunicatorBase) -> list[int]:
    """Return the ranks in ``communicator`` of all processes that ``other`` has, too.

    The list has the order of ``other``. It is empty if nothing is known of the processes
    of one of two different communicators, because the communicator isn't built on
    mpi4py, or mpi4py's communicator was freed. The function is not collective.
    """
    if communicator is other:
        return list(range(communicator.size))
    mpi_comms: list[Any] = [
        getattr(each, "mpi_comm", None) for each in (communicator, other)
    ]
    if not all(mpi_comms):
        return []
    groups = [mpi_comm.Get_group() for mpi_comm in mpi_comms]
    ranks = groups[1].Translate_ranks(group=groups[0])
    for group in groups:
        group.Free()
    return [rank for rank in ranks if rank >= 0]  # all others are MPI.UNDEFINED
