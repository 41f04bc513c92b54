"""Double buffering: the mean of one step's gradients is taken while the next step computes."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import chainer
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase, patient_waits

from ..wrappers import UnpicklableMixin
from .background_thread import BackgroundThread
from .detached_gradients import DetachedGradients

# The thread that communicates waits for a core and for the interpreter at each of its turns,
# milliseconds where others compute, and each message takes a few turns on either side: see
# docs/decisions/double_buffering.md.
CHUNK_BYTES = 2 << 20


class DelayedGradientExchange(UnpicklableMixin):
    """The gradients of one optimizer that are being exchanged."""

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        self.communicator = communicator
        self._zero_fill = zero_fill
        # Made at first use: the training thread can use the given one meanwhile.
        self._own: CommunicatorBase | None = None
        self._thread: BackgroundThread | None = None
        self._gradients: DetachedGradients | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedGradientExchange:
        twin = memo[id(self)] = DelayedGradientExchange(self.communicator, self._zero_fill)
        if self.wait() is None:
            twin._gradients = copy.deepcopy(self._gradients, memo)
        return twin

    def start(self, gradients: DetachedGradients) -> None:
        """Begin to take the mean of gradients over ranks, after a :meth:`pop` (collective)."""
        if self._own is None:
            self._own = self.communicator.split(0, self.communicator.rank)
            with contextlib.suppress(ValueError):  # a subclass may not have this setting
                if self._own.get_config("chunk_bytes") is None:
                    self._own.set_config("chunk_bytes", CHUNK_BYTES)
        name = "allreduce_grad_dtype"  # as the user has set it by now
        with contextlib.suppress(ValueError):  # a subclass may not have this setting
            dtype = self.communicator.get_config(name)
            if self._own.get_config(name) != dtype:
                self._own.set_config(name, dtype)
        self._gradients = gradients
        communicator, zero_fill = self._own, self._zero_fill
        in_order = _ordered_after_present_work(gradients)

        def exchange(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), in_order():
                communicator.multi_node_mean_grad(gradients, zero_fill)

        self._thread = BackgroundThread(exchange, threaded=_threads_may_use_mpi())

    def wait(self) -> BaseException | None:
        """Wait for the exchange; return the exception that made it fail, if any."""
        return None if self._thread is None else self._thread.wait()

    def pop(self) -> DetachedGradients | None:
        """Wait for the means and remove them, raising what made the exchange fail; or None."""
        try:
            return self.means()
        finally:
            self._gradients = self._thread = None

    def put(self, means: DetachedGradients | None) -> None:
        """Store means as if they had just been exchanged."""
        self.wait()
        self._gradients, self._thread = means, None

    def discard(self, names: set[str]) -> None:
        """Wait, and drop the gradients of these parameters."""
        self.wait()
        if self._gradients is not None:
            self._gradients.discard(names)

    def means(self) -> DetachedGradients | None:
        """Wait for the means and return them, raising what made the exchange fail; or None."""
        error = self.wait()
        try:
            if error is not None:
                raise error
            return self._gradients
        finally:
            del error  # else a cycle through its traceback would keep the gradients' memory

    def close(self) -> None:
        """Wait for the exchange, and free its communicator (collective)."""
        self.wait()
        if self._own is not None:
            self._own.finalize()
            self._own = None


def _ordered_after_present_work(
    gradients: DetachedGradients,
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context for a thread that uses gradients after the work asked for so far."""
    for detached in gradients.values():
        device = chainer.backend.get_device_from_array(detached.grad)
        if detached.grad is not None and isinstance(device, cuda.GpuDevice):
            with chainer.using_device(device):
                event = cuda.cupy.cuda.Event(block=True, disable_timing=True)
                event.record()
            return partial(_on_own_stream, device, event)
    return contextlib.nullcontext


@contextlib.contextmanager
def _on_own_stream(device: Any, event: Any) -> Iterator[None]:
    """Use a stream that waits for an event first; wait for the stream at the end."""
    with chainer.using_device(device):
        stream = cuda.cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.wait_event(event)
            yield
            stream.synchronize()


def _threads_may_use_mpi() -> bool:
    """Return whether a thread may communicate while another one does; warn once where not."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None or MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        return True
    warnings.warn(
        "this MPI was not started with MPI_THREAD_MULTIPLE: with double_buffering gradients are "
        "as old as ever, but nothing is computed while they travel",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
