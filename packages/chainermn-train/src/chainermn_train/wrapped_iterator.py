"""What the iterators that several ranks share have in common: they are used as the actual one."""

from __future__ import annotations

import copy
from typing import Any

from chainer.dataset import Iterator

from chainermn_comm import CommunicatorBase

from .copying import SharesCommunicator
from .forwarding import Forwarding


class WrappedIterator(Forwarding, SharesCommunicator, Iterator):
    """An iterator around another one, whose attributes it has, to read and to set.

    A copy has a copy of the actual iterator and the same communicator. It can't be pickled
    (TypeError).
    """

    _OWN = Forwarding._OWN | {"communicator"}

    def __init__(self, actual: Any, communicator: CommunicatorBase) -> None:
        super().__init__(actual)
        self.communicator = communicator

    def __copy__(self) -> Any:
        twin = super().__copy__()
        twin.actual = copy.copy(self.actual)
        return twin

    def finalize(self) -> None:
        """Release what this rank's actual iterator holds (not collective)."""
        if self.actual is not None:
            self.actual.finalize()

    def __del__(self) -> None:
        """Do nothing: the actual iterator is finalized when nobody holds it any more."""


def refuse_shared(iterator: Any) -> None:
    """Raise TypeError if ranks share the iterator already, by either way."""
    if isinstance(iterator, WrappedIterator):
        raise TypeError(
            f"the iterator is a {type(iterator).__name__}, which ranks share: use it as it is"
        )
