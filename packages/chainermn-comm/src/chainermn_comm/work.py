"""The work of taking means, which another thread may do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from .errors import without_traceback

# Work of another thread, from its start until the main thread's stream waits for the
# work, or nobody refers to it. All ranks start the same work in the same order, which
# may end earlier on some ranks.
in_background: weakref.WeakSet[Work] = weakref.WeakSet()


class Work:
    """Means that are to be taken and then assigned to parameters; made by a :class:`Reducer`."""

    def __init__(
        self,
        take: Callable[[], None],
        give: Callable[[], None],
        is_in_background: bool,
    ) -> None:
        """Make work that has not begun (not collective; raises nothing).

        Args:
            take: takes the means; called by :meth:`wait`.
            give: gives the means to parameters; called by :meth:`assign`.
            is_in_background: whether another thread calls :meth:`wait`.
        """
        self._take = take
        self._give = give
        self._taking = threading.Lock()  # held by the thread that is in `wait`
        self._has_ended = False
        self._pending = threading.Lock()  # held until `wait` has ended
        self._pending.acquire()  # it takes a tenth of an Event's time
        self._failure: BaseException | None = None  # like the one that `wait` raised
        if is_in_background:
            in_background.add(self)

    def wait(self) -> None:
        """Take the means (collective), in the thread that uses the data's communicator.

        On GPUs the means are enqueued on the current stream. If ranks could not compare
        gradients before, the call raises what
        :meth:`CommunicatorBase.multi_node_mean_grad` raises. A second call isn't
        collective: it waits until the first call has ended, and raises the error of the
        first call, if any.
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
        """Give parameters their means (not collective).

        RuntimeError is raised before :meth:`wait` has ended. If :meth:`wait` has raised
        an error, this call raises the same error.
        """
        if not self._has_ended:
            raise RuntimeError(
                "a Work's means can be assigned once its wait() has ended"
            )
        self.leave_background()
        self.wait()  # returns at once, or raises again
        self._give()

    def leave_background(self) -> None:
        """Note that the main thread's stream waits for the work (not collective; raises nothing).

        In another thread the call does nothing, since that thread may only have enqueued
        the work.
        """
        is_any = len(in_background) > 0
        if is_any and threading.current_thread() is threading.main_thread():
            in_background.discard(self)


# Work that has begun earlier; the references keep no work alive.
Earlier = Iterable[weakref.ref[Work]]


def begun_before() -> Earlier:
    """Return the work that is in the background now."""
    if not in_background:  # whose iterator takes longer
        return ()
    return [weakref.ref(work) for work in in_background]


def wait_until_ended(earlier: Earlier) -> None:
    """Wait until other threads have done ``earlier`` work."""
    for each in earlier:
        work = each()
        if work is not None:
            with work._pending:
                pass
