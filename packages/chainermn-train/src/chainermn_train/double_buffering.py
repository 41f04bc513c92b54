"""Takes the mean of one step's gradients while the next step computes."""

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

from .copying import SharesCommunicator
from .held import HeldGradients
from .task import Task

# The thread that communicates waits for a core and for the interpreter each time it is its turn,
# milliseconds where others compute, and each message takes a few turns of it on either side: see
# docs/decisions/double_buffering.md.
CHUNK_BYTES = 2 << 20


class DoubleBuffer(SharesCommunicator):
    """The gradients in flight, of one optimizer.

    They travel on a communicator of their own, made at first use, so that the training thread
    can use the given one meanwhile.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        self.communicator = communicator
        self._zero_fill = zero_fill
        self._own: CommunicatorBase | None = None
        self._task: Task | None = None
        self._gradients: HeldGradients | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DoubleBuffer:
        twin = memo[id(self)] = DoubleBuffer(self.communicator, self._zero_fill)
        if self.wait() is None:
            twin._gradients = copy.deepcopy(self._gradients, memo)
        return twin

    def start(self, gradients: HeldGradients) -> None:
        """Begin to take the mean of these over ranks (collective); the buffer must be empty."""
        if self._own is None:
            self._own = self.communicator.split(0, self.communicator.rank)
            _use_large_chunks(self._own)
        _use_same_wire(self._own, self.communicator)
        self._gradients = gradients
        communicator, zero_fill = self._own, self._zero_fill
        in_order = _ordered_after_present_work(gradients)

        def exchange(hurry: threading.Event) -> None:
            with patient_waits(hurry), in_order():
                communicator.multi_node_mean_grad(gradients, zero_fill)

        self._task = Task(exchange, threaded=_threads_may_use_mpi())

    def wait(self) -> BaseException | None:
        """Wait for what is in flight; why it failed, if it did."""
        return None if self._task is None else self._task.wait()

    def pop(self) -> HeldGradients | None:
        """The means that have arrived; the buffer is empty then. None if it was, or if they failed.

        :meth:`wait` comes first.
        """
        failed = self.wait() is not None
        gradients, self._gradients, self._task = self._gradients, None, None
        return None if failed else gradients

    def put(self, means: HeldGradients | None) -> None:
        """Let these be what has arrived."""
        self.wait()
        self._gradients, self._task = means, None

    def forget(self, names: set[str]) -> None:
        """Wait, and have no gradient any more for these parameters."""
        self.wait()
        if self._gradients is not None:
            self._gradients.forget(names)

    def means(self) -> HeldGradients | None:
        """What has arrived, which stays; None if nothing is in flight.

        Raises:
            BaseException: what made the exchange fail.
        """
        error = self.wait()
        if error is not None:
            raise error
        return self._gradients

    def close(self) -> None:
        """Wait for what is in flight, and free the communicator (collective)."""
        self.wait()
        if self._own is not None:
            self._own.finalize()
            self._own = None


def _use_large_chunks(communicator: CommunicatorBase) -> None:
    """Let fewer and larger messages travel, unless the user chose their size."""
    with contextlib.suppress(ValueError):  # other people's communicators have no such setting
        if communicator.get_config("chunk_bytes") is None:
            communicator.set_config("chunk_bytes", CHUNK_BYTES)


def _use_same_wire(own: CommunicatorBase, given: CommunicatorBase) -> None:
    """Send as the user has set the given communicator to by now."""
    name = "allreduce_grad_dtype"
    with contextlib.suppress(ValueError):  # other people's communicators have no such setting
        dtype = given.get_config(name)
        if own.get_config(name) != dtype:
            own.set_config(name, dtype)


def _ordered_after_present_work(
    gradients: HeldGradients,
) -> Callable[[], AbstractContextManager[Any]]:
    """A context for a thread that uses these gradients: on GPUs, after the work asked for so far.

    The thread gets the device and a stream of its own, which waits for an event recorded here and
    now on the stream that computes the gradients; leaving the context waits for that stream.
    """
    for held in gradients.values():
        device = chainer.backend.get_device_from_array(held.grad)
        if held.grad is not None and isinstance(device, cuda.GpuDevice):
            return partial(_on_own_stream, device, _event_now(device))
    return contextlib.nullcontext


def _event_now(device: Any) -> Any:
    with chainer.using_device(device):
        event = cuda.cupy.cuda.Event(block=True, disable_timing=True)
        event.record()
    return event


@contextlib.contextmanager
def _on_own_stream(device: Any, event: Any) -> Iterator[None]:
    with chainer.using_device(device):
        stream = cuda.cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.wait_event(event)
            yield
            stream.synchronize()


def _threads_may_use_mpi() -> bool:
    """Whether a thread may communicate while another one does; warns once where not."""
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
