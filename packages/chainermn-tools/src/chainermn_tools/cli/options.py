"""What several subcommands ask of their options: seconds, hosts, and files to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from chainermn_tools import jobs


class Seconds(click.ParamType):  # type: ignore[type-arg]  # of old clicks it has none
    """A number of seconds, more than zero."""

    name = "seconds"

    def __init__(self, least: float = 0.0, most: float = math.inf) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, *where: Any) -> float:
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is no number of seconds", *where)
        if not self.least <= seconds <= self.most or seconds == 0:  # nor is NaN
            allowed = f"from {self.least:g} to {self.most:g}"
            if self.most == math.inf:
                allowed = "above 0"
            self.fail(f"{value} is no number of seconds {allowed}", *where)
        return seconds


def named_hosts(host_list: str | None, hostfile: str | None) -> tuple[jobs.Host, ...]:
    """Return the hosts of --hosts or --hostfile; none without either.

    Raise ValueError if both are given, or one names no hosts.
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
    """Have a file written, whose name this option gave, and report it on standard error."""
    try:
        make()
    except (OSError, ValueError) as error:  # matplotlib doesn't know the kind of file
        reason = getattr(error, "strerror", None) or error
        raise click.UsageError(f"{option}: {file} can't be written: {reason}") from None
    click.echo(f"wrote {file}", err=True)
