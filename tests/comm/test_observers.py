"""What observes a communicator's calls: the only one is called directly, several in turn."""

from __future__ import annotations

from chainermn_comm.observers import NOBODY, CallObserver, combined


class Recording(CallObserver):
    """Writes down what it observes."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls

    def collective(
        self, operation: str, sequence: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        self._calls.append((self, operation, sequence, root, nbytes))

    def leave(self) -> None:
        self._calls.append((self, "leave"))


class Waiting(Recording):
    """Asks when all have come."""

    def arrived(self, operation: str, sequence: int) -> None:
        self._calls.append((self, "arrived", operation, sequence))


def test_the_only_observer_is_called_directly_and_no_one_is_nothing():
    one = Recording([])
    assert combined(None, one) is one
    assert combined(None) is not combined()  # no state is shared
    assert combined().arrived is None
    combined().collective("allreduce", 1)


def test_several_observers_are_called_in_turn():
    calls: list[tuple[object, ...]] = []
    first, second = Recording(calls), Waiting(calls)
    both = combined(first, second)
    both.collective("allreduce", 1, nbytes=4)
    both.arrived("allreduce", 1)
    both.message("send", 1, 7)
    both.leave()
    both.release()
    begun = [(each, "allreduce", 1, NOBODY, 4) for each in (first, second)]
    left = [(each, "leave") for each in (first, second)]
    assert calls == [*begun, (second, "arrived", "allreduce", 1), *left]
    assert combined(first, Recording(calls)).arrived is None
