"""The block of :func:`join`: what its ranks tell each other before each collective update."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from chainermn_comm import CommunicatorBase, PeerError, RankMismatchError
from chainermn_comm.errors import describe

from ..collective_errors import allgather_checked, mismatch_hint
from ..slots import raise_if_different

if TYPE_CHECKING:
    from .collective_update import CollectiveUpdate

_OPERATION = "join"


class _News(NamedTuple):
    """What a rank tells the others. Optimizers are counted from 0 in the arguments of join()."""

    due: int | None  # the optimizer that it updates; None once it has left the block
    unfinished: list[int]  # those that have made updates since their last steps
    error: str | None  # the exception by which it leaves the block


class JoinBlock:
    """One rank's present block, with the optimizers that may be updated in it.

    Every collective update in the block begins with an exchange of news. So a rank that
    has left learns which optimizer the others update next, and every rank learns when
    another one leaves by an exception, instead of waiting for that rank.
    """

    def __init__(
        self, communicator: CommunicatorBase, optimizers: list[CollectiveUpdate]
    ) -> None:
        self.communicator = communicator
        self.optimizers = optimizers
        self.has_left = False  # whether this rank has no more examples
        self._end: str | None = None  # whose exception has ended the block for all

    def holds(self, optimizer: CollectiveUpdate) -> bool:
        return any(each is optimizer for each in self.optimizers)

    def begin_update(self, optimizer: CollectiveUpdate) -> None:
        """Tell the ranks that this one updates ``optimizer`` (collective).

        Raises:
            PeerError: an exception ended the block on another rank.
            RankMismatchError: another rank updates another optimizer.
        """
        if self._end is not None:
            raise PeerError(self._end)
        are_due = [each is optimizer for each in self.optimizers]
        self._exchange(_News(are_due.index(True), [], None))

    def take_part(self) -> None:
        """Take part in the updates of other ranks until all have left (collective)."""
        if self._end is not None:  # this rank was told, and went on
            raise PeerError(self._end)
        self.has_left = True
        while True:
            unfinished = [
                number
                for number, optimizer in enumerate(self.optimizers)
                if optimizer.has_begun
            ]
            due = self._exchange(_News(None, unfinished, None))
            if due is None:
                return
            # A rank whose update has failed may go on with its next one.
            with suppress(PeerError):
                self.optimizers[due].update_without_examples()

    def leave_by(self, error: Exception) -> None:
        """Tell the ranks that this one leaves by an exception (collective).

        Where ranks were about to do something else, that fails on all of them, and they
        are told next.
        """
        while self._end is None:
            with suppress(PeerError, RankMismatchError):
                text = describe(error, self.communicator.rank)
                self._exchange(_News(None, [], text))

    def _exchange(self, news: _News) -> int | None:
        """Return the number of the optimizer to update next, or None if all have left."""
        with mismatch_hint("a block of join()"):
            all_news = allgather_checked(self.communicator, _OPERATION, lambda: news)
        errors = [
            f"rank {rank} left it by {each.error}"
            for rank, each in enumerate(all_news)
            if each.error is not None
        ]
        if errors:
            self._end = f"the block of join() has ended: {'; '.join(errors)}"
            for optimizer in self.optimizers:
                optimizer.accumulation.clear()
            raise PeerError(self._end)
        due = {each.due for each in all_news if each.due is not None}
        if len(due) > 1:
            name = "the optimizer to update, counted from 0 in the arguments of join()"
            entries = [[(name, str(each.due))] for each in all_news]
            raise_if_different(_OPERATION, self.communicator.rank, entries)
        if not due:
            due = {number for each in all_news for number in each.unfinished}
        return min(due, default=None)


# The block that this thread is in.
current_block: ContextVar[JoinBlock | None] = ContextVar("current_block", default=None)
