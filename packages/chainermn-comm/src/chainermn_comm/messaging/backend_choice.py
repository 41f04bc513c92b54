"""The backend that takes a call's arrays: ranks compare whether these lie on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any, NamedTuple

from ..gpu import devices

if TYPE_CHECKING:
    from .backend import Backend
    from .process_group import ProcessGroup

# Flags of a rank's arrays. A rank without arrays has neither of the first two.
ON_HOST = 1
ON_GPU = 2
CAN_STAY = 4  # the backend for GPUs can move or sum them
_WORDS = {0: "none", ON_HOST: "in host memory", ON_GPU: "on a GPU"}


def memory_of(group: ProcessGroup, arrays: Sequence[Any], op: Any = None) -> int:
    """Return the flags of this rank's arrays, for a sum by the ufunc ``op`` if one is given.

    If some are NumPy's, such as scalars beside arrays on a GPU, all move through host
    memory.
    """
    on_gpu = [devices.on_gpu(array) for array in arrays]
    flags = 0
    if any(on_gpu):
        flags = ON_GPU
    elif arrays:
        return ON_HOST
    if all(on_gpu) and group.device.can_stay_on_gpu(arrays, op):
        flags |= CAN_STAY
    return flags


class Choice(NamedTuple):
    """The backend that takes the arrays of all ranks."""

    backend: Backend
    is_copied: bool  # whether this rank's arrays on GPUs must be copied to host memory


def choose_backend(group: ProcessGroup, operation: str, flags: Sequence[int]) -> Choice:
    """Choose the backend by the flags of all ranks' arrays (collective).

    RankMismatchError is raised on all ranks if some ranks' arrays are on GPUs, and
    other ranks' in host memory.
    """
    found = reduce(or_, flags)
    if not found & ON_GPU:  # nearly always
        return Choice(group.host, is_copied=False)
    if found & ON_HOST:
        own = flags[group.rank] & (ON_HOST | ON_GPU)
        group.handshake.raise_mismatch(operation, (("arrays", _WORDS[own]),))
    can_stay = reduce(and_, flags) & CAN_STAY
    if can_stay and group.device.connect():
        return Choice(group.device, is_copied=False)
    return Choice(group.host, is_copied=True)
