"""The base class of iterators that several ranks share."""

from __future__ import annotations

import copy
from typing import Any

from chainer.dataset import Iterator

from chainermn_comm import CommunicatorBase

from ..wrappers import AttributeProxy, UnpicklableMixin


class SharedIterator(AttributeProxy, UnpicklableMixin, Iterator):
    """A proxy of an iterator: it reads and sets the attributes of the actual one.

    A copy has a copy of the actual iterator and the same communicator. It can't be pickled
    (TypeError).
    """

    _OWN = AttributeProxy._OWN | {"communicator"}

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
    if isinstance(iterator, SharedIterator):
        raise TypeError(
            f"the iterator is a {type(iterator).__name__}, which ranks share: use it as it is"
        )
