"""A mean of gradients in progress, taken in steps that other work may go between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import raise_mismatch, view_of

# Means that another thread takes, from before it begins until the main one's stream waits for them.
# So all ranks have the same here in the same call.
in_background: weakref.WeakSet[MeanInProgress] = weakref.WeakSet()


class MeanInProgress:
    """A mean of gradients over the ranks of a communicator, in steps.

    Buckets of gradients are handed in (:meth:`add`), ranks agree (:meth:`agree`), the means are
    taken (:meth:`reduce`), and parameters get them (:meth:`assign`). The whole model at once is one
    bucket. Where ranks have planned buckets, their means may be taken before ranks agree. Of these
    steps ``agree`` and ``reduce`` are collective, and all ranks take all of them in this order.

    Made by :meth:`CommunicatorBase.start_mean`, one after the other. This class does what public
    methods of any communicator can: the means are those of ``multi_node_mean_grad``.
    """

    #: Whether buckets can be planned.
    takes_plans = False

    def __init__(
        self, communicator: Any, zero_fill: bool, operation: str, through: Any = None
    ) -> None:
        """Begin without gradients; ``communicator`` is that whose ranks agree.

        ``zero_fill``, ``operation`` and ``through`` are as for
        :meth:`CommunicatorBase.start_mean`. It is not collective, and raises nothing.
        """
        self._communicator, self._operation = communicator, operation
        self._through, self._zero_fill = through or communicator, zero_fill
        self._models: list[Any] = []
        if through is not None:
            in_background.add(self)
        self._handed_in = [False]  # by rank, once ranks have agreed

    @property
    def complete(self) -> bool:
        """Whether every rank had handed in gradients when ranks agreed (not collective)."""
        return all(self._handed_in)

    def add(self, model: Any, planned: bool = False) -> None:
        """Hand in a bucket, whose gradients stay as they are until their means are taken.

        Not collective, but all ranks hand in the same buckets in the same order.

        Args:
            model: as for :meth:`CommunicatorBase.allreduce_grad`.
            planned: whether all ranks know already that this bucket comes, of arrays like the
                parameters' own, all NumPy's or all of one GPU. What is missing here travels as
                zeros, and the means go to new memory: see :meth:`reduce_planned`.

        Raises:
            NotImplementedError: ``planned``, on a communicator that can't, or on a mean that was
                not started ``through`` another one.
            TypeError, CommunicationError: a gradient is no array of floats; CUDA fails. PeerError
                on the ranks that agree, unless it is ``planned``: the caller notifies those.
        """
        if planned:
            raise NotImplementedError(f"{type(self._communicator).__name__} takes no plans")
        self._models.append(model)

    def agree(self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b"") -> list[bytes]:
        """Exchange payloads and check that all ranks mean the same gradients (collective).

        That is one handshake of the operation. A rank may have handed in nothing: no means can be
        taken then, see ``complete``.

        Args:
            signature: what else must be equal on all ranks, as for
                :meth:`CommunicatorBase.handshake`.
            payload: bytes for the other ranks, 64 at most.

        Returns:
            Every rank's payload, in rank order, on every rank.

        Raises:
            RankMismatchError: on all ranks, when operations, signatures or gradients differ.
            PeerError: another rank raised an error instead of agreeing.
        """
        has_gradients = bytes([len(self._models) > 0])
        payload = has_gradients + payload
        rows = self._communicator.handshake(self._operation, signature, payload=payload)
        self._handed_in = [row[0] > 0 for row in rows]
        return [row[1:] for row in rows]

    def reduce_planned(self, number: int) -> None:
        """Take the means of planned buckets, as another thread hands them in (collective).

        To be called while buckets are handed in, in another thread than ``add`` and ``agree``, on a
        mean that was started ``through`` another communicator. Ranks need not have agreed;
        parameters get nothing before :meth:`assign`. On GPUs it uses the current stream, which
        waits for gradients by itself; the caller waits for that stream before it uses the means.

        Args:
            number: how many buckets, 1 or more, the same on all ranks. Every rank must hand in all
                of them.

        Raises:
            NotImplementedError: there are no plans on this communicator, or the mean was not
                started ``through`` another one.
        """
        raise NotImplementedError(f"{type(self._communicator).__name__} takes no plans")

    def reduce(self) -> None:
        """Take the means of what was handed in since the last call (collective).

        Raises:
            RankMismatchError: on all ranks, when only some had handed in gradients; or as
                :meth:`CommunicatorBase.multi_node_mean_grad` does, where ranks could not compare
                gradients before.
        """
        require_all(self._operation, self._communicator.rank, self._handed_in)
        for model in self._models:
            self._through.multi_node_mean_grad(model, self._zero_fill)
        self._models.clear()

    def assign(self) -> None:
        """Give parameters their means, which must have been taken; raises nothing of its own.

        Not collective.
        """
        self.leave_background()

    def leave_background(self) -> None:
        """Say, in the main thread, that no work of another one is ahead of its stream any more.

        Not collective; it raises nothing.
        """
        # Another thread may only have enqueued it: then it stays until nobody holds the mean.
        if threading.current_thread() is threading.main_thread():
            in_background.discard(self)


def require_all(operation: str, rank: int, handed_in: Sequence[bool]) -> None:
    """Raise RankMismatchError if some ranks have handed in gradients, and others have not."""
    if len(set(handed_in)) > 1:
        texts = ["handed in" if each else "none" for each in handed_in]
        views = [view_of(operation, [("gradients", text)]) for text in texts]
        raise_mismatch(operation, rank, views)
