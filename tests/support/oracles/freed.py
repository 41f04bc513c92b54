"""Whether an error keeps memory when it has been handled."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager


class Batch:
    """Something large that a frame refers to."""


def caught_with(batch):
    """An error whose traceback refers to the batch."""
    try:
        raise ValueError("planted")
    except ValueError as error:
        return error


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
