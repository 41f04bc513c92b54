"""The entry point of `chainermn`: a list of subcommands, each loaded when it is asked for."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module

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
MANUAL = "The manual is in the folder docs of ChainerMN's repository; `make docs` builds its pages."
# When what was to be printed could not be: sysexits.h calls it EX_IOERR.
NOT_WRITTEN = 74
# What writing to a pipe, a terminal or a full disk fails with.
WRITING_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Commands(click.Group):
    """The group whose members are those of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(
            import_module(f"{__package__}.{cmd_name}"), cmd_name
        )
        command.epilog = MANUAL
        return command


@click.group(
    cls=Commands,
    epilog=MANUAL,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="chainermn-tools", message="%(package)s %(version)s")
def commands() -> None:
    """Tools for distributed training with ChainerMN."""


def main() -> None:
    """Run the command line, and exit with its status."""
    status: object = 1
    failure: OSError | None = None
    try:
        commands(prog_name="chainermn")
    except SystemExit as end:
        status = end.code
    except OSError as error:
        if error.filename is not None or error.errno not in WRITING_FAILED:
            raise
        failure = error
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = failure or error
    if failure is None:
        sys.exit(status)  # type: ignore[arg-type]
    # `chainermn env | head` is nobody's mistake.
    if not isinstance(failure, BrokenPipeError):
        with contextlib.suppress(OSError):  # nobody may read that, either
            sys.stderr.write(
                f"chainermn: the output could not be written: {failure.strerror}\n"
            )
            sys.stderr.flush()
    # The interpreter's last flush goes nowhere, since it would fail and say so.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.exit(NOT_WRITTEN)
