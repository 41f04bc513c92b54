"""An exception at some bytecode of a collective call, as a signal's handler raises it: for jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm import CommunicationError, PeerError, create_communicator
from chainermn_comm.messaging import collectives
from tests.support.worlds.models import with_grads

OURS = "/chainermn_comm/"
LARGE = collectives.SMALL_BYTES // 8 + 1  # numbers that travel by themselves
MEAN_NAMES = ("flat", "hierarchical")
STEADY_CALLS = 3
# Calls before the first that is interrupted: later ones find more in caches.
UNTOUCHED = 2


# What a handler may raise: an error of the system, or of another communicator.
PLANTED = (InterruptedError, PeerError)


class Bytecodes:
    """Counts the bytecodes of our code within, and raises at one of them.

    Attributes:
        count: of all so far.
        before: of those before this rank had begun the call.
    """

    def __init__(self, has_begun: Callable[[], bool], at: int = 0) -> None:
        self._has_begun, self._at = has_begun, at
        self.count = self.before = 0

    def __enter__(self) -> Bytecodes:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if OURS not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.count += 1
            self.before += not self._has_begun()
            if self.count == self._at:  # Python then traces no more
                raise PLANTED[self._at % 2]("planted")
        return self._step


class CountedComm(MPI.Intracomm):
    """MPI's communicator that counts the handshakes on it."""

    handshakes = 0

    def Allgather(self, *arguments: Any) -> None:
        type(self).handshakes += 1
        super().Allgather(*arguments)


class Call(NamedTuple):
    """A collective call, of which communicator, how many there were, and what checks the result."""

    comm: Any
    number: Callable[[], int]
    make: Callable[[], Any]
    check: Callable[[Any], None]


def same(expected: Any) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        if expected is None:
            assert found is None
        else:
            np.testing.assert_array_equal(found, expected)

    return check


def table(comm: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """By name, what is called, and what checks the result."""
    rank, size = comm.rank, comm.size
    own, rows = (
        np.full(LARGE, rank + 1.0),
        [np.full(LARGE, it + 1.0) for it in range(size)],
    )
    root = size - 1
    total, ranks = np.full(LARGE, size * (size + 1) / 2), list(range(size))

    def is_root(expected: Any) -> Any:
        return expected if rank == root else None

    def initialised() -> Any:
        model = with_grads(v=own.copy(), w=own.astype("f4"))
        for _, param in model.namedparams():
            param.data = param.grad
        comm.bcast_data(model)
        return [param.data for _, param in model.namedparams()]

    def save() -> Any:
        return comm.handshake(
            "save", (("step", 3), ("of", [1])), payload=bytes([rank]) * 99
        )

    return {
        "allreduce": (lambda: comm.allreduce(own), same(total)),
        "multi_node_mean": (lambda: comm.multi_node_mean(own), same(total / size)),
        "bcast": (lambda: comm.bcast(own, root=root), same(rows[root])),
        "gather": (lambda: comm.gather(own, root), same(is_root(rows))),
        "scatter": (lambda: comm.scatter(rows, root), same(own)),
        "alltoall": (lambda: comm.alltoall(rows), same([own] * size)),
        "allgather": (lambda: comm.allgather(own), same(rows)),
        "reduce_scatter": (lambda: comm.reduce_scatter(rows), same(size * own)),
        "bcast_obj": (lambda: comm.bcast_obj([rank], root=root), same([root])),
        "gather_obj": (lambda: comm.gather_obj(rank, root), same(is_root(ranks))),
        "scatter_obj": (lambda: comm.scatter_obj(ranks, root), same(rank)),
        "alltoall_obj": (lambda: comm.alltoall_obj(ranks), same([rank] * size)),
        "allgather_obj": (lambda: comm.allgather_obj(rank), same(ranks)),
        "allreduce_obj": (lambda: comm.allreduce_obj(rank), same(sum(ranks))),
        "bcast_data": (initialised, same([rows[0], rows[0]])),
        "handshake": (save, same([bytes([it]) * 99 for it in ranks])),
    }


def mean(
    comm: Any, present: bool = True
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return what takes means of gradients, of which one may be missing here, and a check."""
    sums = np.full(LARGE, (comm.size + 1) / 2)
    without_first = (sums * comm.size - 1) / comm.size

    def make() -> Any:
        model = with_grads(
            v=np.full(LARGE, comm.rank + 1.0), w=np.full(LARGE, comm.rank + 1.0)
        )
        if not present and comm.rank == 0:
            model["w"].grad = None
        comm.multi_node_mean_grad(model, zero_fill=not present)
        return [model["v"].grad, model["w"].grad]

    return make, same([sums, sums if present else without_first])


def prepare(name: str, comm: Any) -> Call:
    """Return the next call of that name, of `comm` or of a new communicator (collective)."""
    what, _, how = name.partition(" ")
    if what == "create_communicator":
        given = CountedComm(MPI.COMM_WORLD)
        return Call(
            comm,
            lambda: CountedComm.handshakes,
            lambda: create_communicator("naive", given),
            lambda made: same(comm.size)(made.allreduce(1)),
        )
    if what == "finalize" or how == "first":
        comm = create_communicator(comm.communicator_name)
        if what == "finalize":
            mean(comm)[0]()
    handshake = comm._group.handshake
    if what == "finalize":
        make, check = comm.finalize, same(None)
    elif what == "split":
        make, check = (
            (lambda: comm.split(0, 0)),
            lambda made: same(comm.size)(made.allreduce(1)),
        )
    elif what == "allreduce_grad":
        make, check = mean(comm, present=how != "zeros")
    else:
        make, check = table(comm)[what]
    if how == "steady":
        for _ in range(STEADY_CALLS):
            check(make())
    return Call(comm, lambda: handshake._calls, make, check)


VERBS = ("bcast", "gather", "scatter", "alltoall", "allgather", "allreduce")
NAMES = (
    *(f"{verb}{kind}" for verb in VERBS for kind in ("", "_obj")),
    *(
        "multi_node_mean",
        "reduce_scatter",
        "bcast_data",
        "handshake",
        "split",
        "finalize",
        "create_communicator",
    ),
    *("allreduce_grad first", "allreduce_grad steady", "allreduce_grad zeros"),
)


def run(base: str, name: str, odd: int, path: Path, places: list[float]) -> None:
    """Interrupt rank `odd` at each of those places of a call; `path` gets the number of the last.

    Places from 0 to 1 are before the call has begun on the rank, those from 1 to 2 are
    later. Before the next one, all ranks have raised or made the call, and make others.
    """
    comm, world, is_odd = (
        create_communicator(base),
        MPI.COMM_WORLD.Dup(),
        MPI.COMM_WORLD.rank == odd,
    )
    before = count = 0
    for number, place in enumerate([-1.0] * UNTOUCHED + places, 1 - UNTOUCHED):
        call = prepare(name, comm)
        begin = call.number()
        at = 1 + int(
            place * before if place < 1 else before + (place - 1) * (count - before)
        )
        bytecodes = Bytecodes(lambda: call.number() > begin, at if number > 0 else 0)  # noqa: B023
        world.Barrier()
        error: BaseException | None = None
        result: Any = None
        try:
            if is_odd:
                path.write_text(f"{number - 1} {at} of {before} {count}")
                with bytecodes:
                    result = call.make()
            else:
                result = call.make()
        except (InterruptedError, CommunicationError) as raised:
            error = raised
        if is_odd and error is not None:
            if call.comm._interruptions:
                check_refused(call.comm, path)
            if call.number() == begin:  # the others wait
                error, result = None, call.make()
        errors = world.allgather(repr(error))
        # A rank for which the call was over when it raised doesn't have the new
        # communicator.
        if error is None and (
            errors[odd] == "None" or not hasattr(result, "allreduce")
        ):
            call.check(result)
        others = {errors[rank] for rank in range(world.size) if rank != odd}
        assert len({it.split("(")[0] for it in others}) == 1, errors
        if number <= 0:
            before, count = bytecodes.before, bytecodes.count
            assert errors == ["None"] * world.size, errors
        check_in_step(comm, world)
    print("DONE", flush=True)


def check_in_step(comm: Any, world: Any) -> None:
    """All ranks have made the same calls, and further ones are right."""
    counts = world.allgather(comm._group.handshake._calls)
    assert len(set(counts)) == 1, counts
    for make, check in (
        mean(comm),
        table(comm)["allreduce"],
        table(comm)["gather_obj"],
    ):
        check(make())


def check_refused(comm: Any, path: Path) -> None:
    """Where the job may not be aborted, no later call waits for another rank."""
    for make, _ in table(comm).values():
        with pytest.raises(CommunicationError, match=r"interrupted .*Error: planted"):
            make()
    path.with_suffix(".refused").touch()
    MPI.COMM_WORLD.Abort(0)
