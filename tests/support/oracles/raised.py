"""What fails on one rank, what all raise then, and that errors keep nothing once handled."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest

from chainermn_comm import PeerError


def raises_on_all(
    wrong: bool,
    error: type[BaseException] | tuple[type[BaseException], ...],
    match: str | None = None,
):
    """That error where this rank is the wrong one, and elsewhere one that tells of it."""
    if not wrong:
        error = PeerError
    return pytest.raises(error, match=match)


class Batch:
    """Something large that a frame refers to."""


@contextmanager
def freed_at_once(thing):
    """What is raised within keeps the thing no longer than it is handled."""
    there = weakref.ref(thing)
    del thing
    gc.collect()
    gc.disable()
    try:
        yield
        assert there() is None
    finally:
        gc.enable()


class Awkward:
    """Cannot be pickled ("there"), or not be unpickled ("here")."""

    def __init__(self, where: str = "here"):
        self.where = where

    def __reduce__(self):
        if self.where == "there":
            raise ValueError("does not travel")
        return fail_to_load, ()


def fail_to_load():
    raise ValueError("does not arrive")
