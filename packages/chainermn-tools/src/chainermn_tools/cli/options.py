"""What several subcommands ask of their options: seconds, hosts, and the path of a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from chainermn_tools import jobs


class Seconds(click.FloatRange):
    """A number of seconds; NaN, which is within any range, no time ever comes to."""

    def convert(self, value: Any, *where: Any) -> Any:
        if math.isnan(found := super().convert(value, *where)):
            self.fail("nan is no number of seconds", *where)
        return found


def named_hosts(
    host_list: str | None, hostfile: str | None, strict: bool = True
) -> tuple[jobs.Host, ...]:
    """Return the hosts of --hosts or --hostfile; none without either.

    Raise ValueError if both are given, or one names no hosts; unless ``strict``, a
    hostfile may hold anything, and then names none.
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
    try:
        return jobs.parse_hostfile(text, hostfile)
    except ValueError:
        if strict:
            raise
        return ()


def validate_plot_path(file: str) -> None:
    """Refuse a path to which no plot can be saved, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise click.UsageError(
            "--plot needs matplotlib: pip install 'chainermn-tools[plot]'"
        )
    folder = os.path.dirname(os.path.abspath(file))
    if not os.access(folder, os.W_OK) or os.path.isdir(file):
        raise click.UsageError(f"--plot: {file} can't be written")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    kind = os.path.splitext(file)[1].removeprefix(".").lower()
    if kind not in known:
        raise click.UsageError(
            f"--plot: {file} should end in one of .{', .'.join(sorted(known))}"
        )


def save(option: str, file: str, make: Callable[[], None]) -> None:
    """Have a file written, whose name this option gave, and report it on standard error."""
    try:
        make()
    except OSError as error:
        raise click.UsageError(
            f"{option}: {file} can't be written: {error.strerror}"
        ) from None
    click.echo(f"wrote {file}", err=True)
