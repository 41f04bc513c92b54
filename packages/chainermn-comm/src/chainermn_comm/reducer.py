"""Means of gradients in steps: a reducer takes buckets, and gives back the work of their means."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from .errors import without_traceback
from .signatures import mismatch_error, view_of

# Work of another thread, from its start until the main thread's stream waits for the
# work, or nobody refers to it. All ranks start the same work in the same order, which
# may end earlier on some ranks.
in_background: weakref.WeakSet[Work] = weakref.WeakSet()


class Work:
    """Means that are to be taken, and then given to parameters; made by :meth:`Reducer.start`."""

    def __init__(
        self,
        take: Callable[[], None],
        give: Callable[[], None],
        is_in_background: bool,
        is_planned: bool = False,
    ) -> None:
        """Raise nothing, not collective: ``wait`` is to call ``take``, and ``assign`` ``give``.

        ``is_in_background``: another thread waits. ``is_planned``: it needs the main
        thread to end.
        """
        self._take = take
        self._give = give
        self._is_in_background = is_in_background
        self.is_planned = is_planned
        self._taking = threading.Lock()  # of the thread that is in `wait`
        self._has_ended = False
        self._failure: BaseException | None = None  # like the one that `wait` raised
        self._pending = threading.Lock()  # held until `wait` has ended
        self._pending.acquire()  # it takes a tenth of an Event's time
        if is_in_background:
            in_background.add(self)

    def wait(self) -> None:
        """Take the means (collective), in whichever thread uses the communicator of the data.

        On GPUs that is done in the order of the current stream. It raises what
        :meth:`CommunicatorBase.multi_node_mean_grad` raises where ranks could not
        compare gradients before. A later call, which isn't collective, returns once the
        first one has ended, or raises what that one raised.
        """
        with self._taking:
            if not self._has_ended:
                try:
                    self._take()
                except BaseException as error:
                    self._failure = without_traceback(error)
                    raise
                finally:
                    self._has_ended = True
                    self._pending.release()
            elif self._failure is not None:
                raise without_traceback(self._failure)

    def assign(self) -> None:
        """Give parameters their means; not collective.

        RuntimeError is raised before :meth:`wait` has ended, and what that raised, if
        anything, afterwards.
        """
        if not self._has_ended:
            raise RuntimeError(
                "a Work's means can be assigned once its wait() has ended"
            )
        self.leave_background()
        self.wait()  # returns at once, or raises again
        self._give()

    def leave_background(self) -> None:
        """Say that the main thread's stream waits for the work (not collective, raises nothing).

        In another thread this does nothing, since that may only have enqueued the work.
        """
        if (
            self._is_in_background
            and threading.current_thread() is threading.main_thread()
        ):
            in_background.discard(self)


class Reducer:
    """One mean of gradients over the ranks of a communicator.

    Buckets of gradients are handed in (:meth:`add`; the whole model is one bucket),
    ranks agree (:meth:`agree`), and the means are taken by the work that :meth:`start`
    returns. Work for a plan may start before. ``agree`` and the work are collective.
    Made by :meth:`CommunicatorBase.make_reducer`. This class does what public methods
    of any communicator can: the means are those of ``multi_node_mean_grad``.
    """

    #: Whether buckets can be planned.
    takes_plans = False
    _before: Sequence[weakref.ref[Work]] = ()
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
        self._models: list[Any] = []

    @property
    def complete(self) -> bool:
        """Whether every rank had handed in gradients when ranks agreed (not collective)."""
        return bool(self._handed_in) and all(self._handed_in)

    def add(self, bucket: Any, planned: bool = False) -> None:
        """Hand in a bucket, whose gradients stay as they are until their means are taken.

        Not collective, but all ranks hand in the same buckets, between the same
        collective calls.

        Args:
            bucket: a model as for :meth:`CommunicatorBase.allreduce_grad`.
            planned: whether all ranks, with equal settings, know already that this
                bucket comes, of arrays like the parameters' own, all NumPy's or all of
                one GPU. What is missing here travels as zeros, and the means go to new
                memory.

        Raises:
            NotImplementedError: ``planned``, on a communicator that can't, or without a
                channel.
            TypeError, CommunicationError: a gradient is no array of floats; CUDA fails.
                PeerError on the ranks that agree, unless it is ``planned``: the caller
                notifies those.
            RuntimeError: ranks have agreed, and it isn't ``planned``.
        """
        self._check_bucket(planned)
        self._models.append(bucket)

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        """Exchange payloads and check that all ranks mean the same gradients (collective).

        That is one handshake. A rank may have handed in nothing: no means then, see
        ``complete``.

        Args:
            signature: what else must be equal on all ranks, as for
                :meth:`CommunicatorBase.handshake`.
            payload: bytes for the other ranks, 64 at most.

        Returns:
            Every rank's payload, in rank order, on every rank.

        Raises:
            RankMismatchError: on all ranks, when operations, signatures or gradients
                differ.
            PeerError: another rank raised an error instead of agreeing.
        """
        if isinstance(payload, bytes):  # else the handshake refuses it, on all ranks
            payload = bytes([len(self._models) > 0]) + payload
        rows = self._communicator.handshake(self._operation, signature, payload=payload)
        self._handed_in = [row[0] > 0 for row in rows]
        return [row[1:] for row in rows]

    def start(self, planned: int = 0) -> Work:
        """Return the work of the means of what was handed in, once for each reducer.

        Not collective, but all ranks call it; with a channel, the work may be another
        thread's. On GPUs a mean that starts later waits for it, so this thread may take
        none before that ends.

        Args:
            planned: how many buckets are planned, the same on all ranks; 0 if none is.
                Their work takes means while they are handed in, before or after ranks
                agree, and every rank must hand in all of them. On GPUs it waits for
                gradients by itself.

        Raises:
            NotImplementedError: as :meth:`add` does.
            RankMismatchError: on all ranks, when only some had handed in gradients.
            RuntimeError: ranks haven't agreed, and none is planned.
        """
        if planned:
            self._check_plan()
        elif not self._handed_in:
            raise RuntimeError(
                f"rank {self._rank}: {self._operation}: agree() before start()"
            )
        elif len(set(self._handed_in)) > 1:
            texts = ["handed in" if each else "none" for each in self._handed_in]
            views = [view_of(self._operation, [("gradients", text)]) for text in texts]
            raise mismatch_error(self._operation, self._rank, views)
        if in_background:  # whose iterator takes microseconds
            self._before = [
                weakref.ref(each) for each in in_background if not each.is_planned
            ]
        return Work(
            partial(self._take, planned), self._assign, self._is_apart, planned > 0
        )

    def _wait_for_those_before(self) -> None:
        """Wait until the work that was in the background when this began has ended."""
        for before in self._before:
            if (work := before()) is not None:
                with work._pending:  # until its `wait` has ended, which holds this
                    pass

    def _check_bucket(self, planned: bool) -> None:
        if planned:
            self._check_plan()
        elif self._handed_in:
            raise RuntimeError(
                f"rank {self._rank}: {self._operation}: add() after agree()"
            )

    def _check_plan(self) -> None:
        raise NotImplementedError(f"{type(self._communicator).__name__} takes no plans")

    def _take(self, planned: int) -> None:
        for model in self._models:
            self._channel.multi_node_mean_grad(model, self._zero_fill)

    def _assign(self) -> None:
        pass  # they have their means already
