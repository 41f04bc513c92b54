"""The double of `cupy.cuda.nccl`: operations that travel by MPI while the host polls events."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tests.support.kernel_double import from_bfloat16, to_bfloat16

if TYPE_CHECKING:
    from tests.support.cupy_double import Gpu

# By NCCL's numbers; the last are the bits of bfloat16.
DTYPES = {6: np.dtype("f2"), 7: np.dtype("f4"), 8: np.dtype("f8"), 9: np.dtype("u2")}
BIRTHS = 30_000  # the tag of the messages by which ranks find each other
ID_BYTES = 128
SENT: list[MPI.Request] = []  # by communicators that were aborted


class NcclError(RuntimeError):
    pass


@dataclass(frozen=True)
class Operation:
    """One call: what it reads and, from all ranks' rows of that, what it writes where."""

    name: str
    send: int
    nbytes: int
    write: Callable[[list[np.ndarray]], None]


class Launch:
    """Operations that run as one: all is read before anything is written, in any order."""

    def __init__(self, communicator: Any, operations: list[Operation], number: int) -> None:
        self.communicator, self.operations, self.number = communicator, operations, number
        self.requests: list[MPI.Request] | None = None

    def __call__(self) -> bool:
        gpu, comm = self.communicator.gpu, self.communicator.mpi
        if gpu.nccl_fails:
            return False
        if self.requests is None:
            read = [gpu.bytes_at(operation.send, operation.nbytes) for operation in self.operations]
            # Ranks that call different operations must not get away with it: the name goes ahead.
            names = " ".join(operation.name for operation in self.operations).ljust(200).encode()
            mine = np.concatenate([np.frombuffer(names, np.uint8), *read])
            self.rows = [np.empty_like(mine) for _ in range(comm.size)]
            self.rows[comm.rank] = mine
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            self.requests = [comm.Irecv(self.rows[rank], rank, self.number) for rank in others]
            self.requests += [comm.Isend(mine, rank, self.number) for rank in others]
        if not MPI.Request.Testall(self.requests):
            return False
        heads = {row[:200].tobytes() for row in self.rows}
        assert len(heads) == 1, f"ranks call different operations: {heads}"
        places = np.cumsum([200] + [operation.nbytes for operation in self.operations])
        todo = list(zip(self.operations, places, strict=False))
        gpu.random.shuffle(todo)
        for operation, start in todo:
            operation.write([row[start : start + operation.nbytes] for row in self.rows])
        return True

    def cancel(self) -> None:
        """End what was begun; a send can't be cancelled, and keeps its buffer to the job's end."""
        others = len(self.requests or ()) // 2
        for request in (self.requests or ())[:others]:
            if not request.Test():
                request.Cancel()
                request.Wait()
        SENT.extend((self.requests or ())[others:])


def make_nccl(gpu: Gpu) -> ModuleType:
    """The module of that device."""
    world = MPI.COMM_WORLD
    numbers = itertools.count()
    group: list[tuple[Any, Any, Operation]] | None = None

    def put(communicator: Any, stream: int, operation: Operation) -> None:
        gpu.calls.append(operation.name.split()[0])
        if group is not None:
            group.append((communicator, stream, operation))
        else:
            launch(communicator, stream, [operation])

    def launch(communicator: Any, stream: int, operations: list[Operation]) -> None:
        number = communicator.launches = (communicator.launches + 1) % BIRTHS
        work = Launch(communicator, operations, number)
        communicator.pending.append(work)
        gpu.put(next(s for s in gpu.streams if s.ptr == stream), work)

    def group_start() -> None:
        nonlocal group
        assert group is None, "groups of one thread don't nest here"
        group = []

    def group_end() -> None:
        nonlocal group
        assert group, "an empty group"
        calls, group = group, None
        if gpu.group_fails:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: group")
        assert len({(id(communicator), stream) for communicator, stream, _ in calls}) == 1
        launch(calls[0][0], calls[0][1], [operation for _, _, operation in calls])

    def total(rows: list[np.ndarray], kind: int, op: int) -> np.ndarray:
        assert op == nccl.NCCL_SUM
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

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
            assert len(commId) == ID_BYTES
            root, tag = map(int, np.frombuffer(commId, np.int64)[:2])
            assert ndev > 1
            if rank:
                world.send((rank, world.rank), root, BIRTHS + tag)
                members = world.recv(source=root, tag=BIRTHS + tag)
            else:
                found = [world.recv(tag=BIRTHS + tag) for _ in range(ndev - 1)]
                members = [member for _, member in sorted([(0, root), *found])]
                for member in members[1:]:
                    world.send(members, member, BIRTHS + tag)
            chosen = world.group.Incl(members)
            self.mpi = world.Create_group(chosen, BIRTHS + tag)
            chosen.Free()
            self.gpu, self.launches, self.pending = gpu, 0, []

        def _put(self, name, stream, sendbuf, count, recvbuf, datatype, result) -> None:
            """Put an operation that sends so many elements and writes a result of all rows."""

            def write(rows: list[np.ndarray]) -> None:
                found = result(rows)
                gpu.bytes_at(recvbuf, found.nbytes)[...] = found

            nbytes = count * DTYPES[datatype].itemsize
            put(self, stream, Operation(f"{name} {count} {datatype}", sendbuf, nbytes, write))

        def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
            result = functools.partial(total, kind=datatype, op=op)
            self._put("allReduce", stream, sendbuf, count, recvbuf, datatype, result)

        def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
            def result(rows: list[np.ndarray]) -> np.ndarray:
                return total(rows, datatype, op) if self.mpi.rank == root else rows[0][:0]

            self._put(f"reduce {root}", stream, sendbuf, count, recvbuf, datatype, result)

        def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
            def result(rows: list[np.ndarray]) -> np.ndarray:
                return total([np.split(row, size)[self.mpi.rank] for row in rows], datatype, op)

            size = self.mpi.size
            self._put("reduceScatter", stream, sendbuf, recvcount * size, recvbuf, datatype, result)

        def allGather(self, sendbuf, recvbuf, count, datatype, stream):
            self._put("allGather", stream, sendbuf, count, recvbuf, datatype, np.concatenate)

        def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
            found = operator.itemgetter(root)
            self._put(f"broadcast {root}", stream, sendbuff, count, recvbuff, datatype, found)

        def check_async_error(self) -> None:
            if gpu.nccl_fails:
                raise NcclError("NCCL_ERROR_REMOTE_ERROR: remote process exited")

        def abort(self) -> None:
            gpu.calls.append("abort")
            for work in self.pending:
                work.cancel()
            for stream in gpu.streams:
                stream.queue.clear()
            # Not freed: a later communicator in its place would get messages meant for this one.
            self.pending.clear()

        def destroy(self) -> None:
            gpu.calls.append("destroy")
            assert not any(stream.queue for stream in gpu.streams), "work is under way"
            self.pending.clear()
            self.mpi.Free()

    nccl = ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NCCL_SUM = True, 0
    nccl.NCCL_FLOAT16, nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64, nccl.NCCL_BFLOAT16 = 6, 7, 8, 9
    nccl.NcclError, nccl.NcclCommunicator = NcclError, NcclCommunicator
    nccl.get_version = lambda: gpu.version
    nccl.get_unique_id = lambda: (
        np.array([world.rank, next(numbers) % 1000], np.int64).tobytes().ljust(ID_BYTES, b"\0")
    )
    nccl.groupStart, nccl.groupEnd = group_start, group_end
    return nccl
