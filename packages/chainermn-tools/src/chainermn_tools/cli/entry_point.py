"""The entry point of `chainermn`: a list of subcommands, each loaded when it is asked for."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

# Each is a click.Command of this name, in a file of this name. To add one, put its name
# here.
COMMANDS = (
    "bench",
    "doctor",
    "env",
    "explain",
    "launch",
    "report",
    "stacks",
    "top",
    "trace",
)
# The exit status if output could not be written; sysexits.h calls it EX_IOERR.
NOT_WRITTEN = 74
# The errors of writing to a pipe, a terminal or a full disk.
WRITING_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Commands(click.Group):
    """The group whose members are those of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"{__package__}.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="chainermn-tools", message="%(package)s %(version)s")
def commands() -> None:
    """Tools for distributed training with ChainerMN."""


def main() -> None:
    """Run the command line, and exit with its status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by a shell's `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        status = _run()
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in WRITING_FAILED:
            raise
        status = NOT_WRITTEN
        # `chainermn env | head` is nobody's mistake.
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):  # nobody may read standard error, either
                text = f"the output could not be written: {error.strerror}"
                print(f"chainermn: {text}", file=sys.stderr, flush=True)
        # The interpreter's last flush goes to the null device, since otherwise it would
        # fail and say so.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    sys.exit(status)


def _run() -> Any:
    """Run the command line; return the status with which it exits."""
    stdout = sys.stdout
    try:
        commands(prog_name="chainermn")
    except SystemExit as end:
        # Click replaces the stream once its reader has left.
        if sys.stdout is not stdout:
            return NOT_WRITTEN
        return end.code
