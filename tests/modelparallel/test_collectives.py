"""The collective functions between ranks, against the same graph in one process.

Every rank draws the inputs of all ranks from the same random numbers, computes the
graph of all ranks in one process, whose loss is the sum of theirs, and compares its own
part.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Parameter, Variable, no_backprop_mode, using_config
from numpy.testing import assert_allclose, assert_array_equal

from chainermn_comm import RankMismatchError, create_communicator
from chainermn_modelparallel import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    pseudo_connect,
    reduce_scatter,
    scatter,
)
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.third_party import WITH_THIRD_PARTY
from tests.support.worlds.topologies import NAMES

pytestmark = pytest.mark.world

SEVERAL = pytest.mark.sizes(2, 3, 4)
TOLERANCE = {np.float16: 2e-2, np.float32: 1e-5, np.float64: 1e-12}
ONE = np.ones(1)


def shapes_uneven(size, rank):
    return [((), (0, 2), (3,), (2, 1, 2))[rank]]


def shapes_one_for_each(size, rank):
    return [((2,), (0, 3), (), (1, 2))[i] for i in range(size)]


def shapes_uneven_for_each(size, rank):
    return [(rank + 1, i) for i in range(size)]


# Shapes of a rank's inputs, by size and rank.
SHAPES = {
    "one": lambda size, rank: [(2, 3)],
    "rows": lambda size, rank: [(size, 3)],
    "uneven": shapes_uneven,
    "one for each": shapes_one_for_each,
    "uneven for each": shapes_uneven_for_each,
}


def firsts(xs):
    return [x for (x,) in xs]


def columns(xs):
    return [list(column) for column in zip(*xs, strict=True)]


def call_bcast_from_last(c, x):
    return [bcast(c, x[0], c.size - 1)]


def call_gather_to_last(c, x):
    return gather(c, x[0], root=c.size - 1)


def call_alltoall_of_rows(c, x):
    return alltoall(c, x[0])


def call_allgather(c, x):
    return allgather(c, x[0])


def call_allreduce(c, x):
    return [allreduce(c, x[0])]


def call_allreduce_mean(c, x):
    return [allreduce(c, x[0], op="mean")]


# Shapes of a rank's inputs, and its outputs by the communicator and its inputs.
CALLS = {
    "bcast from last": ("uneven", call_bcast_from_last),
    "gather to last": ("uneven", call_gather_to_last),
    "scatter": ("uneven for each", lambda c, x: [scatter(c, x)]),
    "alltoall": ("uneven for each", alltoall),
    "alltoall of rows": ("rows", call_alltoall_of_rows),
    "allgather": ("uneven", call_allgather),
    "allreduce": ("one", call_allreduce),
    "allreduce, mean": ("one", call_allreduce_mean),
    "reduce_scatter": ("one for each", lambda c, x: [reduce_scatter(c, x)]),
}


def alone_bcast_from_last(xs):
    return [xs[-1]] * len(xs)


def alone_gather_to_last(xs):
    return [*([] for _ in xs[1:]), firsts(xs)]


def alone_scatter(xs):
    return [[x] for x in xs[0]]


def alone_alltoall_of_rows(xs):
    return columns([[*x] for (x,) in xs])


def alone_allgather(xs):
    return [firsts(xs)] * len(xs)


def alone_allreduce(xs):
    return [[sum(firsts(xs))]] * len(xs)


def alone_allreduce_mean(xs):
    total = sum(firsts(xs)) * (1 / len(xs))
    return [[total]] * len(xs)


def alone_reduce_scatter(xs):
    return [[sum(column)] for column in columns(xs)]


# In one process: all ranks' outputs by all ranks' inputs.
ALONE = {
    "bcast from last": alone_bcast_from_last,
    "gather to last": alone_gather_to_last,
    "scatter": alone_scatter,
    "alltoall": columns,
    "alltoall of rows": alone_alltoall_of_rows,
    "allgather": alone_allgather,
    "allreduce": alone_allreduce,
    "allreduce, mean": alone_allreduce_mean,
    "reduce_scatter": alone_reduce_scatter,
}


def loss_of(outputs, rank, dtype):
    """A rank's loss; zero if it has no outputs, but with the way back that it has instead."""
    zero = Variable(np.zeros((), dtype))
    if isinstance(outputs, Variable):
        return pseudo_connect(outputs, zero)
    loss = zero
    for number, y in enumerate(outputs):
        if number == 1:  # a result that is unused counts as having zeros
            continue
        factor = dtype(0.5 + number - rank)
        loss += F.sum(y * y * y) * factor if y.size else F.sum(y)
    return loss


def close(actual, desired, dtype):
    """Equal but for rounding; None is as good as zeros."""
    if desired is None:
        assert actual is None or not actual.any()
        return
    assert actual.dtype == desired.dtype
    assert_allclose(actual, desired, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def differentiate(loss, xs, order):
    if order == 2:
        gradients = chainer.grad([loss], xs, enable_double_backprop=True)
        loss = sum(F.sum(F.sin(g)) for g in gradients if g is not None)
    loss.backward()


def check(comm, random, name, dtype=np.float32, order=1):
    shapes, call = CALLS[name]
    rows = [SHAPES[shapes](comm.size, rank) for rank in range(comm.size)]
    arrays = [
        [np.asarray(random.standard_normal(shape), dtype) for shape in row]
        for row in rows
    ]
    every = [[Variable(array.copy()) for array in row] for row in arrays]
    expected = ALONE[name](every)
    losses = [loss_of(ys, rank, dtype) for rank, ys in enumerate(expected)]
    differentiate(sum(losses), [x for xs in every for x in xs], order)

    own = [Variable(array.copy()) for array in arrays[comm.rank]]
    outputs = call(comm, own)
    differentiate(loss_of(outputs, comm.rank, dtype), own, order)
    if not isinstance(outputs, Variable):
        for y, other in zip(outputs, expected[comm.rank], strict=True):
            close(y.array, other.array, dtype)
    for x, other in zip(own, every[comm.rank], strict=True):
        close(x.grad, other.grad, dtype)


@pytest.mark.parametrize(
    *pairwise(comm=["naive", "third party"], name=CALLS, dtype=TOLERANCE).args,
    indirect=["comm"],
)
def test_values_and_gradients_equal_one_process(comm, random, name, dtype):
    check(comm, random, name, dtype)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_equal_one_process(comm, random, name):
    check(comm, random, name, np.float64, order=2)


@pytest.mark.parametrize("communicator", NAMES)
def test_every_communicator_and_its_groups_carry_every_function(communicator, random):
    """After `split`, in another order of ranks, too."""
    with (
        create_communicator(communicator) as whole,
        whole.split(whole.rank % 2, -whole.rank) as group,
    ):
        for comm in (whole, group):
            for name in CALLS:
                check(comm, random, name)


@pytest.mark.parametrize("function", [bcast, scatter])
def test_others_need_not_give_anything_to_have_a_way_back(comm, function):
    """The root's gradient counts what ranks did with values that they got from it alone."""
    root = comm.size - 1
    x = Variable(np.ones((comm.size, 2)))
    given = None
    if comm.rank == root:
        given = x
    y = function(comm, given, root)
    F.sum(y * (comm.rank + 1)).backward()
    if comm.rank == root:
        factors = np.arange(comm.size)[:, None] + 1
        if function is scatter:
            expected = factors
        else:
            expected = factors.sum()
        assert_array_equal(x.grad, np.ones_like(x.array) * expected)


@WITH_THIRD_PARTY
def test_gather_gives_none_off_root_unless_backward_starts_there(comm):
    assert (gather(comm, np.ones(2)) is None) == (comm.rank != 0)
    # One rank's gradient is enough, since backward is then collective.
    needs = comm.rank == comm.size - 1
    found = gather(comm, Variable(np.ones(2), requires_grad=needs))
    if comm.rank == 0:
        F.sum(sum(found) * 3).backward()
    else:
        assert found.shape == (0,)
        assert found.dtype == np.float32
        found.backward()


def test_without_gradients_nothing_waits(comm):
    y = bcast(comm, np.ones(2, "f"))
    with no_backprop_mode():
        assert not allreduce(comm, Variable(np.ones(2, "f"))).requires_grad
    w = Variable(np.ones(2, "f"))
    if comm.rank == 0:  # would hang if it went through bcast
        F.sum(w * y).backward()
        assert_array_equal(w.grad, [1, 1])
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))


@WITH_THIRD_PARTY
def test_integers_travel_and_have_no_gradient(comm):
    """Floats to rank 0, integers to the others."""
    x = Variable(np.ones((2, 3), "f"))
    label = Variable(np.array([1, 0], np.int32))
    given = [x, *[label] * (comm.size - 1)]
    first, *_ = ys = alltoall(comm, given)
    dtype = np.float32
    if comm.rank:
        dtype = np.int32
    assert first.dtype == dtype
    if comm.rank == 0:
        F.sum(sum(ys)).backward()
    else:
        pseudo_connect(first, Variable(np.zeros((), "f"))).backward()
    assert_array_equal(x.grad, np.ones((2, 3)))
    assert label.grad is None


WRONG = [
    (bcast, ("text",), TypeError, "got str"),
    (bcast, (ONE, 9), ValueError, "from 0 to .*got 9"),
    (gather, (ONE, None), ValueError, "root must be an integer.*got None"),
    (scatter, (), TypeError, "got NoneType"),
    (reduce_scatter, ([ONE] * 9,), ValueError, "one for each rank, got"),
    (allreduce, (ONE, "max"), ValueError, 'must be "sum" or "mean"'),
    (allgather, (Parameter(name="W"),), ValueError, "x is a parameter that"),
]


@pytest.mark.parametrize(("function", "wrong", "error", "text"), WRONG)
def test_a_wrong_argument_on_one_rank_raises_on_all(comm, function, wrong, error, text):
    right = ONE
    if function in (scatter, reduce_scatter):
        right = [ONE] * comm.size
    arguments = (right,)
    if comm.rank == 0:
        arguments = wrong
    with raises_on_all(comm.rank == 0, error, f"rank 0.*{text}"):
        function(comm, *arguments)
    usable(comm)


def usable(comm):
    """The communicator still works, and nothing is left over on it."""
    found = [y.array.item() for y in allgather(comm, np.array(comm.rank))]
    assert found == list(range(comm.size))


def test_what_is_no_communicator_is_told():
    with pytest.raises(TypeError, match="comm must be a communicator"):
        bcast(None, ONE)


# What rank 0 calls, what the others, and what is told of it.
MISMATCHES = [
    (
        lambda c: bcast(c, ONE),
        lambda c: allgather(c, ONE),
        r"operation: (.*: )?bcast on rank 0; (.*: )?allgather on ranks? 1.*same order",
    ),
    (
        lambda c: bcast(c, ONE),
        lambda c: bcast(c, ONE, 1),
        "root: 0 on rank 0; 1 on ranks? 1",
    ),
    (
        lambda c: allreduce(c, ONE),
        lambda c: allreduce(c, ONE, "mean"),
        "op: sum on rank 0; mean",
    ),
    (
        lambda c: reduce_scatter(c, [ONE] * c.size),
        lambda c: reduce_scatter(c, [*[ONE] * (c.size - 1), np.ones(1, "f")]),
        r"variable \d: float64 \(1,\) on rank 0; float32 \(1,\) on ranks? 1",
    ),
]


@SEVERAL
@pytest.mark.parametrize(("first", "others", "text"), MISMATCHES)
@WITH_THIRD_PARTY
def test_calls_that_differ_raise_on_all(comm, first, others, text):
    call = first
    if comm.rank:
        call = others
    with pytest.raises(RankMismatchError, match=text):
        (call)(comm)
    usable(comm)


@SEVERAL
@WITH_THIRD_PARTY
def test_backward_in_different_orders_raises_on_all(comm):
    """The gradients would have the right shape, and be the wrong ones."""
    losses = [F.sum(allreduce(comm, Variable(np.ones(2)))) for _ in range(2)]
    with pytest.raises(
        RankMismatchError, match=r"on the call.*same order on all ranks.*pseudo_connect"
    ):
        losses[comm.rank == 0].backward()
    usable(comm)


@SEVERAL
def test_a_graph_on_some_ranks_only_gives_values_but_no_gradients(comm):
    """Each way of a script that evaluates, with the mode on one rank alone; backward is told."""
    x = Variable(np.ones(2))
    with using_config("enable_backprop", comm.rank != 0):
        y = allreduce(comm, x)
        gather(comm, x)
    assert_array_equal(y.array, np.full(2, comm.size))
    assert (y.creator is None) == (comm.rank == 0)
    z = allreduce(comm, x)
    text = r"backward of allreduce on rank \d.*ranks \[0\] don't build a graph"
    losses = [F.sum(z * z)]
    if comm.rank != 0:
        losses.insert(0, F.sum(y))
    for loss in losses:
        with pytest.raises(RankMismatchError, match=text):
            loss.backward(enable_double_backprop=comm.rank != 0)
    usable(comm)
