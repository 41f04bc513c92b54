"""Times training on digits with `chainermn top` attached and without, in turn, in one run.

    mpiexec -n 2 python benchmarks/top.py

Rank 0 starts `top` as on a terminal, and stops it while the steps without it are timed.
Printed are the median times of a step in blocks of some seconds, quartiles of the
ratios of neighbours, and the time that `top` and the job's monitor took of all cores:
what ranks lose that use them all.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import Any

import chainer
import chainermn
import numpy as np
import psutil  # type: ignore[import-untyped]
import sklearn.datasets
from rich.console import Console
from step_models import Perceptron
from tables import make_table
from threadpoolctl import threadpool_limits

DIGITS = Perceptron((64, 100, 100, 10), 100)
START_SECONDS = 5.0  # for `top` to have begun


def watchers(top: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return `top`, and this job's monitor."""
    words = {str(os.getpid())}
    found = [psutil.Process(top.pid)]
    for one in psutil.process_iter(["cmdline"]):
        line = one.info["cmdline"] or []
        if words & set(line) and any("watchdog.monitor" in word for word in line):
            found.append(one)
    return found


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=20, help="blocks of each kind (20)"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of a block (4)")
    args = parser.parse_args()
    threadpool_limits(1)  # ranks share the cores
    comm = chainermn.create_communicator()
    x, t = sklearn.datasets.load_digits(return_X_y=True)
    x, t = (x[: DIGITS.batch] / 16).astype("f4"), t[: DIGITS.batch].astype("i4")
    model = DIGITS.make()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(), comm
    )
    optimizer.setup(model)

    def block(steps: int) -> float:
        """Return the seconds of a step."""
        comm.mpi_comm.Barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.update(model, x, t)
        comm.mpi_comm.Barrier()
        return (time.perf_counter() - begun) / steps

    block(100)
    steps = comm.bcast_obj(round(args.seconds / block(200)))
    top: Any = None
    if comm.rank == 0:
        command = [sys.executable, "-m", "chainermn_tools", "top", str(os.getpid())]
        # By which rich takes it for a terminal.
        shown = os.environ | {"FORCE_COLOR": "1"}
        top = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=shown)
        time.sleep(START_SECONDS)
    seconds, shares = np.zeros((args.rounds, 2)), []
    for turn in range(args.rounds):
        for attached in (turn % 2, 1 - turn % 2):
            if top:
                top.send_signal(signal.SIGCONT if attached else signal.SIGSTOP)
                before = cpu_seconds(watchers(top)), time.monotonic()
            seconds[turn, attached] = block(steps)
            if top and attached:
                taken = cpu_seconds(watchers(top)) - before[0]
                shares.append(
                    taken / (time.monotonic() - before[1]) / (os.cpu_count() or 1)
                )
    if top:
        assert top.poll() is None, "top has ended"
        top.send_signal(signal.SIGCONT)
        top.terminate()
        top.wait()
        ratios = np.percentile(seconds[:, 1] / seconds[:, 0], (25, 50, 75))
        row = (
            *(f"{each * 1e6:.1f} us" for each in np.median(seconds, axis=0)),
            ", ".join(f"{each:.4f}" for each in ratios),
            f"{np.median(shares):.3%}",
        )
        columns = "with top", "of neighbours, quartiles", "of all cores"
        Console().print(make_table("step", columns, [row]))


if __name__ == "__main__":
    main()
