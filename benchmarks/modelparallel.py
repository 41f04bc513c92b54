"""Times model parallelism beside what it is made of, all in one run on two ranks.

    python benchmarks/modelparallel.py

`send` and `recv`, forward and backward, beside raw MPI that allocates its receive
arrays too, and beside the least that Chainer lets such functions cost: two of its own
around the same raw calls; `MultiNodeBatchNormalization`, forward and backward, beside
Chainer's own on each rank's part. All take turns, round after round, and differences
and ratios are taken round by round before their median: on a shared machine a figure is
to be compared with its neighbours of the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
from jobs import RESULT

# Floats that travel: small enough for the calls themselves to count, and 64 MB.
SMALL, LARGE = (1, 1024, 16_384), 16 << 20
MOST_OVER_RAW_US, LEAST_OF_RAW = 150, 0.85
# Small ones are timed in a row, as a loop calls them, and not once each with cold
# caches.
IN_A_ROW = 10
# A linear layer's batch and two convolutions'.
BATCHES = ((32, 256), (16, 64, 8, 8), (16, 64, 28, 28))
MOST_OVER_LOCAL_US = 200


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--repeat", type=int, default=200, help="calls (200; 64 MB: a tenth)"
    )
    parser.add_argument(
        "--realtime", action="store_true", help="see allreduce.py; needs root"
    )
    parser.add_argument(
        "--json", type=Path, default=RESULT / "modelparallel.json", metavar="FILE"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for the whole run"
    )
    return parser.parse_args()


def travel(comm: Any, floats: int) -> list[Any]:
    """An array there and its gradient back, by raw MPI and by `send` and `recv`."""
    import numpy as np
    from chainer import FunctionNode, Variable
    from mpi4py import MPI
    from peers import Case

    from chainermn_comm import create_communicator
    from chainermn_modelparallel import recv, send

    data, gradient = np.arange(floats, dtype="f"), np.ones(floats, "f")
    communicator = create_communicator("naive", comm)
    found: dict[str, Any] = {}

    def raw() -> None:
        found["array"] = np.empty(floats, "f")
        if comm.rank == 0:
            comm.Send(data, 1)
            comm.Recv(found["array"], 1)
        else:
            comm.Recv(found["array"], 0)
            comm.Send(gradient, 0)

    nothing = Variable(np.empty(0, "f"))

    class Sent(FunctionNode):
        def forward(self, inputs: Any) -> Any:
            comm.Send(inputs[0], 1)
            return (nothing.array,)

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            found["array"] = np.empty(floats, "f")
            comm.Recv(found["array"], 1)
            return (Variable(found["array"]),)

    class Received(FunctionNode):
        def forward(self, inputs: Any) -> Any:
            found["array"] = np.empty(floats, "f")
            comm.Recv(found["array"], 0)
            return (found["array"],)

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            comm.Send(grad_outputs[0].array, 0)
            return (None,)

    def bare() -> None:
        if comm.rank == 0:
            (delegate,) = Sent().apply((Variable(data),))
            delegate.grad = nothing.array
            delegate.backward()
        else:
            (y,) = Received().apply((nothing,))
            y.grad = gradient
            y.backward()

    def ours() -> None:
        if comm.rank == 0:
            x = Variable(data)
            send(x, communicator, 1).backward()
            found["array"] = x.grad
        else:
            y = recv(communicator, 0)
            found["array"] = y.array
            y.grad = gradient
            y.backward()

    def right() -> bool:
        expected = gradient if comm.rank == 0 else data
        return bool(comm.allreduce(np.array_equal(found["array"], expected), MPI.LAND))

    return [
        Case("raw MPI", "mpi", found.clear, raw, right),
        Case("in Chainer's functions", "peer", found.clear, bare, right),
        Case("send and recv", "ours", found.clear, ours, right),
    ]


def normalizations(comm: Any, shape: tuple[int, ...]) -> list[Any]:
    """Forward and backward of a batch normalization, of each rank's part and of both together."""
    import chainer.links as L
    import numpy as np
    from chainer import Variable
    from mpi4py import MPI
    from peers import Case

    from chainermn_comm import create_communicator
    from chainermn_modelparallel import MultiNodeBatchNormalization

    communicator = create_communicator("naive", comm)
    random = np.random.default_rng(5)
    whole, gy = random.standard_normal((2, 2, *shape)).astype("f")
    found: dict[str, Any] = {}

    def case(name: str, kind: str, link: Any, expected: Callable[[], Any]) -> Case:
        def call() -> None:
            link.cleargrads()
            x = Variable(whole[comm.rank])
            y = link(x)
            y.grad = gy[comm.rank]
            y.backward()
            found["gx"] = x.grad

        def right() -> bool:
            close = np.allclose(found["gx"], expected(), atol=1e-4)
            return bool(comm.allreduce(close, MPI.LAND))

        return Case(name, kind, found.clear, call, right)

    def gradient(data: Any, gy: Any) -> Any:
        x = Variable(data)
        y = L.BatchNormalization(shape[1])(x)
        y.grad = gy
        y.backward()
        return x.grad

    both = gradient(whole.reshape(-1, *shape[1:]), gy.reshape(-1, *shape[1:]))
    return [
        case(
            "local",
            "peer",
            L.BatchNormalization(shape[1]),
            lambda: gradient(whole[comm.rank], gy[comm.rank]),
        ),
        case(
            "multi-node",
            "ours",
            MultiNodeBatchNormalization(shape[1], communicator),
            lambda: both[comm.rank * shape[0] :][: shape[0]],
        ),
    ]


def compare(
    title: str, cases: list[Any], comm: Any, args: argparse.Namespace, in_a_row: int
) -> Any:
    """Time cases (collective): milliseconds, and by how much the first and last differ."""
    import numpy as np
    from measure import measure

    rounds = max(3, args.repeat // 10)
    rows = measure(cases, comm, rounds, args.realtime, calls=in_a_row)
    reference, *_, ours = (np.array(row["ms"]) for row in rows)
    return {
        "title": title,
        "right": all(row["right"] for row in rows),
        "ms": {row["name"]: float(np.median(row["ms"])) for row in rows},
        "over_us": np.percentile((ours - reference) * 1e3, (25, 50, 75))
        .round(1)
        .tolist(),
        "of_raw": np.percentile(reference / ours, (25, 50, 75)).round(3).tolist(),
    }


def run(args: argparse.Namespace) -> bool:
    """Measure and report (collective over MPI.COMM_WORLD); whether all results were right."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    results = []
    for floats in (*SMALL, LARGE):
        title = f"{floats * 4:,} bytes there and back"
        in_a_row = IN_A_ROW if floats < LARGE else 1
        result = compare(title, travel(comm, floats), comm, args, in_a_row)
        if floats < LARGE:
            result["limit"] = f"at most {MOST_OVER_RAW_US} us more"
            result["ok"] = result["over_us"][1] <= MOST_OVER_RAW_US
        else:
            result["limit"] = f"at least {LEAST_OF_RAW:.0%} of the speed"
            result["ok"] = result["of_raw"][1] >= LEAST_OF_RAW
        results.append(result)
    for shape in BATCHES:
        title = f"batch normalization of {shape} a rank"
        result = compare(title, normalizations(comm, shape), comm, args, IN_A_ROW)
        result["limit"] = f"at most {MOST_OVER_LOCAL_US} us more"
        result["ok"] = result["over_us"][1] <= MOST_OVER_LOCAL_US
        results.append(result)
    if comm.rank == 0:
        report(results)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(args.json)
    return all(result["right"] for result in results)


def report(results: list[Any]) -> None:
    """Print a table of the comparisons, with quartiles of the differences, beside their limits."""
    from rich.console import Console
    from tables import make_table

    rows: list[tuple[str, ...]] = []
    for result in results:
        low, over, high = result["over_us"]
        beside = f"{over:.0f} ({low:.0f} - {high:.0f})", f"{result['of_raw'][1]:.0%}"
        rows.append((result["title"], "", "", ""))
        rows += [
            (f"  {name}", f"{ms:.3f}", "", "") for name, ms in result["ms"].items()
        ]
        rows[-1] = (*rows[-1][:2], *beside)
        verdict = ("ok" if result["ok"] else "not ok") + ", and WRONG" * (
            not result["right"]
        )
        rows.append((f"  limit: {result['limit']}: {verdict}", "", "", ""))
    columns = "ms", "us more (quartiles)", "of the speed"
    Console(highlight=False).print(make_table("", columns, rows))


if __name__ == "__main__":
    sys.exit(jobs.start_and_run(arguments(), 2, run))
