"""The block of :func:`join`: its ranks exchange rows before each collective update."""

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


class _Row(NamedTuple):
    """The facts that a rank sends to all others, with the indices of join()'s optimizers."""

    has_left: bool = True  # it has no more examples
    # The optimizer that the rank updates; after the rank has left, an optimizer that has
    # made updates without their step yet.
    optimizer: int | None = None
    error: str | None = None  # the exception by which the rank leaves the block


class JoinBlock:
    """One rank's present block, with the optimizers that may be updated in it.

    Every collective update in the block begins with an exchange of rows. So a rank that has
    left learns which optimizer is updated next, and every rank learns if another rank
    leaves by an exception, instead of waiting for it.
    """

    def __init__(
        self, communicator: CommunicatorBase, optimizers: list[CollectiveUpdate]
    ) -> None:
        self.optimizers = optimizers
        self._communicator = communicator
        self._end: str | None = None  # whose exception has ended the block for all

    def begin_update(self, optimizer: CollectiveUpdate) -> None:
        """Tell the other ranks that this rank updates ``optimizer`` (collective).

        Raises:
            PeerError: an exception ended the block on another rank.
            RankMismatchError: another rank updates another optimizer.
        """
        self._exchange(_Row(False, self.optimizers.index(optimizer)))

    def take_part(self) -> None:
        """Take part in the updates of other ranks until all have left (collective)."""
        while True:
            unfinished = [
                number
                for number, optimizer in enumerate(self.optimizers)
                if optimizer.accumulation.num_calls > 0
            ]
            number = self._exchange(_Row(optimizer=min(unfinished, default=None)))
            if number is None:
                return
            # A rank whose update has failed may go on with its next update.
            with suppress(PeerError):
                self.optimizers[number].update_without_examples()

    def leave_by(self, error: Exception) -> None:
        """Tell the other ranks that this rank leaves by an exception (collective).

        If the other ranks are in another call at this moment, that call fails on all ranks,
        and this rank tells them again.
        """
        text = describe(error, self._communicator.rank)
        while self._end is None:
            with suppress(PeerError, RankMismatchError):
                self._exchange(_Row(error=text))

    def _exchange(self, own: _Row) -> int | None:
        """Return the number of the optimizer to update next, or None if all have left."""
        if self._end is not None:  # this rank knew of the error, and went on
            raise PeerError(self._end)
        with mismatch_hint("a block of join()"):
            rows = allgather_checked(self._communicator, _OPERATION, lambda: own)
        errors = [
            f"rank {rank} left it by {row.error}"
            for rank, row in enumerate(rows)
            if row.error is not None
        ]
        if errors:
            self._end = f"the block of join() has ended: {'; '.join(errors)}"
            for optimizer in self.optimizers:
                optimizer.accumulation.clear()
            raise PeerError(self._end)
        updated = {row.optimizer for row in rows if not row.has_left}
        if len(updated) > 1:
            name = "the optimizer to update, counted from 0 in the arguments of join()"
            facts = [{name: row.optimizer} for row in rows]
            raise_if_different(_OPERATION, self._communicator.rank, facts)
        unfinished = {row.optimizer for row in rows} - {None}
        return min(updated or unfinished, default=None)


# The block that this thread is in.
current_block: ContextVar[JoinBlock | None] = ContextVar("current_block", default=None)
