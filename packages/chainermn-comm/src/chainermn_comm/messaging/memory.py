"""Where the arrays of a call lie, which ranks compare: in host memory, or on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import devices

if TYPE_CHECKING:
    from .backend import Backend
    from .process_group import ProcessGroup

# Flags of a rank's arrays; callers may add flags from 8 on. A rank without arrays has
# neither of the first two.
ON_HOST = 1
ON_GPU = 2
CAN_STAY = 4  # the backend for GPUs can move or sum them
_WORDS = {0: "none", ON_HOST: "in host memory", ON_GPU: "on a GPU"}


def memory_of(group: ProcessGroup, arrays: Sequence[Any], op: Any = None) -> int:
    """Return the flags of this rank's arrays, for a sum by the ufunc ``op`` if one is given.

    Where some are NumPy's, such as scalars beside arrays on a GPU, all move through
    host memory.
    """
    on_gpu = [devices.on_gpu(array) for array in arrays]
    flags = 0
    if any(on_gpu):
        flags = ON_GPU
    elif arrays:
        return ON_HOST
    if all(on_gpu) and group.device.takes(arrays, op):
        flags |= CAN_STAY
    return flags


def backend_for(group: ProcessGroup, operation: str, flags: Sequence[int]) -> Backend:
    """Return the backend that takes the arrays of all ranks, whose flags these are (collective).

    RankMismatchError is raised on all ranks if some ranks' arrays are on GPUs, and
    other ranks' in host memory.
    """
    if not any([each & ON_GPU for each in flags]):  # nearly always
        return group.host
    if any([each & ON_HOST for each in flags]):
        own = _WORDS[flags[group.rank] & (ON_HOST | ON_GPU)]
        group.handshake.raise_mismatch(operation, (("arrays", own),))
    if all([each & CAN_STAY for each in flags]) and group.device.connect():
        return group.device
    return group.host
