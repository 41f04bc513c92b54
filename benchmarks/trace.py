"""Times steps of training on digits with and without a trace, in turn, in one run.

    mpiexec -n 2 python benchmarks/trace.py

Two communicators take turns, step by step, of which one is traced; so whatever else runs on the
machine slows both alike. Printed are the medians, and quartiles of the ratio of neighbours.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import chainer
import chainermn
import numpy as np
import sklearn.datasets
from chainer import functions as F
from chainer import links as L
from measure import priority
from threadpoolctl import threadpool_limits


def network() -> Any:
    return L.Classifier(
        chainer.Sequential(L.Linear(64, 100), F.relu, L.Linear(100, 100), F.relu, L.Linear(100, 10))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="with a trace, and without (2000)")
    parser.add_argument(
        "--realtime", action="store_true", help="keep other work off the cores during each step"
    )
    parser.add_argument("--batch", type=int, default=100, help="examples of a rank (100)")
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
        seconds = np.zeros((args.steps + 20, 2))
        for step in range(len(seconds)):
            # Who comes first has the other's leavings in the caches: each in turn.
            for way in (0, 1) if step % 2 else (1, 0):
                with priority(args.realtime):
                    plain.mpi_comm.Barrier()
                    start = time.perf_counter()
                    ways[way][1].update(ways[way][0], x, t)
                    seconds[step, way] = time.perf_counter() - start
        seconds = seconds[20:]
        ratios = seconds[:, 1] / seconds[:, 0] - 1
        if plain.rank == 0:
            medians = np.median(seconds, axis=0) * 1e6
            cost = np.percentile(ratios, (25, 50, 75))
            print(f"step: {medians[0]:.1f} us, traced {medians[1]:.1f} us", end="; ")
            print(f"cost {medians[1] / medians[0] - 1:.2%}", end="; ")
            print("of neighbours, quartiles: " + ", ".join(f"{each:.2%}" for each in cost))


if __name__ == "__main__":
    main()
