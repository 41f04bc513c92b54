"""The collective functions between ranks, against the same graph in one process.

Every rank draws the inputs of all ranks from the same random numbers, computes the graph of all
ranks in one process, whose loss is the sum of theirs, and compares its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_modelparallel import (
    MultiNodeBatchNormalization,
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    pseudo_connect,
    recv,
    reduce_scatter,
    scatter,
    send,
)
from tests.support.pairwise import pairwise
from tests.support.third_party import WITH_STRANGER

pytestmark = pytest.mark.world

TOLERANCE = {np.float16: 2e-2, np.float32: 1e-5, np.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """A function, and what it is in one process.

    Attributes:
        shapes: of a rank's inputs, by size and rank.
        mine: takes the communicator and this rank's inputs, returns its outputs.
        alone: takes all ranks' inputs, returns all ranks' outputs.
    """

    shapes: Callable[[int, int], list[tuple[int, ...]]]
    mine: Callable[[Any, list[Variable]], Any]
    alone: Callable[[list[list[Variable]]], list[list[Variable]]]


def one(size: int, rank: int) -> list[tuple[int, ...]]:
    return [(2, 3)]


def uneven(size: int, rank: int) -> list[tuple[int, ...]]:
    return [((), (0, 2), (3,), (2, 1, 2))[rank]]


def one_for_each(size: int, rank: int) -> list[tuple[int, ...]]:
    return [((2,), (0, 3), (), (1, 2))[i] for i in range(size)]


def uneven_for_each(size: int, rank: int) -> list[tuple[int, ...]]:
    return [(rank + 1, i) for i in range(size)]


def last(comm: Any) -> int:
    return comm.size - 1


CASES = {
    "bcast": Case(one, lambda c, x: [bcast(c, x[0])], lambda xs: [[xs[0][0]] for _ in xs]),
    "bcast from last": Case(
        uneven, lambda c, x: [bcast(c, x[0], last(c))], lambda xs: [[xs[-1][0]] for _ in xs]
    ),
    "gather": Case(
        uneven,
        lambda c, x: gather(c, x[0]),
        lambda xs: [[x for (x,) in xs] if rank == 0 else [] for rank in range(len(xs))],
    ),
    "gather to last": Case(
        uneven,
        lambda c, x: gather(c, x[0], root=last(c)),
        lambda xs: [[x for (x,) in xs] if rank == len(xs) - 1 else [] for rank in range(len(xs))],
    ),
    "scatter": Case(
        uneven_for_each,
        lambda c, x: [scatter(c, x)],
        lambda xs: [[xs[0][rank]] for rank in range(len(xs))],
    ),
    "scatter from last": Case(
        one_for_each,
        lambda c, x: [scatter(c, tuple(x), root=last(c))],
        lambda xs: [[xs[-1][rank]] for rank in range(len(xs))],
    ),
    "alltoall": Case(
        uneven_for_each,
        alltoall,
        lambda xs: [[x[rank] for x in xs] for rank in range(len(xs))],
    ),
    "allgather": Case(
        uneven, lambda c, x: allgather(c, x[0]), lambda xs: [[x for (x,) in xs] for _ in xs]
    ),
    "allreduce": Case(
        one, lambda c, x: [allreduce(c, x[0])], lambda xs: [[sum(x for (x,) in xs)] for _ in xs]
    ),
    "allreduce, mean": Case(
        one,
        lambda c, x: [allreduce(c, x[0], op="mean")],
        lambda xs: [[sum(x for (x,) in xs) * (1 / len(xs))] for _ in xs],
    ),
    "reduce_scatter": Case(
        one_for_each,
        lambda c, x: [reduce_scatter(c, x)],
        lambda xs: [[sum(x[rank] for x in xs)] for rank in range(len(xs))],
    ),
}


@pytest.fixture
def inputs(random: np.random.Generator, comm: Any) -> Callable[[Case, Any], Any]:
    """All ranks' inputs of a case, drawn the same on each rank."""

    def draw(case: Case, dtype: Any) -> list[list[np.ndarray]]:
        return [
            [np.asarray(random.standard_normal(shape), dtype) for shape in shapes]
            for shapes in (case.shapes(comm.size, rank) for rank in range(comm.size))
        ]

    return draw


def variables(arrays: list[list[np.ndarray]]) -> list[list[Variable]]:
    return [[Variable(array.copy()) for array in row] for row in arrays]


def loss_of(outputs: Any, rank: int, dtype: Any) -> Variable:
    """A rank's loss; zero if it has no outputs, but with the way back that it has instead."""
    zero = Variable(np.zeros((), dtype))
    if isinstance(outputs, Variable):
        return pseudo_connect(outputs, zero)
    loss = zero
    for number, y in enumerate(outputs):
        factor = dtype(0.5 + number - rank)
        loss += F.sum(y * y * y) * factor if y.size else F.sum(y)
    return loss


def close(actual: Any, desired: Any, dtype: Any) -> None:
    """Equal but for rounding; None is as good as zeros."""
    if desired is None:
        assert actual is None or not actual.any()
        return
    assert actual.dtype == desired.dtype
    np.testing.assert_allclose(actual, desired, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    *pairwise(comm=["naive", "stranger"], name=CASES, dtype=TOLERANCE).args, indirect=["comm"]
)
def test_values_and_gradients_equal_one_process(comm, inputs, name, dtype):
    check(comm, CASES[name], inputs(CASES[name], dtype), dtype)


def check(comm: Any, case: Case, arrays: list[list[np.ndarray]], dtype: Any) -> None:
    alone = variables(arrays)
    expected = case.alone(alone)
    sum(loss_of(ys, rank, dtype) for rank, ys in enumerate(expected)).backward()

    mine = variables(arrays)[comm.rank]
    outputs = case.mine(comm, mine)
    loss_of(outputs, comm.rank, dtype).backward()
    if not isinstance(outputs, Variable):
        for y, other in zip(outputs, expected[comm.rank], strict=True):
            close(y.array, other.array, dtype)
    for x, other in zip(mine, alone[comm.rank], strict=True):
        close(x.grad, other.grad, dtype)


OTHERS = ("flat", "hierarchical", "non_cuda_aware", "single_node", "two_dimensional")


@pytest.mark.parametrize("communicator", OTHERS)
def test_every_communicator_carries_every_function(communicator, random):
    with create_communicator(communicator) as comm:
        for case in CASES.values():
            shapes = [case.shapes(comm.size, rank) for rank in range(comm.size)]
            arrays = [[np.asarray(random.standard_normal(s), "f") for s in row] for row in shapes]
            check(comm, case, arrays, np.float32)
        x = Variable(random.standard_normal((3, 4)).astype("f"))
        if comm.rank == 0 and comm.size > 1:
            send((x, x * 2), comm, 1).backward()
            np.testing.assert_array_equal(x.grad, np.full((3, 4), 7, "f"))
        elif comm.rank == 1:
            first, second = recv(comm, 0)
            np.testing.assert_array_equal(second.array, x.array * 2)
            F.sum(first + second * 3).backward()
        check_normalization(comm, random.standard_normal((comm.size, 3, 4)).astype("f"))


@pytest.mark.parametrize("communicator", ["naive", *OTHERS])
def test_groups_of_ranks_carry_every_function(communicator, random):
    """After `split`, in another order of ranks; and beside it what goes through all of them."""
    with (
        create_communicator(communicator) as whole,
        whole.split(whole.rank % 2, -whole.rank) as comm,
    ):
        for case in CASES.values():
            shapes = [case.shapes(comm.size, rank) for rank in range(comm.size)]
            arrays = [[np.asarray(random.standard_normal(s), "f") for s in row] for row in shapes]
            check(comm, case, arrays, np.float32)
        check_normalization(comm, random.standard_normal((comm.size, 3, 4)).astype("f"))
        # Rank 0 of the whole is the last of its group: to and fro, through both.
        x = Variable(random.standard_normal((3, 4)))
        y = F.sin(x)
        if comm.size > 1:
            last, first = comm.size - 1, 0
            if comm.rank == last:
                y = recv(comm, first, delegate_variable=send(y, comm, first))
            elif comm.rank == first:
                y = pseudo_connect(send(F.exp(recv(comm, last)), comm, last), y)
        F.sum(allreduce(whole, y)).backward()
        inner = F.cos(x).array * whole.size
        factor = np.exp(np.sin(x.array)) if 0 < comm.rank == comm.size - 1 else 1
        np.testing.assert_allclose(x.grad, inner * factor, rtol=1e-12)


def check_normalization(comm: Any, batches: np.ndarray) -> None:
    """The ranks' parts of a batch are normalized together, forward and backward."""
    alone, mine = L.BatchNormalization(4), MultiNodeBatchNormalization(4, comm)
    whole, part = Variable(np.concatenate(batches)), Variable(batches[comm.rank])
    y, y_alone = mine(part), alone(whole)
    F.sum(y**3).backward()
    F.sum(y_alone**3).backward()
    rows = slice(3 * comm.rank, 3 * comm.rank + 3)
    np.testing.assert_allclose(y.array, y_alone.array[rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(part.grad, whole.grad[rows], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mine.avg_var, alone.avg_var, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_equal_one_process(comm, inputs, name):
    case, dtype = CASES[name], np.float64
    arrays = inputs(case, dtype)

    def second(loss: Variable, xs: list[Variable]) -> None:
        gradients = chainer.grad([loss], xs, enable_double_backprop=True)
        sum(F.sum(F.sin(g)) for g in gradients if g is not None).backward()

    alone = variables(arrays)
    losses = [loss_of(ys, rank, dtype) for rank, ys in enumerate(case.alone(alone))]
    second(sum(losses), [x for xs in alone for x in xs])
    mine = variables(arrays)[comm.rank]
    second(loss_of(case.mine(comm, mine), comm.rank, dtype), mine)
    for x, other in zip(mine, alone[comm.rank], strict=True):
        close(x.grad, other.grad, dtype)


@WITH_STRANGER
def test_what_moves_arrays_keeps_their_bits(comm):
    """NaNs, infinities and negative zeros included, in any memory order."""
    x = np.array([[np.nan, -0.0, np.inf], [1e-8, 65504, -1]], np.float16)
    for array in (x, np.asfortranarray(x), x[:, ::2], x.T, np.broadcast_to(x[0], (4, 3))):
        for y in (
            *allgather(comm, array),
            bcast(comm, array),
            *alltoall(comm, [array] * comm.size),
        ):
            assert y.dtype == array.dtype
            np.testing.assert_array_equal(y.array.view(np.uint16), array.copy().view(np.uint16))


def test_float16_is_summed_in_float32(naive):
    """65504 + 65504 - 65504 doesn't overflow on the way, nor do ones get lost."""
    values = [2048, 1, 1, 1][: naive.size]
    x = np.array(values[naive.rank], np.float16)
    expected = np.float16(np.float32(sum(values)))
    assert allreduce(naive, x).array == expected
    assert reduce_scatter(naive, [x] * naive.size).array == expected


def test_others_need_not_give_anything_to_have_a_way_back(comm):
    """The root's gradient counts what ranks did with values that they got from it alone."""
    root = comm.size - 1
    x = Variable(np.ones(3)) if comm.rank == root else None
    y = bcast(comm, x, root)
    assert y.requires_grad
    F.sum(y * (comm.rank + 1)).backward()
    xs = [Variable(np.ones(2)) for _ in range(comm.size)] if comm.rank == root else None
    F.sum(scatter(comm, xs, root) * (comm.rank + 1)).backward()
    if x is not None and xs is not None:
        np.testing.assert_array_equal(x.grad, np.full(3, sum(range(comm.size + 1))))
        for rank, each in enumerate(xs):
            np.testing.assert_array_equal(each.grad, np.full(2, rank + 1))


@WITH_STRANGER
def test_gather_gives_none_off_root_unless_backward_starts_there(comm):
    found = gather(comm, np.ones(2))
    assert (found is None) == (comm.rank != 0)
    with chainer.no_backprop_mode():
        found = gather(comm, Variable(np.ones(2)))
    assert (found is None) == (comm.rank != 0)
    # One rank's gradient is enough, since backward is then collective.
    found = gather(comm, Variable(np.ones(2)) if comm.rank == last(comm) else np.ones(2))
    if comm.rank == 0:
        assert isinstance(found, tuple)
        F.sum(sum(found) * 3).backward()
    else:
        assert (found.shape, found.dtype) == ((0,), np.float32)
        found.backward()


def test_without_gradients_nothing_waits(comm):
    y = bcast(comm, np.ones(2, "f"))
    assert not y.requires_grad
    with chainer.no_backprop_mode():
        assert not allreduce(comm, Variable(np.ones(2, "f"))).requires_grad
    w = Variable(np.ones(2, "f"))
    if comm.rank == 0:  # would hang if it went through bcast
        F.sum(w * y).backward()
        np.testing.assert_array_equal(w.grad, [1, 1])
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))


def test_an_unused_result_counts_as_having_zeros(comm):
    """Ranks use different ones; those that nobody uses give gradients of zeros."""
    xs = [Variable(np.full(2, 1.0 + i)) for i in range(comm.size)]
    ys = alltoall(comm, xs)
    F.sum(ys[0] * (comm.rank + 1)).backward()
    for i, x in enumerate(xs):
        np.testing.assert_array_equal(x.grad, np.full(2, i + 1 if comm.rank == 0 else 0))


def test_a_rank_that_has_no_use_for_the_result_connects_it(comm):
    x = Variable(np.ones(2))
    y = allreduce(comm, x)
    w = Variable(np.array(5.0))
    loss = F.sum(y * 2) if comm.rank == 0 else pseudo_connect(y, w * 3)
    loss.backward()
    np.testing.assert_array_equal(x.grad, [2, 2])
    assert comm.rank == 0 or w.grad == 3


@WITH_STRANGER
def test_integers_travel_and_have_no_gradient(comm):
    labels = np.arange(3, dtype=np.int32) + comm.rank
    for rank, y in enumerate(allgather(comm, Variable(labels))):
        np.testing.assert_array_equal(y.array, np.arange(3) + rank)
        assert y.dtype == np.int32
        assert not y.requires_grad
    total = allreduce(comm, labels)
    assert (total.dtype, total.array[0]) == (np.int32, sum(range(comm.size)))
    # Mixed: floats to rank 0, integers to the others.
    x = Variable(np.ones((2, 3), "f"))
    xs = [x, *(Variable(np.array([1, 0], np.int32)) for _ in range(comm.size - 1))]
    ys = alltoall(comm, xs)
    weight = Variable(np.ones((), "f"))
    loss = F.sum(sum(ys)) if comm.rank == 0 else pseudo_connect(ys[0], weight * 1)
    loss.backward()
    np.testing.assert_array_equal(x.grad, np.ones((2, 3)))
    assert all(each.grad is None for each in xs[1:])


def test_parameters_that_are_not_initialised_are_an_error(comm):
    x = chainer.Parameter(name="W") if comm.rank == 0 else Variable(np.ones(2))
    with pytest.raises((ValueError, PeerError), match="x is a parameter that is not initialised"):
        allgather(comm, x)


WRONG = {
    "x of bcast": (lambda c: bcast(c, "text"), lambda c: bcast(c), TypeError, "got str"),
    "root": (
        lambda c: bcast(c, np.ones(1), 9),
        lambda c: bcast(c),
        ValueError,
        "from 0 to .*got 9",
    ),
    "root of gather": (
        lambda c: gather(c, np.ones(1), None),
        lambda c: gather(c, np.ones(1)),
        ValueError,
        "root must be an integer.*got None",
    ),
    "None": (
        lambda c: allreduce(c, None),
        lambda c: allreduce(c, np.ones(1)),
        TypeError,
        "NoneType",
    ),
    "scatter of nothing": (lambda c: scatter(c), lambda c: scatter(c), TypeError, "got NoneType"),
    "an array for a list": (
        lambda c: alltoall(c, np.ones(c.size)),
        lambda c: alltoall(c, [np.ones(1)] * c.size),
        TypeError,
        "tuple or list of . variables.*got ndarray",
    ),
    "too many": (
        lambda c: reduce_scatter(c, [np.ones(1)] * (c.size + 1)),
        lambda c: reduce_scatter(c, [np.ones(1)] * c.size),
        ValueError,
        "one for each rank, got",
    ),
    "op": (
        lambda c: allreduce(c, np.ones(1), op="max"),
        lambda c: allreduce(c, np.ones(1)),
        ValueError,
        'must be "sum" or "mean"',
    ),
    "mean of integers": (
        lambda c: allreduce(c, np.ones(1, int), op="mean"),
        lambda c: allreduce(c, np.ones(1), op="mean"),
        TypeError,
        "taken of floats, got int64",
    ),
    "objects": (
        lambda c: allgather(c, np.array([None])),
        lambda c: allgather(c, np.ones(1)),
        TypeError,
        "Python objects",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_on_one_rank_raises_on_all(comm, name):
    wrong, right, error, text = WRONG[name]
    with pytest.raises(error if comm.rank == 0 else PeerError, match=text) as raised:
        (wrong if comm.rank == 0 else right)(comm)
    assert "rank 0" in str(raised.value)
    usable(comm)


def usable(comm: Any) -> None:
    """The communicator still works, and nothing is left over on it."""
    assert [y.array.item() for y in allgather(comm, np.array(comm.rank))] == list(range(comm.size))


@pytest.mark.parametrize("comm", [None, "naive", 1])
def test_what_is_no_communicator_is_told(comm):
    with pytest.raises(TypeError, match="comm must be a communicator"):
        bcast(comm, np.ones(1))


MISMATCHES = {
    "functions": (
        lambda c: bcast(c, np.ones(1)),
        lambda c: allgather(c, np.ones(1)),
        r"operation: (.*: )?bcast on rank 0; (.*: )?allgather on ranks? 1.*same order",
    ),
    "roots": (
        lambda c: bcast(c, np.ones(1)),
        lambda c: bcast(c, np.ones(1), 1),
        "root: 0 on rank 0; 1 on rank 1",
    ),
    "ops": (
        lambda c: allreduce(c, np.ones(1)),
        lambda c: allreduce(c, np.ones(1), "mean"),
        "op: sum on rank 0; mean on rank 1",
    ),
    "shapes": (
        lambda c: allreduce(c, np.ones(1)),
        lambda c: allreduce(c, np.ones(2)),
        r"variable 0: float64 \(1,\) on rank 0; float64 \(2,\) on rank 1",
    ),
    "dtypes": (
        lambda c: reduce_scatter(c, [np.ones(1)] * c.size),
        lambda c: reduce_scatter(c, [np.ones(1)] * (c.size - 1) + [np.ones(1, "f")]),
        r"variable \d: float64 \(1,\) on rank 0; float32 \(1,\) on rank 1",
    ),
}


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", MISMATCHES)
@WITH_STRANGER
def test_calls_that_differ_raise_on_all(comm, name):
    first, second, text = MISMATCHES[name]
    with pytest.raises(RankMismatchError, match=text):
        (first if comm.rank == 0 else second)(comm)
    usable(comm)


@pytest.mark.sizes(2, 3, 4)
@WITH_STRANGER
def test_backward_in_different_orders_raises_on_all(comm):
    """The gradients would have the right shape, and be the wrong ones."""
    x = Variable(np.ones(2))
    losses = [F.sum(allreduce(comm, x)), F.sum(allreduce(comm, x))]
    with pytest.raises(RankMismatchError, match=r"call: .*in the same order on all ranks"):
        losses[comm.rank == 0].backward()
    usable(comm)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("connect", [False, True])
def test_graphs_may_be_of_different_depth_on_each_rank(comm, connect):
    """Chainer visits the deeper function first, but ours in the reverse of their order."""

    def deeper(x: Variable, wanted: bool) -> Variable:
        return F.identity(F.identity(x)) if wanted else x

    x, y = Variable(np.ones(2)), Variable(np.ones(2))
    a = allreduce(comm, deeper(x, comm.rank == 0))
    b = allreduce(comm, pseudo_connect(a, y) if connect else deeper(y, comm.rank == 1))
    (F.sum(a) + F.sum(b) * 2).backward()
    np.testing.assert_array_equal(x.grad, np.full(2, comm.size))
    np.testing.assert_array_equal(y.grad, np.full(2, comm.size * 2))


@pytest.mark.sizes(2, 3, 4)
def test_backward_in_different_orders_is_told_to_all_ranks(naive):
    x, y = Variable(np.ones(2)), Variable(np.ones(2))
    losses = [F.sum(allreduce(naive, x)), F.sum(allreduce(naive, y))]
    with pytest.raises(RankMismatchError, match="pseudo_connect"):
        losses[naive.rank % 2].backward()
    usable(naive)


@pytest.mark.sizes(2, 3, 4)
def test_backward_that_skips_a_rank_raises_at_its_next_call(naive):
    """Rank 0 never runs backward through the function, but goes on to the optimizer."""
    x = Variable(np.ones(2))
    y = allreduce(naive, x)
    after = F.sum(y).backward if naive.rank else lambda: naive.multi_node_mean_grad(chainer.Chain())
    text = (
        "operation: allreduce_grad on rank 0; "
        "chainermn.functions: backward of allreduce on ranks? 1"
    )
    with pytest.raises(RankMismatchError, match=text):
        after()
    usable(naive)


@pytest.mark.sizes(2, 3, 4)
def test_a_graph_on_some_ranks_only_is_told_at_once(comm):
    with (
        pytest.raises(RankMismatchError, match=r"ranks \[0\] don't build a graph"),
        chainer.using_config("enable_backprop", comm.rank != 0),
    ):
        allreduce(comm, Variable(np.ones(2)))
    y = allreduce(comm, Variable(np.ones(2)))
    with pytest.raises(RankMismatchError, match=r"backward of allreduce.*ranks \[0\]"):
        F.sum(y * y).backward(enable_double_backprop=comm.rank != 0)
    usable(comm)


def test_a_chain_of_functions_equals_one_process(comm, random):
    """scatter → alltoall → reduce_scatter → allreduce → gather, each between other functions."""
    size = comm.size
    data = random.standard_normal((size, size, 3))
    weights = random.standard_normal((size, 3))

    alone, w = [Variable(row) for row in data], [Variable(row) for row in weights]
    parts = [F.tanh(alone[r]) * F.broadcast_to(w[r], (size, 3)) for r in range(size)]
    crossed = [[F.sin(parts[i][r]) for i in range(size)] for r in range(size)]
    sums = [sum(crossed[i][r] * (i + 1) for i in range(size)) for r in range(size)]
    total = sum(s * s for s in sums)
    loss = sum(F.sum(F.exp(total * 0.1) * w[r]) for r in range(size))
    loss.backward()

    root = size - 1
    xs = [Variable(row) for row in data] if comm.rank == root else None
    mine = Variable(weights[comm.rank])
    part = F.tanh(scatter(comm, xs, root)) * F.broadcast_to(mine, (size, 3))
    row = [F.sin(y) for y in alltoall(comm, [part[r] for r in range(size)])]
    summed = reduce_scatter(comm, [y * (comm.rank + 1) for y in row])
    found = gather(comm, F.sum(F.exp(allreduce(comm, summed * summed) * 0.1) * mine))
    if comm.rank == 0:
        result = sum(found)
        np.testing.assert_allclose(result.array, loss.array, rtol=1e-12)
        result.backward()
    else:
        found.backward()
    close(mine.grad, w[comm.rank].grad, np.float64)
    for x, other in zip(xs or (), alone, strict=False):
        close(x.grad, other.grad, np.float64)


def test_in_a_trainer_data_parallel_by_hand_equals_the_whole_batch(comm, random, tmp_path):
    """Parameters go through `bcast`, losses through `allreduce`: rank 0's updates are serial's."""
    size = comm.size
    data = random.standard_normal((6 * size, 4)).astype("d")
    targets = random.standard_normal((6 * size, 1)).astype("d")
    start = random.standard_normal((1, 4)).astype("d")

    def train(model: chainer.Chain, x: np.ndarray, t: np.ndarray) -> np.ndarray:
        pairs = chainer.datasets.TupleDataset(x, t)
        iterator = chainer.iterators.SerialIterator(pairs, len(x), shuffle=False)
        optimizer = chainer.optimizers.MomentumSGD(lr=0.1).setup(model)
        updater = chainer.training.StandardUpdater(iterator, optimizer)
        chainer.training.Trainer(updater, (5, "iteration"), out=str(tmp_path)).run()
        return model.W.array

    class Whole(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.W = chainer.Parameter(start.copy())

        def forward(self, x: Any, t: Any) -> Variable:
            return F.mean((F.linear(x, self.W) - t) ** 2)

    class Part(Whole):
        def forward(self, x: Any, t: Any) -> Variable:
            y = F.linear(x, bcast(comm, self.W))
            return F.sum((y - t) ** 2) * (1 / (6 * size))

    serial = train(Whole(), data, targets)
    rows = slice(6 * comm.rank, 6 * comm.rank + 6)
    with chainer.using_config("dtype", np.float64):
        parallel = train(Part(), data[rows], targets[rows])
    if comm.rank == 0:
        np.testing.assert_allclose(parallel, serial, rtol=1e-12)
        assert not np.allclose(serial, start)
    else:
        np.testing.assert_array_equal(parallel, start)


@pytest.fixture
def naive() -> Iterator[Any]:
    """Our own communicator, for what others don't promise."""
    with create_communicator("naive") as communicator:
        yield communicator
