"""Runs a script on several ranks, with a time limit that prints every rank's stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from tests.support.jobs.scripts import ROOT

Meanwhile = Callable[[int, Callable[[], tuple[str, str]]], object]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
# Ends a hang, no more; planted faults make many, and have less time.
SECONDS = float(os.environ.get("CHAINERMN_TEST_SECONDS", "300"))
LOOK_SECONDS = 0.02
STACKS_SECONDS = 1.0  # for the ranks to write their stacks

# Every script begins with it: a rank that is stuck, even in C, prints its stacks on
# SIGUSR1. What is deprecated is an error, but for what pyproject.toml says; our own
# warnings are for the user.
PRELUDE = r"""
import faulthandler as _faulthandler, signal as _signal, warnings as _warnings
_faulthandler.register(_signal.SIGUSR1, all_threads=True)
for _kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
    _warnings.simplefilter("error", _kind)
_warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
"""

# For scripts that only want to know whether gradients still get their mean.
CHECK_GRADIENTS = """\
import numpy as np
from tests.support.worlds.models import check_mean

def check_gradients(comm):
    for n in (100, 300_000):
        check_mean(comm, n)
"""


@dataclass(frozen=True, repr=False)
class Job:
    """How a job ended. `returncode` is None when it had to be ended; then `err` has the stacks."""

    returncode: int | None
    out: str
    err: str
    ended: float  # time.time()

    def __repr__(self) -> str:  # what a failing assertion shows
        return f"mpiexec returned {self.returncode}\n-- out:\n{self.out}\n-- err:\n{self.err}"


def run(
    ranks: int,
    *arguments: object,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float = SECONDS,
    meanwhile: Meanwhile | None = None,
) -> Job:
    """Run `python *arguments` on so many ranks, by this environment's mpiexec; see `run_command`.

    Scripts begin with PRELUDE. Ranks can import this package, `tests`.
    """
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *map(str, arguments)]
    return run_command(
        command, variables(environment), seconds, cwd=cwd, meanwhile=meanwhile
    )


# For the monitors of several hosts to say, after the launcher has ended, which rank
# died first.
MONITORS_SECONDS = 1.0


def run_text(ranks: int, text: str, *arguments: object, **how: Any) -> Job:
    """Run a script of this text, to which PRELUDE is added, as `run` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(PRELUDE + text)
        return run(ranks, path, *arguments, **how)


def on_open_mpi() -> bool:
    """Whether the ranks of `run` are Open MPI's."""
    return (
        "Open MPI" in run_command([str(MPIEXEC), "--version"], variables(), SECONDS).out
    )


def variables(environment: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of ours, and with those given."""
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CHAINERMN_")
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    path = [str(MPIEXEC.parent), os.environ["PATH"]]
    ours["PATH"] = os.pathsep.join(path)
    return found | ours | (environment or {})


def run_command(
    command: list[str],
    environment: dict[str, str],
    seconds: float,
    elsewhere: Callable[[], list[psutil.Process]] = list,
    cwd: Path | None = None,
    meanwhile: Meanwhile | None = None,
) -> Job:
    """Run a launcher's whole command line.

    Args:
        command: the launcher and its arguments.
        environment: all variables.
        seconds: after this the stacks are printed and the job is ended.
        elsewhere: finds processes of the job that are no children of the launcher.
        cwd: where to run it.
        meanwhile: called again and again with the launcher's number and what gives the
            output and the errors so far.
    """
    # Files, since a pipe would be waited for as long as any orphan holds it.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )

        def said() -> tuple[str, str]:
            return _text(out), _text(err)

        deadline = time.monotonic() + seconds
        try:
            while (
                returncode := process.poll()
            ) is None and time.monotonic() < deadline:
                if meanwhile is not None:
                    meanwhile(process.pid, said)
                time.sleep(LOOK_SECONDS)
            ended = time.time()
            if returncode and elsewhere is not list:
                time.sleep(MONITORS_SECONDS)
        finally:
            if process.poll() is None:
                end(process, elsewhere())
        return Job(returncode, *said(), ended)


def _text(file: IO[bytes]) -> str:
    """All of it; the processes that write to it share its position, which stays as it is."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def end(process: subprocess.Popen[bytes], elsewhere: list[psutil.Process]) -> None:
    """Let the ranks print their stacks, then end what we started, and its children."""
    ours = [psutil.Process(process.pid)]
    ours += ours[0].children(recursive=True)
    ours += [one for one in elsewhere if one not in ours]
    for one in ours:
        with suppress(psutil.Error):
            if _catches(one.pid, signal.SIGUSR1) and "python" in one.name():
                one.send_signal(signal.SIGUSR1)
    time.sleep(STACKS_SECONDS)
    for one in ours:
        with suppress(psutil.Error):
            one.kill()
    process.wait()


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next(
        int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")
    )
    return bool(caught >> (number - 1) & 1)
