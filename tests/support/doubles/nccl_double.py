"""The double of `cupy.cuda.nccl`: operations that travel by MPI while somebody asks for events."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tests.support.doubles.device_double import from_bfloat16, to_bfloat16

if TYPE_CHECKING:
    from tests.support.doubles.cupy_double import Gpu

# By NCCL's numbers, dtypes; the last is of the bits of bfloat16.
INTEGERS = "int8", "uint8", "int32", "uint32", "int64", "uint64"
DTYPES = dict(
    enumerate(map(np.dtype, (*INTEGERS, "float16", "float32", "float64", "uint16")))
)
# Not every CuPy has a name for bfloat16.
NAMES = [dtype.name.upper() for dtype in DTYPES.values() if dtype != np.uint16]
BIRTHS = 30_000  # the tag of the messages by which ranks find each other
# On a communicator of NCCL's: that of its end, which the other ranks notice.
GONE = BIRTHS
TRANSFERS = GONE + 1  # on such a one: the first tag of what is sent between two ranks
ID_BYTES = 128
POLL_SECONDS = 1e-3
ABORT_SECONDS = 5.0  # after which an abort that waits is taken for one that never ends
SENT: list[MPI.Request] = []  # by communicators that were aborted
# Of the communicators of this process, over all its doubles.
NUMBERS = itertools.count()


class NcclError(RuntimeError):
    __module__ = "cupy_backends.cuda.libs.nccl"


@dataclass(frozen=True)
class Operation:
    """One call: what it reads and, from all ranks' rows of that, what it writes where."""

    name: str
    send: int
    nbytes: int
    write: Callable[[list[np.ndarray]], None]


@dataclass(frozen=True)
class Transfer:
    """A `send` or a `recv`, which the other rank's of the same tag meets."""

    name: str
    at: int
    nbytes: int
    peer: int
    tag: int


class Launch:
    """Operations that run as one: all is read before anything is written, in any order."""

    def __init__(self, communicator, operations: list[Any], number: int):
        self.communicator = communicator
        self.operations = operations
        self.number = number
        self.requests: list[MPI.Request] | None = None
        self.receives: list[MPI.Request] = []
        self.cancelled = False

    def __call__(self) -> bool:
        if self.cancelled:
            self.communicator.queued.discard(self)
            return True
        gpu = self.communicator.gpu
        # A device may have no room for the work of two communicators at once.
        if gpu.nccl_fails or gpu.nccl_works_for not in (None, self.communicator):
            return False
        if self.requests is None:
            gpu.nccl_works_for = self.communicator
            self.receives, sends = self.start()
            self.requests = self.receives + sends
        if not MPI.Request.Testall(self.requests):
            return False
        gpu.nccl_works_for = None
        self.finish()
        self.communicator.pending.remove(self)
        self.communicator.queued.discard(self)
        return True

    def start(self) -> tuple[list[MPI.Request], list[MPI.Request]]:
        gpu = self.communicator.gpu
        comm = self.communicator.mpi
        read = [
            gpu.bytes_at(operation.send, operation.nbytes)
            for operation in self.operations
        ]
        # Ranks that call different operations must not get away with it: the name goes
        # ahead.
        names = (
            " ".join(operation.name for operation in self.operations)
            .ljust(200)
            .encode()[:200]
        )
        mine = np.concatenate([np.frombuffer(names, np.uint8), *read])
        self.rows = [np.empty_like(mine) for _ in range(comm.size)]
        self.rows[comm.rank] = mine
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        receives = [comm.Irecv(self.rows[rank], rank, self.number) for rank in others]
        return receives, [comm.Isend(mine, rank, self.number) for rank in others]

    def finish(self):
        heads = {row[:200].tobytes() for row in self.rows}
        assert len(heads) == 1, f"ranks call different operations: {heads}"
        places = np.cumsum([200] + [operation.nbytes for operation in self.operations])
        todo = list(zip(self.operations, places, strict=False))
        self.communicator.gpu.random.shuffle(todo)
        for operation, start in todo:
            operation.write(
                [row[start : start + operation.nbytes] for row in self.rows]
            )

    def cancel(self):
        """End what was begun; a send can't be cancelled, and keeps its buffer to the job's end."""
        self.cancelled = True
        if self.requests is not None:
            self.communicator.gpu.nccl_works_for = None
        for request in self.receives:
            if not request.Test():
                request.Cancel()
                request.Wait()
        SENT.extend((self.requests or ())[len(self.receives) :])
        self.requests = []


class Exchange(Launch):
    """Transfers that run as one."""

    def start(self) -> tuple[list[MPI.Request], list[MPI.Request]]:
        gpu = self.communicator.gpu
        comm = self.communicator.mpi
        receives = []
        sends = []
        for each in self.operations:
            memory = gpu.bytes_at(each.at, each.nbytes)
            if each.name == "recv":
                receives.append(comm.Irecv(memory, each.peer, each.tag))
            else:
                sends.append(comm.Isend(memory, each.peer, each.tag))
        return receives, sends

    def finish(self):
        """Nothing is left to do."""


def make_nccl(gpu: Gpu) -> ModuleType:
    """The module of that device."""
    world = MPI.COMM_WORLD
    # `group`: what the thread's open group holds; None without one.
    mine = threading.local()

    def put(communicator, stream: int, operation: Operation | Transfer):
        gpu.reach(operation.name.split()[0])
        gpu.calls.append(operation.name.split()[0])
        group = getattr(mine, "group", None)
        if group is not None:
            group.append((communicator, stream, operation))
        else:
            launch(communicator, stream, [operation])

    def launch(communicator, stream: int, operations: list[Any]):
        with gpu.lock:
            if isinstance(operations[0], Transfer):
                work = Exchange(communicator, operations, 0)
            else:
                number = communicator.launches = (communicator.launches + 1) % BIRTHS
                work = Launch(communicator, operations, number)
            communicator.pending.append(work)
            communicator.queued.add(work)
            gpu.put(gpu.stream_at(stream), work)

    def group_start():
        assert getattr(mine, "group", None) is None, (
            "groups of one thread don't nest here"
        )
        gpu.reach("groupStart")
        mine.group = []
        mine.aborted = []

    def group_end():
        assert mine.group is not None, "no group was begun"
        calls = mine.group
        mine.group = None
        for communicator in mine.aborted:
            communicator._end()
        gpu.reach("groupEnd")
        if not calls:
            return
        found = len({(id(communicator), stream) for communicator, stream, _ in calls})
        assert found == 1
        launch(calls[0][0], calls[0][1], [operation for _, _, operation in calls])

    def total(rows: list[np.ndarray], kind: int, op: int) -> np.ndarray:
        if op != nccl.NCCL_SUM:
            assert DTYPES[kind].kind in "iu", "NCCL's maxima and minima lose NaNs"
            of = np.minimum
            if op == nccl.NCCL_MAX:
                of = np.maximum
            return of.reduce([row.view(DTYPES[kind]) for row in rows]).view(np.uint8)
        # As in a ring, each step is rounded, and it doesn't begin with rank 0.
        terms = [row.view(DTYPES[kind]) for row in rows]
        result = terms[-1]
        with np.errstate(all="ignore"):
            for term in terms[:-1]:
                if result.dtype == np.uint16:
                    result = to_bfloat16(from_bfloat16(result) + from_bfloat16(term))
                else:
                    result = result + term
        return result.view(np.uint8)

    def until(done: Callable[[], Any]):
        """Wait as NCCL does, which nobody can interrupt but the end of the test."""
        while not (found := done()):
            if gpu.closed:
                raise NcclError("the test is over")
            time.sleep(POLL_SECONDS)
        return found

    def receive(source: int, tag: int):
        message = until(lambda: world.improbe(source=source, tag=tag))
        return message.recv()

    def meet(root: int, tag: int, rank: int, ndev: int) -> list[int]:
        """The world's ranks of the members, once all are there."""
        if rank:
            SENT.append(world.isend((rank, world.rank), root, tag))
            members = receive(root, tag)
            return members
        found = [receive(MPI.ANY_SOURCE, tag) for _ in range(ndev - 1)]
        members = [member for _, member in sorted([(0, root), *found])]
        SENT.extend([world.isend(members, member, tag) for member in members[1:]])
        return members

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: bytes, rank: int):
            assert len(commId) == ID_BYTES
            root, tag = map(int, np.frombuffer(commId, np.int64)[:2])
            gpu.reach("commInitRank")
            members = [world.rank] * (ndev == 1) or meet(root, BIRTHS + tag, rank, ndev)
            chosen = world.group.Incl(members)
            self.mpi = world.Create_group(chosen, BIRTHS + tag)
            chosen.Free()
            self.gpu = gpu
            self.launches = 0
            self.pending = []
            self.aborted = False
            self.transfers: dict[tuple[str, int], int] = {}
            self.queued: set[Launch] = set()  # also those that were cancelled

        def _put(self, name, stream, sendbuf, count, recvbuf, datatype, result):
            """Put an operation that sends so many elements and writes a result of all rows."""
            assert not self.aborted, "it was aborted"

            def write(rows: list[np.ndarray]):
                found = result(rows)
                if found.nbytes:
                    gpu.bytes_at(recvbuf, found.nbytes)[...] = found

            nbytes = count * DTYPES[datatype].itemsize
            put(
                self,
                stream,
                Operation(f"{name} {count} {datatype}", sendbuf, nbytes, write),
            )

        def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
            result = functools.partial(total, kind=datatype, op=op)
            self._put("allReduce", stream, sendbuf, count, recvbuf, datatype, result)

        def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
            none = np.empty(0, np.uint8)
            assert (recvbuf != 0) == (self.mpi.rank == root), (
                "NULL where nothing is received"
            )

            def result(rows: list[np.ndarray]) -> np.ndarray:
                if self.mpi.rank == root:
                    return total(rows, datatype, op)
                return none

            self._put(
                f"reduce {root}", stream, sendbuf, count, recvbuf, datatype, result
            )

        def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
            def result(rows: list[np.ndarray]) -> np.ndarray:
                return total(
                    [np.split(row, size)[self.mpi.rank] for row in rows], datatype, op
                )

            size = self.mpi.size
            self._put(
                "reduceScatter",
                stream,
                sendbuf,
                recvcount * size,
                recvbuf,
                datatype,
                result,
            )

        def allGather(self, sendbuf, recvbuf, count, datatype, stream):
            self._put(
                "allGather", stream, sendbuf, count, recvbuf, datatype, np.concatenate
            )

        def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
            found = operator.itemgetter(root)
            self._put(
                f"broadcast {root}", stream, sendbuff, count, recvbuff, datatype, found
            )

        def send(self, sendbuf, count, datatype, peer, stream):
            self._transfer(
                "send", sendbuf, count * DTYPES[datatype].itemsize, peer, stream
            )

        def recv(self, recvbuf, count, datatype, peer, stream):
            self._transfer(
                "recv", recvbuf, count * DTYPES[datatype].itemsize, peer, stream
            )

        def _transfer(self, name: str, at: int, nbytes: int, peer: int, stream: int):
            assert not self.aborted, "it was aborted"
            assert getattr(mine, "group", None) is not None, (
                "alone it may wait for ever"
            )
            assert peer != self.mpi.rank, "ours stays where it is"
            number = self.transfers[name, peer] = (
                self.transfers.get((name, peer), 0) + 1
            )
            tag = TRANSFERS + number % 1000
            put(self, stream, Transfer(name, at, nbytes, peer, tag))

        def check_async_error(self):
            gpu.reach("getAsyncError")
            if gpu.nccl_fails or self.mpi.iprobe(tag=GONE):
                raise NcclError("NCCL_ERROR_REMOTE_ERROR: remote process exited")

        def abort(self):
            with gpu.lock:
                gpu.calls.append("abort")
                self.aborted = True
                others = [
                    rank for rank in range(self.mpi.size) if rank != self.mpi.rank
                ]
                SENT.extend(self.mpi.isend(None, rank, GONE) for rank in others)
                for work in self.pending:
                    work.cancel()
                # Not freed: a later communicator in its place would get messages meant
                # for this.
                self.pending.clear()
            if getattr(mine, "group", None) is None:
                self._end()
            else:
                mine.aborted.append(self)

        def _end(self):
            """Wait, as an abort does, until the streams have come past all of its work."""
            end = time.monotonic() + ABORT_SECONDS
            while self.queued and not gpu.status and not gpu.closed:
                if time.monotonic() > end:
                    gpu.calls.append("stuck abort")
                    return
                gpu.step()

        def destroy(self):
            gpu.calls.append("destroy")
            assert not self.pending, "work is under way"
            self.mpi.Free()

    def get_unique_id() -> bytes:
        gpu.reach("getUniqueId")
        number = next(NUMBERS) % 100_000
        numbers = np.array([world.rank, number], np.int64)
        return numbers.tobytes().ljust(ID_BYTES, b"\0")

    nccl = ModuleType("cupy.cuda.nccl")
    nccl.available = True
    nccl.NCCL_SUM = 0
    nccl.NCCL_MAX = 2
    nccl.NCCL_MIN = 3
    for number, name in enumerate(NAMES):
        setattr(nccl, f"NCCL_{name}", number)
    nccl.NcclError = NcclError
    nccl.NcclCommunicator = NcclCommunicator
    nccl.get_version = lambda: gpu.version
    nccl.get_unique_id = get_unique_id
    nccl.groupStart = group_start
    nccl.groupEnd = group_end
    return nccl
