"""What a crash would leave in a folder: its files, before and after each change of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

State = tuple[tuple[str, bytes], ...]  # name and contents of each file


@contextmanager
def crashes(folder: Path):
    """Collect what is in the folder whenever this process renames, removes or syncs a file there.

    Processes and threads that do so take turns, so that a state is one that there was.
    """
    states: set[State] = set()
    folder.mkdir(exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")

    def look():
        states.add(
            tuple((path.name, path.read_bytes()) for path in sorted(folder.iterdir()))
        )

    def recording(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments, **options):
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                look()
                result = change(*arguments, **options)
                look()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        # Nothing can tell what is on the disk.
        patch.setattr(os, "fsync", recording(lambda _: None))
        patch.setattr(os, "replace", recording(os.replace))
        patch.setattr(Path, "unlink", recording(Path.unlink))
        yield states
