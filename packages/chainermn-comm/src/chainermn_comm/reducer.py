"""Means of gradients in steps: a reducer takes buckets, and gives back the work of their means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from .signatures import mismatch_error, view_of
from .work import Earlier, Work, begun_before


class Reducer:
    """One mean of gradients over the ranks of a communicator.

    Buckets of gradients are handed in (:meth:`add`; the whole model is one bucket),
    ranks agree (:meth:`agree`), and the means are taken by the work that :meth:`start`
    returns. ``agree`` and the work are collective. Made by
    :meth:`CommunicatorBase.make_reducer`. This class does what public methods of any
    communicator can: the means are those of ``multi_node_mean_grad``.
    """

    #: Whether buckets can be planned.
    takes_plans = False
    _handed_in: Sequence[bool] = ()  # by rank, once ranks have agreed

    def __init__(
        self, communicator: Any, zero_fill: bool, operation: str, channel: Any = None
    ) -> None:
        """Begin without gradients, on ``communicator``; not collective, raises nothing.

        ``zero_fill``, ``operation``, ``channel``: as for
        :meth:`CommunicatorBase.make_reducer`.
        """
        self._communicator = communicator
        self._rank = communicator.rank
        self._operation = operation
        self._zero_fill = zero_fill
        self._channel = channel or communicator
        self._is_apart = channel is not None
        self._buckets: list[Any] = []

    @property
    def complete(self) -> bool:
        """Whether every rank had handed in gradients when ranks agreed (not collective)."""
        return bool(self._handed_in) and all(self._handed_in)

    def add(self, bucket: Any) -> None:
        """Hand in a bucket, whose gradients stay as they are until their means are taken.

        Not collective, but all ranks hand in the same buckets, between the same
        collective calls.

        Args:
            bucket: a model as for :meth:`CommunicatorBase.allreduce_grad`.

        Raises:
            TypeError, CommunicationError: a gradient is no array of floats; CUDA fails.
                PeerError on the ranks that agree.
            RuntimeError: ranks have agreed.
        """
        if self._handed_in:
            raise RuntimeError(
                f"rank {self._rank}: {self._operation}: add() after agree()"
            )
        self._buckets.append(self._checked(bucket))

    def _checked(self, bucket: Any) -> Any:
        return bucket

    def add_planned(self, bucket: Any) -> Work:
        """Hand in a bucket that all ranks, with equal settings, know to come; return its work.

        Its means are taken before or after ranks agree, and every rank must take them.
        Arrays are like the parameters' own, all NumPy's or all of one GPU. What is
        missing here travels as zeros, and the means go to new memory. On GPUs the work
        waits for the gradients by itself. Not collective.

        Raises:
            NotImplementedError: ``takes_plans`` is False.
            TypeError, CommunicationError: as :meth:`add` does, on this rank alone: the
                caller notifies the other ranks.
        """
        raise NotImplementedError(f"{type(self._communicator).__name__} takes no plans")

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        """Exchange payloads and check that all ranks mean the same gradients (collective).

        That is one handshake. A rank may have handed in nothing: no means then, see
        ``complete``.

        Args:
            signature: what else must be equal on all ranks, as for
                :meth:`CommunicatorBase.handshake`.
            payload: bytes for the other ranks; more than 64 take a second exchange.

        Returns:
            Every rank's payload, in rank order, on every rank.

        Raises:
            RankMismatchError: on all ranks, when operations, signatures or gradients
                differ.
            PeerError: another rank raised an error instead of agreeing.
        """
        if isinstance(payload, bytes):  # else the handshake refuses it, on all ranks
            payload = bytes([len(self._buckets) > 0]) + payload
        rows = self._communicator.handshake(self._operation, signature, payload=payload)
        self._handed_in = [row[0] > 0 for row in rows]
        return [row[1:] for row in rows]

    def start(self) -> Work:
        """Return the work of the means of what was added, once for each reducer.

        Not collective, but all ranks call it; with a channel, the work may be another
        thread's. On GPUs a mean that starts later waits for it, so this thread may take
        none before that ends.

        Raises:
            RankMismatchError: on all ranks, when only some had handed in gradients.
            RuntimeError: ranks haven't agreed.
        """
        if not self._handed_in:
            raise RuntimeError(
                f"rank {self._rank}: {self._operation}: agree() before start()"
            )
        if len(set(self._handed_in)) > 1:
            texts = ["handed in" if each else "none" for each in self._handed_in]
            views = [view_of(self._operation, [("gradients", text)]) for text in texts]
            raise mismatch_error(self._operation, self._rank, views)
        return Work(partial(self._take, begun_before()), self._assign, self._is_apart)

    def _take(self, earlier: Earlier) -> None:
        """Take the means; on GPUs, after that work has ended."""
        for model in self._buckets:
            self._channel.multi_node_mean_grad(model, self._zero_fill)

    def _assign(self) -> None:
        pass  # they have their means already
