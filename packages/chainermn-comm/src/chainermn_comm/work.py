"""The work of means that are to be taken, which another thread may do."""

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
    """Means that are to be taken, and then given to parameters; made by a :class:`Reducer`."""

    def __init__(
        self,
        take: Callable[[], None],
        give: Callable[[], None],
        is_in_background: bool,
    ) -> None:
        """Raise nothing, not collective: ``wait`` is to call ``take``, and ``assign`` ``give``.

        ``is_in_background``: another thread waits.
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
        is_any = len(in_background) > 0
        if is_any and threading.current_thread() is threading.main_thread():
            in_background.discard(self)


# Work that has begun before; the references keep no work alive.
Earlier = Iterable[weakref.ref[Work]]


def begun_before() -> Earlier:
    """Return the work that is in the background now."""
    if not in_background:  # whose iterator takes longer
        return ()
    return [weakref.ref(work) for work in in_background]


def wait_until_ended(earlier: Earlier) -> None:
    """Wait until other threads have done that work."""
    for each in earlier:
        work = each()
        if work is not None:
            with work._pending:
                pass
