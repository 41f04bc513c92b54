"""Arrays of parameters whose values are still on their way from other machines."""

from __future__ import annotations

import os
from concurrent.futures import Future, wait
from typing import Any
from weakref import WeakSet

from ...background_thread import EXIT_TIMEOUT_SECONDS

_in_flight: WeakSet[Future[None]] = WeakSet()


class AwaitedArray(list[Any]):
    """The one-element list in which Chainer keeps a parameter's array: taking the array waits.

    Chainer reads parameters in many places, and has no hook there. But all of them take
    the array out of the list that is the parameter's attribute ``_data``.

    Attributes:
        arrival: done once the values are there, or can't come; None if they are there.
    """

    arrival: Future[None] | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.arrival is not None:
            self.arrival.result()
        return super().__getitem__(index)


def await_values(param: Any, arrival: Future[None]) -> None:
    """Let everyone who takes the parameter's array wait, or raise the error of its values.

    A copy that shares the array waits, too, if it was made after the first call.
    """
    if not isinstance(param._data, AwaitedArray):
        param._data = AwaitedArray(param._data)
    param._data.arrival = arrival
    _in_flight.add(arrival)


def stop_waiting(param: Any) -> None:
    """Let the parameter's array be taken as it is."""
    if isinstance(param._data, AwaitedArray):
        param._data.arrival = None


def _wait_for_all() -> None:
    wait(list(_in_flight), EXIT_TIMEOUT_SECONDS)


# The new process has no thread in which values could arrive.
os.register_at_fork(before=_wait_for_all)
