"""Means of gradients in steps: a reducer takes buckets, and returns the work of their means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from .signatures import mismatch_error, view_of
from .work import Earlier, Work, begun_before


class Reducer:
    """One mean of gradients over the ranks of a communicator, in three steps.

    :meth:`add` takes a bucket of gradients, such as a whole model; it can be called
    several times. In :meth:`agree` ranks agree. The :class:`Work` that :meth:`start`
    returns takes the means. ``agree`` and the work are collective.

    A reducer is made by :meth:`CommunicatorBase.make_reducer`. This class uses only
    public methods of a communicator, and takes means by ``multi_node_mean_grad``.
    """

    #: Whether buckets can be planned.
    takes_plans = False
    _added_by_rank: Sequence[bool] = ()  # by rank, once ranks have agreed

    def __init__(
        self, communicator: Any, zero_fill: bool, operation: str, channel: Any = None
    ) -> None:
        """Begin without gradients on ``communicator`` (not collective; raises nothing).

        ``zero_fill``, ``operation`` and ``channel`` are as for
        :meth:`CommunicatorBase.make_reducer`.
        """
        self._communicator = communicator
        self._rank = communicator.rank
        self._operation = operation
        self._zero_fill = zero_fill
        self._channel = channel or communicator
        self._on_channel = channel is not None
        self._buckets: list[Any] = []

    @property
    def complete(self) -> bool:
        """Whether every rank had added gradients when ranks agreed (not collective)."""
        return bool(self._added_by_rank) and all(self._added_by_rank)

    def add(self, bucket: Any) -> None:
        """Add a bucket, whose gradients must stay unchanged until their means are taken.

        Not collective, but all ranks add the same buckets, between the same collective
        calls.

        Args:
            bucket: a model as for :meth:`CommunicatorBase.allreduce_grad`.

        Raises:
            TypeError, CommunicationError: a gradient is no array of floats, or CUDA
                fails (PeerError on ranks that agree meanwhile).
            RuntimeError: ranks have already agreed.
        """
        if self._added_by_rank:
            raise RuntimeError(
                f"rank {self._rank}: {self._operation}: add() after agree()"
            )
        self._buckets.append(self._checked(bucket))

    def _checked(self, bucket: Any) -> Any:
        return bucket

    def add_planned(self, bucket: Any) -> Work:
        """Add a ``bucket`` that all ranks, with equal settings, have planned; return its work.

        Not collective. The means may be taken before ranks agree, and every rank must
        take them. Gradients have the parameters' shapes and dtypes, all in host memory
        or all on one GPU. A missing gradient travels as zeros, and means go to new
        memory. On GPUs the work itself waits for the gradients.

        Raises:
            NotImplementedError: ``takes_plans`` is False.
            TypeError, CommunicationError: as for :meth:`add`, but on this rank alone:
                the caller must notify the other ranks.
        """
        raise NotImplementedError(f"{type(self._communicator).__name__} takes no plans")

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        """Exchange payloads and check that all ranks mean the same gradients (collective).

        This is one handshake. If a rank has added nothing, no means are taken, see
        ``complete``.

        Args:
            signature: further facts that must be equal on all ranks, as for
                :meth:`CommunicatorBase.handshake`.
            payload: bytes for the other ranks; more than 64 bytes take a second
                exchange.

        Returns:
            The payloads of all ranks, in rank order.

        Raises:
            RankMismatchError: operations, signatures or gradients differ; raised on all
                ranks.
            PeerError: another rank raised an error instead of agreeing.
        """
        # Otherwise the handshake refuses it on all ranks.
        if isinstance(payload, bytes):
            payload = bytes([len(self._buckets) > 0]) + payload
        rows = self._communicator.handshake(self._operation, signature, payload=payload)
        self._added_by_rank = [row[0] > 0 for row in rows]
        return [row[1:] for row in rows]

    def start(self) -> Work:
        """Return the work of all added buckets' means; once for each reducer.

        Not collective, but all ranks call it. With a channel, another thread may do the
        work. On GPUs means that start later wait for this work, so the calling thread
        must not take any before the work has ended.

        Raises:
            RankMismatchError: only some ranks had added gradients; raised on all ranks.
            RuntimeError: ranks haven't agreed.
        """
        if not self._added_by_rank:
            raise RuntimeError(
                f"rank {self._rank}: {self._operation}: agree() before start()"
            )
        if len(set(self._added_by_rank)) > 1:
            texts = ["added" if each else "none" for each in self._added_by_rank]
            views = [view_of(self._operation, [("gradients", text)]) for text in texts]
            raise mismatch_error(self._operation, self._rank, views)
        return Work(partial(self._take, begun_before()), self._assign, self._on_channel)

    def _take(self, earlier: Earlier) -> None:
        """Take the means; on GPUs, after the ``earlier`` work has ended."""
        for model in self._buckets:
            self._channel.multi_node_mean_grad(model, self._zero_fill)

    def _assign(self) -> None:
        pass  # the parameters have their means already
