"""`chainermn bench`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from chainermn_tools import jobs
from chainermn_tools.cli import options
from chainermn_tools.doctor import COMMUNICATORS
from chainermn_tools.formatting import make_console

SIZES = {"1K": 1 << 10, "16K": 1 << 14, "256K": 1 << 18, "4M": 1 << 22, "64M": 1 << 26}
# A job that takes this long hangs.
LIMIT_SECONDS = 600.0
# Two ranks are enough to show that ranks meet, and more than four show little more.
FEWEST_RANKS = 2
MOST_RANKS = 4


@click.command()
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1),
    metavar="N",
    help="The number of ranks to start. By default it is the number of cores, but at "
    "least 2 and at most 4.",
)
@click.option(
    "--communicator",
    "names",
    multiple=True,
    type=click.Choice(COMMUNICATORS),
    metavar="NAME",
    help=f"A communicator to measure: {', '.join(COMMUNICATORS)}. The option can be "
    "repeated. By default all communicators are measured that exchange arrays in host "
    "memory.",
)
@click.option(
    "--max-size",
    type=click.Choice(list(SIZES)),
    default="64M",
    help="The size of the largest array, 64M by default.",
)
@click.option(
    "--plot", metavar="FILE", help="Draw the times into a picture, such as bench.png."
)
@click.pass_context
def bench(
    ctx: click.Context,
    ranks: int | None,
    names: tuple[str, ...],
    max_size: str,
    plot: str | None,
) -> None:
    """Check what communicators return, and measure how fast they are.

    The command prints one table: the median time of a call for each size of an array in
    host memory. The largest size, 64M, needs 256 MiB for each rank. Before and after
    the calls are timed, every value is compared with the expected value. A run takes up
    to a minute.

    The command starts ranks on this host. Under mpiexec it measures the ranks that
    mpiexec has started, for example on two hosts:

    \b
        chainermn bench -n 4 --plot bench.png
        mpiexec -n 4 -hosts a:2,b:2 chainermn bench   # MPICH
        mpiexec -n 4 --host a:2,b:2 chainermn bench   # Open MPI

    Exit status: 0 if all values were right; 1 if some values were wrong, or nothing
    could be measured; 2 for a wrong command line; 124 after ten minutes; otherwise the
    status of the rank that failed.
    """
    if plot is not None:
        _check_plot(plot)
    if jobs.rank_from_env() is None:
        ctx.exit(_start(ranks, names, max_size, plot))
    if ranks is not None:
        raise click.UsageError("-n: an MPI launcher has already started the ranks")
    sizes = [size for size in SIZES.values() if size <= SIZES[max_size]]
    ctx.exit(_measure_here(names, sizes, plot))


def _check_plot(file: str) -> None:
    """Raise UsageError if matplotlib can't draw such a file."""
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if Path(file).suffix.lower().lstrip(".") not in kinds:
        known = ", ".join(kinds)
        raise click.UsageError(f"--plot: {file} must end in one of: {known}")


def _start(
    ranks: int | None, names: Sequence[str], max_size: str, plot: str | None
) -> int:
    """Start ranks of this same command on this host; return the exit status."""
    from chainermn_tools.launch import run_script

    if ranks is None:
        cores = jobs.available_cores()["usable"]
        ranks = max(FEWEST_RANKS, min(MOST_RANKS, cores))
    command = ["-m", "chainermn_tools", "bench", f"--max-size={max_size}"]
    command += [f"--communicator={name}" for name in names]
    if plot is not None:
        command.append(f"--plot={plot}")
        folder = Path(plot).parent
        if not os.access(folder, os.W_OK):
            raise click.UsageError(f"--plot: nothing can be written in {folder}")
    try:
        launcher = jobs.find_mpiexec()
    except jobs.Unavailable as error:
        raise click.UsageError(str(error)) from None
    result, _ = run_script(
        launcher, ranks, command, lambda command: None, timeout=LIMIT_SECONDS
    )
    if (
        not result.success and "sys.exit" not in result.cause
    ):  # otherwise a rank has printed the reason
        click.echo(f"chainermn bench: {result.message}", err=True)
    return result.status


def _measure_here(names: Sequence[str], sizes: list[int], plot: str | None) -> int:
    """Measure as one of the ranks, and print at rank 0; return the exit status."""
    from mpi4py import MPI

    from chainermn_tools.bench import plot as picture
    from chainermn_tools.bench import runner, table

    if MPI.COMM_WORLD.rank == 0:
        click.echo("chainermn bench: this takes up to a minute", err=True)
    try:
        report = runner.measure(MPI.COMM_WORLD, names, sizes)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    if MPI.COMM_WORLD.rank == 0:
        # Open MPI gives each rank a terminal, wherever the output of mpiexec goes.
        table.render(report, make_console(force_terminal=False))
        if plot is not None:
            options.save("--plot", plot, lambda: picture.plot_report(report, plot))
    return int(not report.correct)
