"""The resources of communicators, which ranks free together once no rank uses them any more.

Only all ranks together can free MPI's part of a communicator, so nothing is freed when
one rank's object is garbage-collected. When ranks split or finalize a communicator, they
find the communicators made from it that no rank uses any more, and free these.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from .errors import CommunicationError


class Resources(contextlib.ExitStack):
    """The resources of a communicator, which ``close`` frees (collective)."""

    def __init__(self, parent: MPI.Intracomm) -> None:
        """Own nothing yet; the communicator is about to be made from ``parent``."""
        super().__init__()
        # While one of these objects is alive, the communicator may be used.
        self.users: list[weakref.ref[Any]] = []
        # The resources of communicators made from this one, which are freed first.
        self.made: list[Resources] = []
        # If ranks can't free the communicator together, the reason.
        self.interruptions: list[str] = []
        made_from(parent).append(self)

    @property
    def is_unused(self) -> bool:
        """Whether nothing on this rank can use the communicator any more."""
        if self.interruptions or any(user() for user in self.users):
            return False
        return all(each.is_unused for each in self.made)


@functools.cache
def _key() -> int:
    return MPI.Comm.Create_keyval()


def made_from(comm: MPI.Intracomm) -> list[Resources]:
    """Return the resources of communicators made from ``comm``, in the same order on its ranks."""
    if comm.Get_attr(_key()) is None:
        comm.Set_attr(_key(), [])
    return cast("list[Resources]", comm.Get_attr(_key()))


def free_unused(comm: MPI.Intracomm) -> None:
    """Free the communicators made from ``comm`` that no rank uses any more (collective)."""
    made = made_from(comm)
    if made:  # all ranks have the same number
        unused = np.array([each.is_unused for each in made])
        comm.Allreduce(MPI.IN_PLACE, unused, MPI.LAND)
        for number in np.flatnonzero(unused)[::-1]:
            made.pop(number).close()


@contextlib.contextmanager
def explained(handshake: Any) -> Iterator[None]:
    """Raise an MPI error, which all ranks have, as an error that says what to do.

    The last call of all ranks is a call of this ``handshake``.
    """
    try:
        yield
    except MPI.Exception as error:
        text = (
            f"rank {handshake.rank}: MPI can't make another communicator; if there are too "
            f"many, call finalize() on those that are not needed any more: {error}"
        )
        raise handshake.raised_on_all(CommunicationError(text)) from error
