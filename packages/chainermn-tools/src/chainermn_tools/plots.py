"""What the commands that draw have in common: complaints, before and after."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import click


def check(file: str) -> None:
    """Complain about what follows ``--plot`` before anything is done for nothing.

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


def draw(file: str, make: Callable[[], None]) -> None:
    """Draw the picture, and say so in standard error.

    Raises:
        click.UsageError: the file can't be written.
    """
    try:
        make()
    except OSError as problem:
        raise click.UsageError(f"--plot: {file} can't be written: {problem.strerror}") from None
    click.echo(f"drew {file}", err=True)
