"""`chainermn bench`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console

from chainermn_tools.bench import sizes
from chainermn_tools.cli import options
from chainermn_tools.jobs import available_cores, rank_from_env

# What there is to be measured: `dummy` moves nothing.
NOT_MEASURED = ("dummy",)
DEFAULT_SECONDS = 60.0
# A run that takes so many times as long as it should, and some more, hangs.
LIMIT_FACTOR, LEAST_LIMIT_SECONDS = 3.0, 60.0
# More tell little more, and two are enough to tell that ranks meet.
FEWEST_RANKS, MAX_RANKS = 2, 4


@click.command()
@click.option("-n", "ranks", type=click.IntRange(1), metavar="N", help="Number of ranks to start.")
@click.option(
    "--communicator",
    "wanted",
    multiple=True,
    metavar="NAME",
    help="One to measure; may be given several times. Without it, all.",
)
@click.option(
    "--max-size", default="256M", metavar="SIZE", help="The largest size, such as 16M. [256M]"
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86400),
    callback=options.seconds,
    metavar="S",
    default=DEFAULT_SECONDS,
    help="How long it should take; sizes that would take longer are skipped. [60]",
)
@click.option("--plot", metavar="FILE", help="Draw a picture, such as bench.png.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def bench(
    ctx: click.Context,
    ranks: int | None,
    wanted: tuple[str, ...],
    max_size: str,
    seconds: float,
    plot: str | None,
    as_json: bool,
) -> None:
    """Check what communicators return, and measure how fast they are.

    Sizes go from 1 KiB to 256 MiB; values are compared with what they must be before anything
    is timed. Bandwidths are defined as in nccl-tests. Arrays lie in host memory.

    It starts the ranks by itself, on this host, or measures those that an MPI launcher started:

    \b
        chainermn bench -n 4 --plot bench.png
        mpiexec -hosts a,b -n 4 chainermn bench

    Exit status: 0 when all values were right; 1 when some were not, or nothing could be measured;
    2 for a wrong command line; 124 when it took too long; else that of the job that failed.
    """
    place = rank_from_env()
    names = _names(wanted)
    todo = _sizes(max_size)
    if place is not None and ranks not in (None, place[1]):
        raise click.UsageError(f"-n {ranks}, but the launcher has started {place[1]} ranks")
    if plot is not None:
        options.validate_plot_path(plot)
    limit = max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * seconds)
    report = _report(place, ranks, names, todo, seconds, limit)
    if report is None:
        return
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from chainermn_tools.bench.text import render

        # Open MPI gives each rank a terminal of its own, wherever mpiexec's output goes.
        render(report, Console(force_terminal=False if place else None, highlight=False))
    if plot is not None:
        from chainermn_tools.bench.plot import draw

        options.save_plot(plot, lambda: draw(report, plot))
    ctx.exit(0 if report["correct"] else 1)


def _report(
    place: tuple[int, int] | None,
    ranks: int | None,
    names: list[str],
    todo: list[int],
    seconds: float,
    limit: float,
) -> dict[str, Any] | None:
    """What was measured; None on all ranks but the first."""
    from chainermn_tools.bench import start, worker

    if place is not None:
        try:
            return worker.measure_here(names, todo, seconds, limit)
        except worker.NotStarted as error:
            raise click.ClickException(str(error)) from None
    number = ranks or max(FEWEST_RANKS, min(MAX_RANKS, available_cores()["usable"]))
    result, report = start.measure_on(number, names, todo, seconds, limit)
    if not result.success:
        worker.say(result.message)
        raise click.exceptions.Exit(result.status)
    return report


def _names(wanted: tuple[str, ...]) -> list[str]:
    from chainermn_comm.registry import REGISTRY

    known = [name for name in REGISTRY if name not in NOT_MEASURED]
    for name in wanted:
        if name not in known:
            raise click.UsageError(f"no communicator {name!r} to measure; use {', '.join(known)}")
    return list(dict.fromkeys(wanted)) or known


def _sizes(largest: str) -> list[int]:
    try:
        number = sizes.parse(largest)
    except ValueError as error:
        raise click.UsageError(f"--max-size: {error}") from None
    if number < sizes.SMALLEST:
        raise click.UsageError(f"--max-size: {largest} is less than the smallest size, 1K")
    return sizes.up_to(number)
