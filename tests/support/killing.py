"""Runs a script on several ranks until something is there, and kills a rank then."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.jobs import MPIEXEC, variables


def kill_when(
    condition: Callable[[], object], script: Path, *arguments: object, cwd: Path, seconds: float
) -> None:
    """Kill the last of two ranks as soon as the condition holds, and wait for the job's end.

    Raises:
        AssertionError: the job ended before that, or `seconds` were over.
    """
    command = [str(MPIEXEC), "-n", "2", sys.executable, str(script), *map(str, arguments)]
    with tempfile.TemporaryFile() as output:
        job = subprocess.Popen(
            command, cwd=cwd, env=variables(), stdout=output, stderr=output, start_new_session=True
        )
        ranks: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + seconds
            while not condition():
                if job.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise AssertionError(output.read().decode(errors="replace"))
                time.sleep(0.05)
            ranks = _ranks(job.pid, script)
            assert len(ranks) == 2
            ranks[-1].kill()
            job.wait(seconds)
        finally:
            for process in (*ranks, job):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            job.wait()


def _ranks(launcher: int, script: Path) -> list[psutil.Process]:
    """The ranks under the launcher, and not what they started themselves."""
    found = []
    for one in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # what a rank started may end
            if one.cmdline()[1:2] == [str(script)]:
                found.append(one)
    return found
