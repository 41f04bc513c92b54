"""Finds where the user's script calls: the innermost frame outside of this project and Chainer."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import FrameType

# The top-level modules whose frames are not the user's, in addition to Python's own.
_NOT_THE_USERS = frozenset(
    {
        "chainer",
        "chainermn",
        "chainermn_comm",
        "chainermn_facade",
        "chainermn_modelparallel",
        "chainermn_tools",
        "chainermn_train",
        "mpi4py",
    }
)


def place_of_call(frame: FrameType | None = None) -> str:
    """Return FILE:LINE of the user's innermost frame; "" if there is none.

    The search begins at ``frame``, by default at the caller's. The file is given
    relative to the working directory if it is below that.
    """
    frame = frame or sys._getframe(1)
    while frame is not None and not _is_the_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    with suppress(OSError):  # there may be no working directory any more
        path = path.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{path}:{frame.f_lineno}"


def called_at(operation: str) -> str:
    """Return the operation with the place where the user called it, for an error's text."""
    place = place_of_call()
    return f"{operation} at {place}" if place else operation


def _is_the_users(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return module not in _NOT_THE_USERS and module not in sys.stdlib_module_names
