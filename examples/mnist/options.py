"""The command line that the examples have in common."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence

from mpi4py import MPI

BATCHSIZE = 100  # or all that a rank has, where that is less


def positive(text: str) -> int:
    """The number, if it is 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


positive.__name__ = "number"  # what argparse calls it when `int` fails


def common_options(description: str, epochs: int) -> argparse.ArgumentParser:
    """A parser that knows what all examples are told; one adds its own."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--communicator", default="hierarchical", help="its name (default: %(default)s)")
    add("--gpu", action="store_true", help="give each rank of a node a GPU of its own")
    in_all = "how many in all (default: %(default)s)"
    add("--epoch", "-e", type=positive, default=epochs, help=in_all)
    add("--out", "-o", default="result", help="folder for results (default: %(default)s)")
    return parser


def options(description: str) -> argparse.ArgumentParser:
    """A parser that knows what all examples of this folder are told."""
    parser = common_options(description, epochs=20)
    add = parser.add_argument
    add("--dataset", choices=["digits", "mnist"], default="digits", help="default: %(default)s")
    add("--batchsize", "-b", type=positive, help=f"per rank (default: {BATCHSIZE})")
    add("--unit", "-u", type=positive, default=300, help="per layer (default: %(default)s)")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a mistake is told by rank 0 alone, since all read the same."""
    silent = io.StringIO() if MPI.COMM_WORLD.rank else None
    with (
        contextlib.redirect_stdout(silent or sys.stdout),
        contextlib.redirect_stderr(silent or sys.stderr),
    ):
        return parser.parse_args(argv)
