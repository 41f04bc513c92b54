"""The command `chainermn`, in a process of its own or, where that changes nothing, in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from chainermn_tools.cli import commands

BIN = Path(sys.executable).parent
MODULE = (sys.executable, "-m", "chainermn_tools")
SECONDS = 300.0  # ends a hang, no more
Done = subprocess.CompletedProcess[str]


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without settings of ours, with this Python's programs on PATH."""
    found = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("CHAINERMN_") and not name.endswith("_NUM_THREADS")
    }
    return {
        **found,
        "PATH": f"{BIN}:{found['PATH']}",
        "PYTHONUNBUFFERED": "",
        **variables,
    }


def run(*words, cwd: Path | None = None, seconds: float = SECONDS, **env: str) -> Done:
    """Run a command line to its end, with these variables."""
    how = {"env": environment(**env), "stdin": subprocess.DEVNULL, "cwd": cwd}
    command = [*map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, **how
    )


def chainermn(*arguments, **variables: str) -> Done:
    """Run `chainermn` in a process of its own."""
    return run(*MODULE, *arguments, **variables)


def start(*arguments, **how) -> subprocess.Popen[str]:
    """Start `chainermn` as a terminal does: Ctrl-C is heard, which background jobs may not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = [*MODULE, *map(str, arguments)]
        return subprocess.Popen(
            command,
            text=True,
            **{"stdin": subprocess.DEVNULL, "env": environment(), **how},
        )
    finally:
        signal.signal(signal.SIGINT, before)


def invoke(*arguments, stdin: str | bytes = "", **variables: str | None) -> Result:
    """Call `chainermn` in this process, for what it says of its arguments."""
    words = [*map(str, arguments)]
    return CliRunner().invoke(commands, words, input=stdin, env=variables)


def write(path: Path, text: str):
    """Write a file, and make the folders that it takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def program(path: Path, text: str) -> Path:
    """A program that stands in for another one on PATH."""
    write(path, text)
    path.chmod(0o755)
    return path


def with_program(folder: Path, name: str, text: str) -> str:
    """A PATH on which a program stands before the one of that name."""
    program(folder / "bin" / name, text)
    return f"{folder / 'bin'}:{environment()['PATH']}"
