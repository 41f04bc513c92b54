"""What several subcommands ask of their options."""

from __future__ import annotations

import math

import click


def seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN, which is within any range, and which no time ever comes to.

    Raises:
        click.BadParameter: it is NaN.
    """
    if math.isnan(value):
        raise click.BadParameter("nan is no number of seconds", ctx, param)
    return value
