"""A double of MPI's communicators that writes down what this rank calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mpi4py import MPI

from chainermn_comm import Topology
from chainermn_comm.named_communicators import CLASSES

# Names in small letters, without what says how arrays lie or that the call returns at
# once.
BARRIERS = {"barrier"}
COLLECTIVES = {
    "bcast",
    "gather",
    "scatter",
    "allgather",
    "allreduce",
    "reduce",
    "alltoall",
}
MESSAGES = {"send", "recv", "sendrecv"}
# A collective call that sends so much carries gradients; an agreement's entry has 128
# bytes.
DATA_BYTES = 1000


@dataclass(frozen=True)
class Call:
    """A method of MPI's communicators that was called."""

    name: str
    nbytes: int  # of the array that this rank sends; 0 if there is none
    in_background: bool  # by another thread than that which trains

    @property
    def is_barrier(self) -> bool:
        return _plain(self.name) in BARRIERS

    @property
    def moves_data(self) -> bool:
        return _plain(self.name) in MESSAGES or self.nbytes >= DATA_BYTES

    @property
    def is_agreement(self) -> bool:
        """Whether ranks wait for one another without moving gradients, or ordering memory."""
        return not (self.is_barrier or self.moves_data)


@contextmanager
def written_down(name: str, nodes: tuple[int, ...] | None = None):
    """A communicator, and the list to which its calls are added (collective).

    So are those of what it duplicates or splits. `nodes` may be imposed.
    """
    calls: list[Call] = []
    training = threading.current_thread()

    def writing(method: str) -> Callable[..., Any]:
        def call(self, *args, **kwargs):
            in_background = threading.current_thread() is not training
            calls.append(Call(method, _nbytes(*args[:1]), in_background))
            return getattr(super(double, self), method)(*args, **kwargs)

        return call

    known = BARRIERS | COLLECTIVES | MESSAGES
    methods = {
        each: writing(each) for each in dir(MPI.Intracomm) if _plain(each) in known
    }
    double = type("Double", (MPI.Intracomm,), methods)
    if nodes is None:
        topology = None
    else:
        topology = Topology.of(nodes)
    with (
        mock.patch.object(MPI, "Intracomm", double),
        CLASSES[name](double(MPI.COMM_WORLD), _topology=topology) as communicator,
    ):
        yield communicator, calls


def _plain(name: str) -> str:
    return (
        name.lower()
        .removeprefix("i")
        .replace("gatherv", "gather")
        .replace("toallv", "toall")
    )


def _nbytes(sent=None) -> int:
    buffer = sent
    if isinstance(sent, list | tuple):
        buffer = sent[0]
    try:
        return memoryview(buffer).nbytes
    except TypeError:
        return 0
