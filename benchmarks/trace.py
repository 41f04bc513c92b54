"""Times steps of training on digits with and without a trace, in turn, in one run.

    mpiexec -n 2 python benchmarks/trace.py

Two communicators take turns, step by step, of which one is traced; so whatever else
runs on the machine slows both alike. Printed are the medians, and quartiles of the
ratio of neighbours.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from typing import Any

import chainer
import chainermn
import numpy as np
import sklearn.datasets
from chainer import functions as F
from chainer import links as L
from in_turn import Timed, time_in_turn
from rich.console import Console
from tables import make_table
from threadpoolctl import threadpool_limits


def network() -> Any:
    return L.Classifier(
        chainer.Sequential(
            L.Linear(64, 100), F.relu, L.Linear(100, 100), F.relu, L.Linear(100, 10)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=2000, help="with a trace, and without (2000)"
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="keep other work off the cores during each step",
    )
    parser.add_argument(
        "--batch", type=int, default=100, help="examples of a rank (100)"
    )
    args = parser.parse_args()
    threadpool_limits(1)  # ranks share the cores
    os.environ.pop("CHAINERMN_TRACE", None)
    plain = chainermn.create_communicator()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CHAINERMN_TRACE"] = folder
        traced = chainermn.create_communicator()
        x, t = sklearn.datasets.load_digits(return_X_y=True)
        x, t = (x[: args.batch] / 16).astype("f4"), t[: args.batch].astype("i4")
        ways = []
        for comm in (plain, traced):
            model = network()
            optimizer = chainermn.create_multi_node_optimizer(
                chainer.optimizers.MomentumSGD(), comm
            )
            optimizer.setup(model)
            ways.append((model, optimizer))
        steps = [
            Timed(partial(optimizer.update, model, x, t)) for model, optimizer in ways
        ]
        world, realtime = plain.mpi_comm, args.realtime
        seconds = time_in_turn(world, steps, args.steps, warm_up=20, realtime=realtime)[
            :, :, 0
        ]
        ratios = seconds[:, 1] / seconds[:, 0] - 1
        if plain.rank == 0:
            medians = np.median(seconds, axis=0) * 1e6
            cost = np.percentile(ratios, (25, 50, 75))
            columns = "traced", "cost", "of neighbours, quartiles"
            quartiles = ", ".join(f"{each:.2%}" for each in cost)
            times = [f"{each:.1f} us" for each in medians]
            row = *times, f"{medians[1] / medians[0] - 1:.2%}", quartiles
            Console().print(make_table("step", columns, [row]))


if __name__ == "__main__":
    main()
