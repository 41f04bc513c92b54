"""What several subcommands share: hosts, files to write, and the refusal to run in a rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click

from chainermn_tools import jobs


def refuse_in_a_rank() -> None:
    """Raise UsageError if this process is a rank of a job.

    A shell of `srun --pty` has the variables of a lone rank, but is no rank.
    """
    place = jobs.rank_from_env()
    if place is None or (place[1] == 1 and "SLURM_PTY_PORT" in os.environ):
        return
    raise click.UsageError(
        "this is a rank of a job; the command starts ranks itself, so run it without "
        "mpiexec or srun"
    )


def named_hosts(host_list: str | None, hostfile: str | None) -> tuple[jobs.Host, ...]:
    """Return the hosts of --hosts or --hostfile; none without either.

    Raise ValueError if both are given, or if they name no hosts.
    """
    if host_list is not None and hostfile is not None:
        raise ValueError("--hosts and --hostfile exclude each other")
    if host_list is not None:
        return jobs.parse_host_list(host_list)
    if hostfile is None:
        return ()
    try:
        text = Path(hostfile).read_text(errors="replace")
    except OSError as error:
        raise ValueError(
            f"the hostfile {hostfile!r} can't be read: {error.strerror}"
        ) from None
    return jobs.parse_hostfile(text, hostfile)


def save(option: str, file: str, make: Callable[[], None]) -> None:
    """Write the file that this option names by a function, and report it on standard error."""
    try:
        make()
    except (OSError, ValueError) as error:  # matplotlib doesn't know the kind of file
        reason = getattr(error, "strerror", None) or error
        raise click.UsageError(f"{option}: {file} can't be written: {reason}") from None
    click.echo(f"wrote {file}", err=True)
