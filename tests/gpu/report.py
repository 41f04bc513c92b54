"""Runs all that needs GPUs, one after another, and writes what came of it to one file for a report.

`make test-gpu` calls it: `python -m tests.gpu.report --ranks 4 --launcher mpiexec`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# Of one command, in which a rank may hang.
SECONDS = 1800.0
FILE = Path("result/gpu-report.txt")
# The doctor's status: it works, though slower or less safely than it could.
WARNINGS = 3


def commands(ranks: int, launcher: str) -> list[list[str]]:
    """What is run on a machine whose GPUs serve so many ranks."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--full"]
    tools = [python, "-m", "chainermn_tools"]
    on_gpus = [*pytest, "--world", "-m", "gpu", "tests/gpu"]
    return [
        [*tools, "env"],
        [*tools, "doctor", "-n", str(ranks), "--timeout", "600"],
        [*pytest, "tests/gpu"],
        *([launcher, "-n", str(n), *on_gpus] for n in sorted({1, 2, ranks})),
        [launcher, "-n", str(ranks), python, "benchmarks/gpu.py"],
    ]


def run(command: Sequence[str], out: TextIO, seconds: float = SECONDS) -> int | None:
    """Copy a command's output to the terminal and to ``out``; its status, None if it was ended."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(seconds, end)
    with process:
        timer.start()
        for line in process.stdout:
            for file in (sys.stdout, out):
                file.write(line)
                file.flush()
    timer.cancel()
    return None if is_late.is_set() else process.returncode


def write_report(
    these: Sequence[Sequence[str]], path: Path, seconds: float = SECONDS
) -> bool:
    """Run each command, whatever became of those before; return whether all succeeded.

    The doctor's warnings count as success.

    The last lines of the file say how each ended.
    """
    ends = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for command in these:
            out.write(f"\n=== {shlex.join(command)}\n")
            status = run(command, out, seconds)
            ends.append(
                (f"took more than {seconds:g} s" if status is None else status, command)
            )
        summary = [f"{end or 'ok'}: {shlex.join(command)}" for end, command in ends]
        out.write("\n".join(["\n=== how each ended", *summary, ""]))
    print("\n".join([*summary, f"to be attached to a report: {path}"]), flush=True)
    return all(
        end == 0 or (end == WARNINGS and "doctor" in command) for end, command in ends
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, required=True, help="as many as there are GPUs"
    )
    parser.add_argument("--launcher", default="mpiexec", help="the MPI's mpiexec")
    parser.add_argument("--file", type=Path, default=FILE)
    asked = parser.parse_args()
    return 0 if write_report(commands(asked.ranks, asked.launcher), asked.file) else 1


if __name__ == "__main__":
    sys.exit(main())
