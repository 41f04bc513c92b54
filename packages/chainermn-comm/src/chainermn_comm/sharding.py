"""Models in parts: how ranks hold each parameter, and the norm of all gradients."""

from __future__ import annotations

import math
import pickle
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from .communicator import CommunicatorBase
from .errors import raise_together
from .gpu import devices
from .numbers import as_array

OPERATION = "global_norm"
# Elements of a gradient that are widened to float64 at once. On hosts they fit in a
# core's cache: 25 million float32 numbers take 47 ms, and 96 ms with 2^20. On GPUs
# there are few launches, which take 128 MiB.
HOST_CHUNK = 65_536
GPU_CHUNK = 16_777_216

Kind = Literal["shard", "replica", "placed"]


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a group hold a parameter (not collective).

    A parameter's attribute ``shardings`` is a tuple of these objects. A parameter
    without the attribute is a replica on all ranks. Several shardings can apply
    together: a shard of one group may be placed on one rank of another group. Ranks that
    hold different parts must not share a parameter: ``bcast_data`` and means of gradients
    raise RankMismatchError on all ranks.
    ``copy.deepcopy`` of Chainer's parameters drops attributes, so a link sets this
    attribute whenever it hands out its parameters.

    Attributes:
        kind: ``"shard"`` if each rank of the group has elements of its own;
            ``"replica"`` if all ranks have the same elements; ``"placed"`` if only this
            rank has the parameter. Copies of a placed model are placed on groups of the
            same size.
        group: the communicator of the group's ranks.

    Raises:
        ValueError: ``kind`` is none of the three.
    """

    kind: Kind
    group: CommunicatorBase

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"kind must be one of shard, replica, placed, got {self.kind!r}"
            )


def global_norm(comm: CommunicatorBase, model: Any) -> float:
    """Return the norm of a model's gradients over all ranks that hold parts of it (collective).

    Each element counts once: all shards of a parameter, and one of its replicas. If
    replicas differ, the mean of their squares counts. A parameter that the model holds
    under several names counts under each name, as in Chainer's own hooks. A missing
    gradient counts as zeros. Sums are taken in float64, and all ranks get the same bits.

    Args:
        comm: a communicator whose ranks together hold the whole model, once or several
            times. A communicator of ranks that hold the same shard is not enough.
        model: a model whose parameters have ``shardings``, see :class:`Sharding`.

    Returns:
        A float, the same on all ranks.

    Raises:
        ValueError: a rank of a parameter's group isn't in ``comm``, or replicas of one
            name have different shapes or dtypes; raised on all ranks.
        TypeError: a gradient is no array (PeerError on the other ranks).
    """
    what = f"rank {comm.rank}: {OPERATION}"
    with (
        raise_together(comm.handshake, OPERATION) as call,
        devices.translated_errors(what),
    ):
        call.payload = pickle.dumps(
            [
                (
                    (name, _places(param, "placed")),
                    _places(param, "shard"),
                    f"{param.data.dtype} {param.data.shape}",
                    _squares(param.grad, comm.rank),
                )
                for name, param in model.namedparams()
                if param.data is not None
            ]
        )
    return math.sqrt(_sum_once(call.payloads, what))


def _places(param: Any, kind: Kind) -> tuple[tuple[int, int], ...]:
    """Return this rank and the size of each group that holds a parameter in one way."""
    return tuple(
        (sharding.group.rank, sharding.group.size)
        for sharding in getattr(param, "shardings", ())
        if sharding.kind == kind
    )


def _squares(array: Any, rank: int) -> float:
    """Return the sum of the squares of an array's elements."""
    if array is None:
        return 0.0
    if devices.on_gpu(array):
        array = devices.c_ordered(array)
        chunk = GPU_CHUNK
    else:
        array = as_array(array, rank)
        chunk = HOST_CHUNK
    wide_dtype = np.result_type(array.dtype, np.float64)  # it may be complex
    total = 0.0
    with devices.using_device_of(array):
        flat = array.reshape(-1)
        for start in range(0, flat.size, chunk):
            wide = flat[start : start + chunk].astype(wide_dtype)
            total += float(wide.dot(wide.conj()).real)
    return total


def _sum_once(payloads: list[bytes], what: str) -> float:
    """Return the sum of squares over all ranks, in which each element counts once."""
    squares = defaultdict[Any, float](float)
    copies = defaultdict[Any, float](float)
    # How many ranks belong to the groups of a part's holders, and the part's dtype and shape.
    num_ranks = Counter[Any]()
    specs: dict[Any, str] = {}
    # Ranks that hold the same replicas and shards send the same.
    for payload, ranks in Counter(payloads).items():
        for parameter, shards, spec, found in pickle.loads(payload):
            # Ranks on which another parameter is placed may give it the same name.
            name, placed = parameter
            part = parameter, shards
            known = specs.setdefault(part, spec)
            if spec != known:
                raise ValueError(
                    f"{what}: {name} is {spec} on rank {payloads.index(payload)} and {known} on "
                    "a lower rank, so they are no replicas of one parameter. If each rank has "
                    "links of its own, as where send and recv connect them, add them to a "
                    "MultiNodeChainList, or give each parameter the attribute shardings = "
                    '(chainermn_comm.Sharding("placed", comm),)'
                )
            num_shards = math.prod(size for _, size in shards)
            squares[parameter] += ranks * found
            copies[parameter] += ranks / num_shards
            # Each rank that holds this part is in another group.
            num_ranks[part] += (
                ranks * num_shards * math.prod(size for _, size in placed)
            )
            if num_ranks[part] > len(payloads):
                raise ValueError(
                    f"{what}: not all ranks that hold {name} in parts are in this communicator: "
                    "pass one whose ranks hold the whole model"
                )
    return sum(squares[each] / copies[each] for each in squares)
