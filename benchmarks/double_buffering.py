"""Times training steps with double buffering over two hosts of one rank, joined by a slow link.

    python benchmarks/double_buffering.py

A step computes for a while, in BLAS or in pure Python, and then has the gradients of ResNet-50
(102 MB). It is timed alone (nothing is exchanged), with the synchronous optimizer, and with double
buffering. The three take turns, round after round, and what is hidden is taken round by round:

    hidden = (synchronous - double buffering) / min(alone, synchronous - alone)

The hosts are namespaces of this machine, as for `hosts.py`; each rank has one core or less. Exits 1
where a limit doesn't hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
from jobs import RESULT

RANKS = {"alpha": 1, "beta": 1}
MODES = ("alone", "synchronous", "double buffering")
# What must hold for the medians over rounds: of what is hidden of steps in BLAS, and of double
# buffering's step over the synchronous one.
HIDDEN, NOT_SLOWER = 0.8, 1.0
# Enough to find out how long one takes.
TRIAL_UNITS = 500


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument("--rate", default="1gbit", help="what each host may send (1gbit)")
    parser.add_argument("--model", default="ResNet-50", metavar="NAME", help="of shapes.py")
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument("--kinds", nargs="+", default=["BLAS", "Python"], help="of steps")
    parser.add_argument(
        "--compute",
        type=float,
        default=1.2,
        help="seconds a step computes, as a multiple of the exchange's (1.2)",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps timed in a turn (3)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (5)")
    parser.add_argument(
        "--json", type=Path, default=RESULT / "double_buffering.json", metavar="FILE"
    )
    parser.add_argument("--timeout", type=float, default=550, help="seconds for the whole run")
    return parser.parse_args()


def work_in_blas(units: int) -> None:
    """Multiplies matrices, about a millisecond each."""
    import numpy as np

    matrix = np.full((256, 256), 1e-3, np.float32)
    for _ in range(units):
        matrix = matrix @ matrix


def work_in_python(units: int) -> None:
    """Does nothing but hold the interpreter, about a millisecond each."""
    for _ in range(units):
        total = 0
        for number in range(20_000):
            total += number & 3


WORK: dict[str, Callable[[int], None]] = {"BLAS": work_in_blas, "Python": work_in_python}


class Step:
    """What one of the three does in a step."""

    def __init__(self, mode: str, communicator: Any, shapes: list[tuple[int, ...]]) -> None:
        import chainer
        import numpy as np

        from chainermn_train import create_multi_node_optimizer

        self.model = chainer.Link()
        with self.model.init_scope():
            for number, shape in enumerate(shapes):
                setattr(self.model, f"p{number}", chainer.Parameter(np.zeros(shape, np.float32)))
        self.optimizer = create_multi_node_optimizer(
            chainer.optimizers.SGD(lr=0.01), communicator, mode == "double buffering"
        ).setup(self.model)

    def __call__(self, work: Callable[[int], None], units: int) -> None:
        self.optimizer.update(lambda: self._loss(work, units))

    def _loss(self, work: Callable[[int], None], units: int) -> Any:
        work(units)
        return self

    def backward(self, **_: Any) -> None:
        """Makes new gradients, as Chainer's functions do."""
        import numpy as np

        for param in self.model.params():
            param.grad = np.full_like(param.array, 1e-3)


def timed(step: Step, work: Callable[[int], None], units: int, count: int) -> tuple[float, float]:
    """Seconds a step took, and the processor's seconds of this rank."""
    from chainermn_tools.bench.timing import time_call

    step.optimizer.communicator.allgather_obj(None)
    step(work, units)  # fills the buffer
    start = time.process_time()
    seconds = time_call(None, lambda: step(work, units), count)
    processor = time.process_time() - start
    step.optimizer.flush()
    return seconds, processor / count


def units_for(comm: Any, step: Step, work: Callable[[int], None], seconds: float) -> int:
    """How much work takes all ranks at once so long, gradients included; the same on all ranks."""
    none, some = (timed(step, work, units, 2)[0] for units in (0, TRIAL_UNITS))
    mine = (seconds - none) * TRIAL_UNITS / max(some - none, 1e-6)
    slowest: float = max(comm.allgather_obj(mine))
    return max(1, round(slowest))


def run(args: argparse.Namespace) -> bool:
    import shapes

    from chainermn_comm import create_communicator

    with contextlib.suppress(OSError):  # what else runs on this machine shall count little
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20")
    comm = create_communicator(args.communicator)
    nothing = create_communicator("dummy")
    model = list(shapes.MODELS[args.model].values())
    steps = {mode: Step(mode, nothing if mode == "alone" else comm, model) for mode in MODES}
    results: dict[str, Any] = {}
    for kind in args.kinds:
        work = WORK[kind]
        exchange = timed(steps["synchronous"], work, 0, 2)[0]
        exchange = max(comm.allgather_obj(exchange))
        units = units_for(comm, steps["alone"], work, args.compute * exchange)
        rounds = []
        for _ in range(args.repeat):
            mine = {mode: timed(steps[mode], work, units, args.steps) for mode in MODES}
            ranks = comm.allgather_obj(mine)
            # A step is over when the slowest rank has done it.
            rounds.append({mode: max(rank[mode] for rank in ranks) for mode in MODES})
        results[kind] = summary(kind, rounds)
    for step in steps.values():
        step.optimizer.finalize()
    right = all(limit["ok"] for row in results.values() for limit in row["limits"])
    if comm.rank == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"arguments": str(args), "kinds": results}, indent=1))
        print_table(results)
    return right


def summary(kind: str, rounds: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """What the rounds of one kind of step come to."""
    import numpy as np
    from limits import AT_LEAST, AT_MOST, judge

    hidden, ratio = [], []
    for each in rounds:
        alone, synchronous, double = (each[mode][0] for mode in MODES)
        hidden.append((synchronous - double) / min(alone, max(synchronous - alone, 1e-9)))
        ratio.append(double / synchronous)
    limits = [judge(f"steps in {kind}: over synchronous", AT_MOST, NOT_SLOWER, np.array(ratio))]
    if kind != "Python":
        limits.append(judge(f"steps in {kind}: hidden", AT_LEAST, HIDDEN, np.array(hidden)))
    return {
        "milliseconds": {m: [1e3 * each[m][0] for each in rounds] for m in MODES},
        "processor": {m: [1e3 * each[m][1] for each in rounds] for m in MODES},
        "hidden": hidden,
        "over synchronous": ratio,
        "limits": limits,
    }


def print_table(results: dict[str, Any]) -> None:
    from statistics import median

    from report import limits_table
    from rich.console import Console

    from chainermn_tools.bench.text import make_table

    console = Console(highlight=False)
    for kind, row in results.items():
        rows = []
        for mode in MODES:
            wall, processor = row["milliseconds"][mode], row["processor"][mode]
            extremes = f"{min(wall):.0f} - {max(wall):.0f}"
            rows.append((mode, f"{median(wall):.0f}", extremes, f"{median(processor):.0f}"))
        hidden = row["hidden"]
        rows.append(
            ("hidden", f"{median(hidden):.2f}", f"{min(hidden):.2f} - {max(hidden):.2f}", "")
        )
        rows.append(("step over synchronous", f"{median(row['over synchronous']):.2f}", "", ""))
        columns = "median", "min - max", "of the processor"
        console.print(make_table("milliseconds a step", columns, rows, f"steps in {kind}"))
    console.print(limits_table([limit for row in results.values() for limit in row["limits"]]))


if __name__ == "__main__":
    variables = {"OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "110"}
    sys.exit(jobs.start_on_hosts_and_run(arguments(), RANKS, run, ["json"], variables))
