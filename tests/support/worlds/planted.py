"""Faults in the middle of what communicators do, for the scripts of jobs to plant on a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NoReturn


def say_failing():
    """Print when this rank fails, for `failing.seconds_since_failure`."""
    print("failing at", time.time(), flush=True)


def fail_while_memory_is_shared(error: BaseException):
    """Raise it between the steps in which ranks of a node come to share memory."""
    from chainermn_comm.sums.shared_window import SharedWindow

    SharedWindow.is_shared = _failing(error)  # type: ignore[method-assign]


def stop_while_a_thread_shares_memory():
    """Be stopped where another thread than the main one comes to share memory with other ranks."""
    from chainermn_comm.sums.shared_window import SharedWindow

    real = SharedWindow.open

    def stop(*args) -> SharedWindow:
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args)

    SharedWindow.open = stop  # type: ignore[method-assign]


def fail_while_gradients_are_summed(error: BaseException):
    """Raise it where this rank sums its block of the gradients of its node."""
    from chainermn_comm.sums import shared_memory

    shared_memory.sum_rows = _failing(error)


def delay_second_handshakes(seconds: float):
    """Be so late where a call agrees again, in its middle."""
    from chainermn_comm.messaging import Handshake

    meet = Handshake.__call__

    def late(self: Handshake, operation: str, *args, **options):
        if ", " in operation:  # a part of a call
            time.sleep(seconds)
        return meet(self, operation, *args, **options)

    Handshake.__call__ = late  # type: ignore[method-assign]


def abort_in_vain():
    """Be as after a cut link: MPI_Abort has been called, and all is as before."""
    from chainermn_comm import watchdog

    watchdog.mark_aborting()


def _failing(error: BaseException):  # type: ignore[no-untyped-def]
    def fail(*_, **__) -> NoReturn:
        say_failing()
        raise error

    return fail
