"""An array of a parameter whose values are still on their way from other machines."""

from __future__ import annotations

from threading import Event
from typing import Any


class AwaitedArray(list[Any]):
    """The list of one array in which Chainer keeps a parameter's: taking the array waits.

    Chainer reads parameters in many places, and has no hook there. But all of them take
    the array out of the list that is the parameter's attribute ``_data``.
    """

    def __init__(self, array: Any, arrived: Event) -> None:
        """Keep ``array``, whose values are there once the event is set."""
        super().__init__([array])
        self._arrived = arrived

    def __getitem__(self, index: Any) -> Any:
        self._arrived.wait()
        return super().__getitem__(index)
