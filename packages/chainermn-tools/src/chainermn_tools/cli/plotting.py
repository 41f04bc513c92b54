"""Validates the path that follows `--plot`, and saves the plot there."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import click


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
    """Save the plot, and report it on standard error.

    Args:
        file: the path.
        make: draws the plot and saves it there.

    Raises:
        click.UsageError: the file can't be written.
    """
    try:
        make()
    except OSError as error:
        raise click.UsageError(f"--plot: {file} can't be written: {error.strerror}") from None
    click.echo(f"drew {file}", err=True)
