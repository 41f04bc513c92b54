"""`chainermn bench`."""

from __future__ import annotations

import json
import re

import click
from rich.console import Console

from chainermn_tools.cli import options
from chainermn_tools.formatting import KIB
from chainermn_tools.jobs import Unavailable, available_cores, rank_from_env

# `dummy` moves nothing, and `pure_nccl` no arrays in host memory, as are those here.
NOT_MEASURED = ("dummy", "pure_nccl")
DEFAULT_SECONDS = 60.0
# A run that takes LIMIT_FACTOR times as long as it should, and LEAST_LIMIT_SECONDS at
# least, hangs.
LIMIT_FACTOR, LEAST_LIMIT_SECONDS = 3.0, 60.0
# Sizes that are measured go from 1 KiB by fours.
SMALLEST, STEP = KIB, 4
SIZE = re.compile(r"([0-9]{1,15})\s*(?:([KMGT]?)(?:i?B)?)", re.IGNORECASE)
# More ranks show little more, and two are enough to show that ranks meet.
FEWEST_RANKS, MAX_RANKS = 2, 4


@click.command()
@click.option(
    "-n", "ranks", type=click.IntRange(1), metavar="N", help="Number of ranks to start."
)
@click.option(
    "--communicator",
    "wanted",
    multiple=True,
    metavar="NAME",
    help="One to measure; may be given several times. Without it, all.",
)
@click.option(
    "--max-size",
    default="256M",
    metavar="SIZE",
    help="The largest size, such as 16M. [256M]",
)
@click.option(
    "--seconds",
    type=options.Seconds(1, 86400),
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

    Sizes go from 1 KiB to 256 MiB; values are compared with what they must be before
    anything is timed. Bandwidths are defined as in nccl-tests. Arrays lie in host
    memory.

    It starts the ranks by itself, on this host, or measures those that an MPI launcher
    started:

    \b
        chainermn bench -n 4 --plot bench.png
        mpiexec -hosts a,b -n 4 chainermn bench

    Exit status: 0 when all values were right; 1 when some were not, or nothing could be
    measured; 2 for a wrong command line; 124 when it took too long; else that of the
    job that failed.
    """
    place = rank_from_env()
    names = _names(wanted)
    todo = sizes_to_measure(max_size)
    if place is not None and ranks is not None and place[1] not in (None, ranks):
        raise click.UsageError(
            f"-n {ranks}, but the launcher has started {place[1]} ranks"
        )
    if plot is not None:
        options.validate_plot_path(plot)
    from chainermn_tools.bench import worker  # loads NumPy

    limit = max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * seconds)
    if place is None:
        number = ranks or max(FEWEST_RANKS, min(MAX_RANKS, available_cores()["usable"]))
        result, report = worker.measure_on(number, names, todo, seconds, limit)
        if not result.success:
            worker.log(result.message)
            ctx.exit(result.status)
    else:
        try:
            found = worker.measure_here(names, todo, seconds, limit)
        except Unavailable as error:
            raise click.ClickException(str(error)) from None
        if found is None:
            return  # rank 0 prints it
        report = found
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from chainermn_tools.bench.text import render

        # Open MPI gives each rank a terminal of its own, wherever mpiexec's output
        # goes.
        render(
            report, Console(force_terminal=False if place else None, highlight=False)
        )
    if plot is not None:
        from chainermn_tools.bench.plot import plot_report

        options.save("--plot", plot, lambda: plot_report(report, plot))
    ctx.exit(0 if report["correct"] else 1)


def _names(wanted: tuple[str, ...]) -> list[str]:
    from chainermn_comm.config import NAMES

    known = [name for name in NAMES if name not in NOT_MEASURED]
    for name in wanted:
        if name not in known:
            raise click.UsageError(
                f"no communicator {name!r} to measure; use {', '.join(known)}"
            )
    return list(dict.fromkeys(wanted)) or known


def sizes_to_measure(largest: str) -> list[int]:
    """Return the sizes in bytes; ``64M``, ``64MB`` and ``64MiB`` all mean 64 * 2**20."""
    found = SIZE.fullmatch(largest.strip())
    if found is None:
        raise click.UsageError(
            f"--max-size: {largest!r} is no size; write it as 64K, 16M or 1G"
        )
    limit = int(found[1]) * KIB ** " KMGT".index(found[2].upper() or " ")
    if limit < SMALLEST:
        raise click.UsageError(
            f"--max-size: {largest} is less than the smallest size, 1K"
        )
    sizes = [SMALLEST]
    while sizes[-1] * STEP <= limit:
        sizes.append(sizes[-1] * STEP)
    return sizes
