"""Runs a script on two ranks until something is there, and kills a rank then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.jobs.runner import run


def kill_when(
    condition: Callable[[], object],
    script: Path,
    *arguments: object,
    cwd: Path,
    seconds: float,
) -> None:
    """Kill the last of two ranks as soon as the condition holds, and wait for the job's end.

    Raises:
        AssertionError: the job ended before that, or `seconds` were over.
    """
    killed: list[psutil.Process] = []

    def kill(launcher: int, _: object) -> None:
        if not killed and condition():
            ranks = _ranks(launcher, script)
            assert len(ranks) == 2
            ranks[-1].kill()
            killed.extend(ranks)

    job = run(2, script, *arguments, cwd=cwd, seconds=seconds, meanwhile=kill)
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert killed, job
    assert job.returncode is not None, job


def _ranks(launcher: int, script: Path) -> list[psutil.Process]:
    """The ranks under the launcher, and not what they started themselves."""
    found = []
    for one in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # what a rank started may end
            if one.cmdline()[1:2] == [str(script)]:
                found.append(one)
    return found
