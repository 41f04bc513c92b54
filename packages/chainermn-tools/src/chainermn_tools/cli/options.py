"""What several subcommands ask of their options: seconds, and the path of a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec

import click


def seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN, which is within any range, and which no time ever comes to.

    Raises:
        click.BadParameter: it is NaN.
    """
    if math.isnan(value):
        raise click.BadParameter("nan is no number of seconds", ctx, param)
    return value


def validate_plot_path(file: str) -> None:
    """Refuse a path to which no plot can be saved, before anything is measured.

    Raises:
        click.UsageError: there is no matplotlib, or it can't write such a file.
    """
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'chainermn-tools[plot]'")
    folder = os.path.dirname(os.path.abspath(file))
    if not os.access(folder, os.W_OK) or os.path.isdir(file):
        raise click.UsageError(f"--plot: {file} can't be written")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    kind = os.path.splitext(file)[1].removeprefix(".").lower()
    if kind not in known:
        raise click.UsageError(f"--plot: {file} should end in one of .{', .'.join(sorted(known))}")


def save_plot(file: str, make: Callable[[], None]) -> None:
    """Have the plot drawn and saved there, and report it on standard error.

    Raises:
        click.UsageError: the file can't be written.
    """
    try:
        make()
    except OSError as error:
        raise click.UsageError(f"--plot: {file} can't be written: {error.strerror}") from None
    click.echo(f"drew {file}", err=True)
