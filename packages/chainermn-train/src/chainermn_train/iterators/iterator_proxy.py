"""The proxy that iterators over several ranks put in the place of a rank's own."""

from __future__ import annotations

import copy
from typing import Any

from chainer.dataset import Iterator

from chainermn_comm import CommunicatorBase

from ..wrappers import AttributeProxy


class IteratorProxy(AttributeProxy, Iterator):
    """Reads and sets the actual iterator's attributes; a copy of the proxy copies the iterator."""

    _OWN = AttributeProxy._OWN | {"communicator"}

    def __init__(self, actual: Any, communicator: CommunicatorBase) -> None:
        super().__init__(actual)
        self.communicator = communicator

    @property
    def actual_iterator(self) -> Any:
        """Chainer 7's name of ``actual`` (not collective)."""
        return self.actual

    def __copy__(self) -> Any:
        twin: Any = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin.actual = copy.copy(self.actual)
        return twin

    def finalize(self) -> None:
        """Release what this rank's actual iterator holds (not collective)."""
        self.actual.finalize()

    def __del__(self) -> None:
        """Do nothing: the actual iterator is finalized when nothing refers to it."""


def refuse_proxy(iterator: Any) -> None:
    """Raise TypeError if ranks already share the iterator."""
    if isinstance(iterator, IteratorProxy):
        raise TypeError(
            f"the iterator is a {type(iterator).__name__}, which ranks share: use it as it is"
        )
