"""Finds the processes that a program left here, by a tag in their environment, and kills them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from chainermn_tools.jobs.signals import handle_signals

# Whatever a program starts inherits this variable, and so it is found again: Open MPI's
# ranks have process groups of their own.
TAG_VARIABLE = "CHAINERMN_STARTED_BY"
# While some are killed others may be born, so all processes are listed again, but not
# for ever.
MAX_KILL_ROUNDS = 5

# A variable, and a value so random that no other process has it there.
Tag = tuple[str, str]

_running_tags: set[Tag] = set()
_closed = False


@contextlib.contextmanager
def kill_children_on_exit() -> Iterator[None]:
    """Kill the programs that threads still run at the end of the block; no other can then start.

    Threads that were left behind may run some, and nobody waits for those. In the block
    signals that would end this process raise SystemExit (main thread only).
    """
    global _closed
    _closed = False
    with handle_signals(lambda number: sys.exit(128 + number)):
        try:
            yield
        finally:
            _closed = True
            for tag in tuple(_running_tags):
                kill_by_env_tag(tag)


def kill_by_env_tag(tag: Tag) -> None:
    """Kill this user's processes on this machine that were started with the tag."""
    wanted = "=".join(tag).encode()
    for _ in range(MAX_KILL_ROUNDS):
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
        if not found:
            return


@contextlib.contextmanager
def register_tag(tag: Tag) -> Iterator[None]:
    """Register a tag while programs run that have it, for `kill_children_on_exit` to end them.

    Raise InterruptedError if programs are not started any more.
    """
    _running_tags.add(tag)  # before the question, or both could miss each other
    try:
        if _closed:
            raise InterruptedError(errno.EINTR, "no program is started any more")
        yield
    finally:
        _running_tags.discard(tag)
