"""Every verb of arrays: how ranks call it, and what each of them must get, by NumPy alone.

A verb takes a communicator, `of(n)`, the n-th array in host memory, and `put(n)`, the
same where this rank's arrays lie. All ranks call it. It returns what this rank got, and
a list of what that must be, each with the rank in whose kind of memory it must lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

from tests.support.doubles import gpus
from tests.support.oracles.samples import same, sample
from tests.support.worlds.models import Model, Param

Outcome = tuple[Any, list[tuple[int, Any]]]
OPERATIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def send(comm, of: Callable, put: Callable) -> Outcome:
    """To the next rank of a ring, by `send` and `recv`."""
    me = comm.rank
    size = comm.size
    if size == 1:
        return (), []
    to = (me + 1) % size
    source = (me - 1) % size
    if me % 2 == 0:
        comm.send(put(me), to, 3)
    found = comm.recv(source, 3)
    if me % 2 == 1:
        comm.send(put(me), to, 3)
    return [found], [(source, of(source))]


def bcast(comm, of: Callable, put: Callable) -> Outcome:
    roots = range(comm.size)
    found = []
    for root in roots:
        given = "ignored"
        if comm.rank == root:
            given = put(root)
        found.append(comm.bcast(given, root=root))
    return found, [(root, of(root)) for root in roots]


def gather(comm, of: Callable, put: Callable) -> Outcome:
    ranks = range(comm.size)
    results = []
    for root in ranks:
        mine = (put(comm.rank), put(comm.rank + 1))
        found = comm.gather(mine, root=root)
        assert (found is None) == (comm.rank != root)
        results.extend(found or ())
    return results, [(rank, (of(rank), of(rank + 1))) for rank in ranks]


def scatter(comm, of: Callable, put: Callable) -> Outcome:
    ranks = range(comm.size)
    found = []
    for root in ranks:
        given = None
        if comm.rank == root:
            given = [put(root + to) for to in ranks]
        found.append(comm.scatter(given, root=root))
    return found, [(root, of(root + comm.rank)) for root in ranks]


def allgather(comm, of: Callable, put: Callable) -> Outcome:
    return comm.allgather(put(comm.rank)), [
        (rank, of(rank)) for rank in range(comm.size)
    ]


def alltoall(comm, of: Callable, put: Callable) -> Outcome:
    me = comm.rank
    ranks = range(comm.size)
    found = comm.alltoall([(put(me), put(to)) for to in ranks])
    return found, [(rank, (of(rank), of(me))) for rank in ranks]


def bcast_data(comm, of: Callable, put: Callable) -> Outcome:
    model = Model(a=Param(put(comm.rank)), b=Param(put(comm.rank + 1)))
    comm.bcast_data(model)
    return [model["a"].data, model["b"].data], [(comm.rank, of(0)), (comm.rank, of(1))]


def allreduce(comm, of: Callable, put: Callable, op: str = "sum") -> Outcome:
    me = comm.rank
    ranks = range(comm.size)
    pair = (put(me), put(me + 1))
    found = [comm.allreduce(put(me), op), comm.allreduce(pair, op)]
    one = reduced(of, ranks, op)
    other = reduced(of, [rank + 1 for rank in ranks], op)
    return found, [(me, one), (me, (one, other))]


def reduce_scatter(comm, of: Callable, put: Callable, op: str = "sum") -> Outcome:
    me = comm.rank
    ranks = range(comm.size)
    found = comm.reduce_scatter([put(me + 2 * to) for to in ranks], op)
    expected = reduced(of, [rank + 2 * me for rank in ranks], op)
    return [found], [(me, expected)]


def multi_node_mean(comm, of: Callable, put: Callable) -> Outcome:
    return [comm.multi_node_mean(put(comm.rank))], [(comm.rank, mean(comm, of))]


def multi_node_mean_into(comm, of: Callable, put: Callable) -> Outcome:
    out = put(comm.rank).copy()
    other = put(comm.rank).copy()
    out[...] = 0
    assert comm.multi_node_mean(put(comm.rank), out) is out
    assert comm.multi_node_mean(None, other) is other
    return [out, other], [(comm.rank, mean(comm, of))] * 2


def allreduce_grad(comm, of: Callable, put: Callable) -> Outcome:
    me = comm.rank
    grads = put(me).copy(), put(me + 1).copy()
    model = Model(a=Param(grads[0], grads[0]), b=Param(grads[1], grads[1]))
    comm.allreduce_grad(model)
    expected = [(me, mean(comm, of)), (me, mean(comm, lambda number: of(number + 1)))]
    return [model["a"].grad, model["b"].grad], expected


def reduced(of: Callable, numbers, op: str) -> np.ndarray:
    """In the order of ranks."""
    return np.asarray(reduce(OPERATIONS[op], [of(number) for number in numbers]))


def mean(comm, of: Callable) -> np.ndarray:
    dtype = of(0).dtype  # 16 bits are summed in 32

    def wide(n):
        return of(n).astype(np.result_type(dtype, "f4"))

    total = reduced(wide, range(comm.size), "sum")
    return np.asarray(total / comm.size).astype(dtype)


MOVES = (send, bcast, gather, scatter, allgather, alltoall)
REDUCTIONS = {
    f"{verb.__name__} {op}": (partial(verb, op=op), op)
    for verb in (allreduce, reduce_scatter)
    for op in OPERATIONS
}
MEANS = (multi_node_mean, multi_node_mean_into)
FLOATS = ["float32", "float64"]
INTEGERS = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]


def all_of(dtype: str) -> dict[str, tuple[Callable, bool]]:
    """Every verb that takes such arrays, and whether NCCL does it as NumPy would."""
    found = {verb.__name__: (verb, verb is not send) for verb in MOVES}
    for name, (verb, op) in REDUCTIONS.items():
        if op == "sum" or not dtype.startswith("complex"):  # which have no order
            loses_nans = dtype in FLOATS and op != "sum"
            found[name] = verb, dtype in INTEGERS + FLOATS and not loses_nans
    if dtype.startswith("float"):
        found |= {verb.__name__: (verb, dtype in FLOATS) for verb in MEANS}
        found |= {verb.__name__: (verb, True) for verb in (bcast_data, allreduce_grad)}
    return found


def check(comm, there: list[bool], samples: Iterable[tuple[str, str]], double=None):
    """Assert that every verb gives what NumPy says for such dtypes and layouts (collective).

    `there` says of each rank whether its arrays lie on GPUs. Where a double is given,
    NCCL does what it can, and no array of that touches host memory.
    """
    for dtype, layout in samples:
        verbs = all_of(dtype)
        if len(set(there)) > 1:
            # Which wants a model on GPUs everywhere or nowhere.
            verbs.pop("allreduce_grad", None)
        for name, (verb, by_nccl) in verbs.items():
            try:
                with on_a_stream(there[comm.rank]):
                    copied = check_one(comm, verb, there, dtype, layout, double)
                if double and layout != "empty" and (comm.size > 1 or verb is not send):
                    assert (comm.allreduce_obj(copied) > 0) == (not by_nccl)
            except BaseException as error:
                error.add_note(f"{name} of {dtype}, {layout}")
                raise


def on_a_stream(is_there: bool):
    """What is enqueued on another one isn't done when results are looked at."""
    if not is_there:
        return nullcontext()

    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def check_one(
    comm, verb: Callable, there: list[bool], dtype: str, layout: str, double
) -> int:
    """Likewise of one; returns how many bytes this rank has copied into host memory."""
    given = []
    mine = there[comm.rank]

    def of(number: int) -> np.ndarray:
        if layout == "large":
            return np.resize(sample(number, dtype), (1500, 7))
        return sample(number, dtype, layout)

    def put(number: int):
        if not mine:
            array = of(number)
        elif layout == "large":
            array = gpus.put(of(number))
        else:
            array = gpus.put_sample(number, dtype, layout)
        given.append((array, number))
        return array

    double = double or SimpleNamespace(copied_to_host=0)
    before = double.copied_to_host
    found, results = verb(comm, of, put)
    copied = double.copied_to_host - before
    received = []
    for each, (rank, expected) in zip(found, results, strict=True):
        several = isinstance(expected, tuple)
        assert isinstance(each, tuple) == several
        if not several:
            each = (each,)
            expected = (expected,)
        for array, numbers in zip(each, expected, strict=True):
            check_array(array, numbers, there[rank], is_close=verb is allreduce_grad)
            assert layout != "F" or verb not in MOVES or array.flags.f_contiguous
            received.append(array)
    for array in received:
        if not any(array is one for one, _ in given):  # as bcast's on the root
            array[...] = 0  # it is the caller's own
    if verb is not bcast_data:
        for array, number in given:
            check_array(array, of(number), mine)
    return copied


def check_array(array, expected: np.ndarray, is_there: bool, is_close: bool = False):
    """Also that it is on the current device; gradients there, divided first, are close."""
    assert gpus.on_gpu(array) == is_there
    on_host = array
    if is_there:
        on_host = gpus.to_host(array)
    if is_there and is_close:
        assert on_host.dtype == expected.dtype
        assert_allclose(on_host, expected, rtol=2 * np.finfo(expected.dtype).eps)
    else:
        same(on_host, expected)
    if is_there:
        import cupy

        assert array.device == cupy.cuda.Device()
