"""Every verb of arrays: how ranks call it, and what each of them must get, by NumPy alone.

A verb takes a communicator, `of(n)`, the n-th array in host memory, and `put(n)`, the same where
this rank's arrays lie. All ranks call it. It returns what this rank got, and a list of what that
must be, each with the rank in whose kind of memory it must lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import numpy as np

from tests.support import gpus
from tests.support.models import Model, Param
from tests.support.samples import same, sample

Outcome = tuple[Any, list[tuple[int, Any]]]
OPERATIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def send(comm: Any, of: Callable, put: Callable) -> Outcome:
    """To the next rank of a ring, by `send` and `recv`."""
    me, size = comm.rank, comm.size
    if size == 1:
        return (), []
    to, source = (me + 1) % size, (me - 1) % size
    if me % 2 == 0:
        comm.send(put(me), to, 3)
    found = comm.recv(source, 3)
    if me % 2 == 1:
        comm.send(put(me), to, 3)
    return [found], [(source, of(source))]


def bcast(comm: Any, of: Callable, put: Callable) -> Outcome:
    roots = range(comm.size)
    found = [comm.bcast(put(root) if comm.rank == root else "ignored", root=root) for root in roots]
    return found, [(root, of(root)) for root in roots]


def gather(comm: Any, of: Callable, put: Callable) -> Outcome:
    ranks, results = range(comm.size), []
    for root in ranks:
        found = comm.gather((put(comm.rank), put(5)), root=root)
        assert (found is None) == (comm.rank != root)
        results.extend(found or ())
    return results, [(rank, (of(rank), of(5))) for rank in ranks]


def scatter(comm: Any, of: Callable, put: Callable) -> Outcome:
    ranks = range(comm.size)
    given = [[put(root + to) for to in ranks] if comm.rank == root else None for root in ranks]
    found = [comm.scatter(given[root], root=root) for root in ranks]
    return found, [(root, of(root + comm.rank)) for root in ranks]


def allgather(comm: Any, of: Callable, put: Callable) -> Outcome:
    return comm.allgather(put(comm.rank)), [(rank, of(rank)) for rank in range(comm.size)]


def alltoall(comm: Any, of: Callable, put: Callable) -> Outcome:
    me, ranks = comm.rank, range(comm.size)
    found = comm.alltoall([(put(me), put(to)) for to in ranks])
    return found, [(rank, (of(rank), of(me))) for rank in ranks]


def bcast_data(comm: Any, of: Callable, put: Callable) -> Outcome:
    model = Model(a=Param(put(comm.rank)), b=Param(put(comm.rank + 1)))
    comm.bcast_data(model)
    return [model["a"].data, model["b"].data], [(comm.rank, of(0)), (comm.rank, of(1))]


def allreduce(comm: Any, of: Callable, put: Callable, op: str = "sum") -> Outcome:
    found = comm.allreduce(put(comm.rank), op)
    return [found], [(comm.rank, reduced(of, range(comm.size), op))]


def reduce_scatter(comm: Any, of: Callable, put: Callable, op: str = "sum") -> Outcome:
    me, ranks = comm.rank, range(comm.size)
    found = comm.reduce_scatter([put(me + to) for to in ranks], op)
    return [found], [(me, reduced(of, [rank + me for rank in ranks], op))]


def multi_node_mean(comm: Any, of: Callable, put: Callable) -> Outcome:
    return [comm.multi_node_mean(put(comm.rank))], [(comm.rank, mean(comm, of))]


def multi_node_mean_into(comm: Any, of: Callable, put: Callable) -> Outcome:
    out, other = put(comm.rank).copy(), put(comm.rank).copy()
    out[...] = 0
    assert comm.multi_node_mean(put(comm.rank), out) is out
    assert comm.multi_node_mean(None, other) is other
    return [out, other], [(comm.rank, mean(comm, of))] * 2


def allreduce_grad(comm: Any, of: Callable, put: Callable) -> Outcome:
    grads = put(comm.rank).copy(), put(5).copy()
    model = Model(a=Param(grads[0], grads[0]), b=Param(grads[1], grads[1]))
    comm.allreduce_grad(model)
    expected = [(comm.rank, mean(comm, of)), (comm.rank, of(5))]
    return [model["a"].grad, model["b"].grad], expected


def reduced(of: Callable, numbers: Any, op: str) -> np.ndarray:
    """In the order of ranks."""
    return np.asarray(reduce(OPERATIONS[op], [of(number) for number in numbers]))


def mean(comm: Any, of: Callable) -> np.ndarray:
    dtype = of(0).dtype  # 16 bits are summed in 32
    total = reduced(lambda n: of(n).astype(np.result_type(dtype, "f4")), range(comm.size), "sum")
    return np.asarray(total / comm.size).astype(dtype)


MOVES: tuple[Callable, ...] = (send, bcast, gather, scatter, allgather, alltoall)
REDUCTIONS = {
    f"{verb.__name__} {op}": (partial(verb, op=op), op)
    for verb in (allreduce, reduce_scatter)
    for op in OPERATIONS
}
MEANS: tuple[Callable, ...] = (multi_node_mean, multi_node_mean_into)
FLOATS, INTEGERS = ("float32", "float64"), ("int8", "uint8", "int32", "int64", "uint64")


def all_of(dtype: str) -> dict[str, tuple[Callable, bool]]:
    """Every verb that takes such arrays, and whether NCCL does it as NumPy would."""
    found = {verb.__name__: (verb, verb is not send) for verb in MOVES}
    for name, (verb, op) in REDUCTIONS.items():
        if op == "sum" or not dtype.startswith("complex"):  # which have no order
            by_nccl = INTEGERS + FLOATS if op == "sum" else INTEGERS  # it loses NaNs
            found[name] = verb, dtype in by_nccl
    if dtype.startswith("float"):
        found |= {verb.__name__: (verb, dtype in FLOATS) for verb in MEANS}
        found |= {verb.__name__: (verb, True) for verb in (bcast_data, allreduce_grad)}
    return found


def check(
    comm: Any, there: list[bool], samples: Iterable[tuple[str, str]], double: Any = None
) -> None:
    """Assert that every verb gives what NumPy says for such dtypes and layouts (collective).

    `there` says of each rank whether its arrays lie on GPUs. Where a double is given, NCCL does
    what it can, and no array of that touches host memory.
    """
    for dtype, layout in samples:
        verbs = all_of(dtype)
        if len(set(there)) > 1:
            verbs.pop("allreduce_grad", None)  # which wants a model on GPUs everywhere or nowhere
        for name, (verb, by_nccl) in verbs.items():
            try:
                touched = check_one(comm, verb, there[comm.rank], there, dtype, layout, double)
                if double and layout != "empty" and (comm.size > 1 or verb is not send):
                    assert touched == (not by_nccl)
            except BaseException as error:
                error.add_note(f"{name} of {dtype}, {layout}")
                raise


def check_one(
    comm: Any, verb: Callable, mine: bool, there: list[bool], dtype: str, layout: str, double: Any
) -> bool:
    """Likewise of one; returns whether any rank copied something into host memory."""
    given = []

    def of(number: int) -> np.ndarray:
        return sample(number, dtype, layout)

    def put(number: int) -> Any:
        array = gpus.put_sample(number, dtype, layout) if mine else of(number)
        given.append((array, number))
        return array

    if double:
        double.made.clear()
    found, results = verb(comm, of, put)
    touched = double is not None and "memcpyAsync to host" in double.made
    for each, (rank, expected) in zip(found, results, strict=True):
        several = isinstance(expected, tuple)
        assert isinstance(each, tuple) == several
        pairs = zip(each, expected, strict=True) if several else [(each, expected)]
        for array, numbers in pairs:
            check_array(array, numbers, there[rank])
    if verb is not bcast_data:
        for array, number in given:
            check_array(array, of(number), mine)
    return comm.allreduce_obj(int(touched)) > 0


def check_array(array: Any, expected: np.ndarray, there: bool) -> None:
    assert gpus.on_gpu(array) == there
    same(gpus.to_host(array) if there else array, expected)
    if there:
        import cupy

        assert array.device == cupy.cuda.Device()
