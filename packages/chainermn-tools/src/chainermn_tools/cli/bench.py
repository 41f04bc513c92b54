"""`chainermn bench`."""

from __future__ import annotations

from importlib.util import find_spec

import click
from rich.console import Console

from chainermn_tools import jobs
from chainermn_tools.cli import options

# `dummy` moves nothing, and `pure_nccl` no arrays in host memory, as are those here.
NOT_MEASURED = ("dummy", "pure_nccl")
SIZES = {"1K": 1 << 10, "16K": 1 << 14, "256K": 1 << 18, "4M": 1 << 22, "64M": 1 << 26}
# A job that takes so long hangs.
LIMIT_SECONDS = 600.0
# Two are enough to show that ranks meet, and more than four show little more.
FEWEST_RANKS = 2
MOST_RANKS = 4


@click.command()
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1),
    metavar="N",
    help="Ranks to start; without it as many as there are cores, from 2 to 4.",
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
    type=click.Choice(list(SIZES)),
    default="64M",
    show_default=True,
    help="The largest size of the arrays, in bytes.",
)
@click.option("--plot", metavar="FILE", help="Draw a picture, such as bench.png.")
@click.pass_context
def bench(
    ctx: click.Context,
    ranks: int | None,
    wanted: tuple[str, ...],
    max_size: str,
    plot: str | None,
) -> None:
    """Check what communicators return, and measure how fast they are.

    It prints one table: the time of a call, the median of many, by size. Arrays lie in
    host memory, and 64M needs 256 MiB of it for each rank. Each value is compared with
    what it must be, before and after the calls are timed. The run takes up to a
    minute.

    It starts the ranks by itself, on this host, or measures those that an MPI launcher
    started:

    \b
        chainermn bench -n 4 --plot bench.png
        mpiexec -hosts a,b -n 4 chainermn bench

    Exit status: 0 when all values were right; 1 when some were not, or nothing could be
    measured; 2 for a wrong command line; 124 after ten minutes; else that of the rank
    that failed.
    """
    names = _names(wanted)
    if plot is not None and find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
    place = jobs.rank_from_env()
    if place is None:
        ctx.exit(_start(ranks, names, max_size, plot))
    if ranks is not None:
        raise click.UsageError("-n: an MPI launcher has already started the ranks")
    sizes = [size for size in SIZES.values() if size <= SIZES[max_size]]
    ctx.exit(_measure_here(place[1], names, sizes, plot))


def _names(wanted: tuple[str, ...]) -> list[str]:
    from chainermn_comm.config import NAMES  # loads NumPy

    known = [name for name in NAMES if name not in NOT_MEASURED]
    for name in wanted:
        if name not in known:
            raise click.UsageError(
                f"no communicator {name!r} to measure; use {', '.join(known)}"
            )
    if wanted:
        return list(dict.fromkeys(wanted))
    return known


def _start(ranks: int | None, names: list[str], max_size: str, plot: str | None) -> int:
    """Start ranks of this same command on this host; return the exit status."""
    from chainermn_tools.launch import run_script

    if ranks is None:
        ranks = jobs.available_cores()["usable"]
        ranks = max(FEWEST_RANKS, min(MOST_RANKS, ranks))
    command = ["-m", "chainermn_tools", "bench", "--max-size", max_size]
    for name in names:
        command += ["--communicator", name]
    if plot is not None:
        command += ["--plot", plot]
    try:
        launcher = jobs.find_mpiexec()
    except jobs.Unavailable as error:
        raise click.UsageError(str(error)) from None
    result, _ = run_script(
        launcher, ranks, command, lambda command: None, timeout=LIMIT_SECONDS
    )
    if not result.success:
        click.echo(f"chainermn bench: {result.message}", err=True)
    return result.status


def _measure_here(
    started: int | None, names: list[str], sizes: list[int], plot: str | None
) -> int:
    """Measure as one of ``started`` ranks, and print at rank 0; return the exit status."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(f"MPI doesn't load: {error}") from None
    world = MPI.COMM_WORLD
    if started not in (None, world.size):
        raise click.ClickException(
            f"{started} processes were started and each is rank {world.rank} of "
            f"{world.size}: this launcher is not that of mpi4py's MPI; see `chainermn env`"
        )
    from chainermn_tools.bench import plot as picture
    from chainermn_tools.bench import runner, text

    if world.rank == 0:
        click.echo("chainermn bench: this takes up to a minute", err=True)
    report = runner.measure(world, names, sizes)
    if world.rank == 0:
        # Open MPI gives each rank a terminal, wherever the output of mpiexec goes.
        text.render(report, Console(force_terminal=False, highlight=False))
        if plot is not None:
            options.save("--plot", plot, lambda: picture.plot_report(report, plot))
    return int(not report.correct)
