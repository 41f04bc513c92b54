"""Times what users call on arrays beside what it is made of, all in one run.

    python benchmarks/verbs.py              verbs, on two ranks and then on four
    python benchmarks/verbs.py --functions  differentiable functions, on two ranks

Verbs stand beside MPI's own call into a fresh array. `send` and `recv`, forward and
backward, stand beside raw MPI that allocates its arrays, too, and beside the least that
Chainer lets such functions cost: two of its own around the same raw calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import runner
from chainer import FunctionNode, Variable
from mpi4py import MPI
from report import Limit, Ratio, are_right, judge, save, show, show_verdicts
from runner import Case, Row, measure

from chainermn_comm import create_communicator
from chainermn_modelparallel import recv, send

OWN = "MPI's own"
OURS = "ours"
# What ours over MPI's own may be, of arrays of 64 MB.
MOST = {"allreduce": 0.7, "bcast": 1.0, "allgather": 1.0, "reduce_scatter": 1.0}
# Floats that travel: small enough for the calls themselves to count, and 64 MB.
SMALL = (1, 1024, 16_384)
LARGE = 16 << 20
CALLS = 10  # of small ones, in a row, as a loop calls them
MOST_OVER_RAW_US = 150
LEAST_OF_RAW = 0.85


class Comparison(NamedTuple):
    """Cases of one table, of which the first is the peer and the last is ours."""

    title: str
    cases: list[Case]
    most: float | None = None  # of ours over the peer
    most_more_us: float | None = None  # microseconds that ours takes more
    calls: int = 1  # whose mean counts as one time


def arguments() -> argparse.Namespace:
    parser = runner.parser(__doc__, rounds=15, ranks=())
    parser.add_argument(
        "--functions", action="store_true", help="differentiable ones, not verbs"
    )
    parser.add_argument("--ranks", type=runner.positive, nargs="+", metavar="N")
    parser.add_argument(
        "--megabytes", type=float, default=64, help="of each array of a verb (64)"
    )
    args = parser.parse_args()
    if args.functions:
        args.ranks = [2]
    elif args.ranks is None:
        args.ranks = [2, 4]
    return args


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure and report (collective); return whether all results were right."""
    found: dict[str, list[Row]] = {}
    comparisons = verbs(comm, args.megabytes * 1e6)
    if args.functions:
        comparisons = functions(comm)
    for title, cases, most, most_more_us, calls in comparisons:
        rows = measure(comm, cases, args.rounds, calls=calls)
        found[title] = rows
        if comm.rank == 0:
            peer = cases[0].name
            ours = cases[-1].name
            limits = []
            if most is not None:
                limits = [Limit(ours, peer, most)]
            show(title, rows, [Ratio(f"x {peer}", peer)], limits)
            if most_more_us is not None:
                more = 1e3 * (np.array(rows[-1]["ms"]) - np.array(rows[0]["ms"]))
                what = f"{ours}: microseconds more than {peer}"
                show_verdicts([judge(what, more, most_more_us)])
    if comm.rank == 0:
        save({"ranks": comm.size, "comparisons": found}, args.json)
    return all(map(are_right, found.values()))


def verbs(world: MPI.Intracomm, nbytes: float) -> Iterator[Comparison]:
    """Yield each verb, whose result must be that of MPI's own call."""
    each = max(1, int(nbytes / 4 / world.size))
    mine = np.full(each * world.size, world.rank + 1.0, "f4")
    parts = list(mine.reshape(world.size, -1))

    def into_fresh(call: Callable[..., Any], elements: int) -> np.ndarray:
        out = np.empty(elements, "f4")
        call(mine, out)
        return out

    def bcast() -> np.ndarray:
        out = mine
        if world.rank != 0:
            out = np.empty_like(mine)
        world.Bcast(out)
        return out

    raw: dict[str, Callable[[], np.ndarray]] = {
        "allreduce": lambda: into_fresh(world.Allreduce, mine.size),
        "bcast": bcast,
        "allgather": lambda: into_fresh(world.Allgather, world.size * mine.size),
        "reduce_scatter": lambda: into_fresh(world.Reduce_scatter_block, each),
    }
    with create_communicator("hierarchical", world) as comm:
        ours: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: comm.allreduce(mine),
            "bcast": lambda: comm.bcast(mine),
            "allgather": lambda: comm.allgather(mine),
            "reduce_scatter": lambda: comm.reduce_scatter(parts),
        }
        for verb, most in MOST.items():
            # Names are those of the verb, too, for a table to be read by itself.
            cases = [
                _with_result(f"{verb}, {OWN}", raw[verb], raw[verb]),
                _with_result(f"{verb}, {OURS}", ours[verb], raw[verb]),
            ]
            title = f"{verb}: {mine.nbytes / 1e6:.3g} MB, {world.size} ranks"
            yield Comparison(title, cases, most=most)


def _with_result(
    name: str, call: Callable[[], Any], expected: Callable[[], np.ndarray]
) -> Case:
    """Return a case; asked whether it is right, it calls again (collective)."""

    def is_right() -> bool:
        return np.array_equal(np.ravel(call()), np.ravel(expected()))

    return Case(name, call, is_right=is_right)


def functions(comm: MPI.Intracomm) -> Iterator[Comparison]:
    """Yield what travels there and back."""
    for floats in SMALL:
        title = f"{floats * 4:,} bytes there and back"
        cases = travel(comm, floats)
        yield Comparison(title, cases, most_more_us=MOST_OVER_RAW_US, calls=CALLS)
    title = f"{LARGE * 4:,} bytes there and back"
    yield Comparison(title, travel(comm, LARGE), most=1 / LEAST_OF_RAW)


def travel(comm: MPI.Intracomm, floats: int) -> list[Case]:
    """An array there and its gradient back, by raw MPI and by `send` and `recv`."""
    data = np.arange(floats, dtype="f")
    gradient = np.ones(floats, "f")
    nothing = Variable(np.empty(0, "f"))
    communicator = create_communicator("naive", comm)
    found: dict[str, np.ndarray] = {}

    def receive(source: int) -> np.ndarray:
        found["array"] = np.empty(floats, "f")
        comm.Recv(found["array"], source)
        return found["array"]

    def raw() -> None:
        if comm.rank == 0:
            comm.Send(data, 1)
            receive(1)
        else:
            receive(0)
            comm.Send(gradient, 0)

    class Sent(FunctionNode):
        def forward(self, inputs: Any) -> Any:
            comm.Send(inputs[0], 1)
            return (nothing.array,)

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            return (Variable(receive(1)),)

    class Received(FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return (receive(0),)

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            comm.Send(grad_outputs[0].array, 0)
            return (None,)

    def bare() -> None:
        if comm.rank == 0:
            (y,) = Sent().apply((Variable(data),))
            y.grad = nothing.array
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

    def is_right() -> bool:
        expected = data
        if comm.rank == 0:
            expected = gradient
        return np.array_equal(found["array"], expected)

    return [
        Case("raw MPI", raw, found.clear, is_right),
        Case("in Chainer's functions", bare, found.clear, is_right),
        Case("send and recv", ours, found.clear, is_right),
    ]


if __name__ == "__main__":
    sys.exit(runner.main(arguments(), run))
