"""Errors in a block of `join`, caught inside or not, and blocks with several optimizers."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer, join
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.trainers import assert_near, same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("double_precision")]


class Model(chainer.Chain):
    def __init__(self, seed):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.linear = L.Linear(3, 2)

    def __call__(self, x):
        y = self.linear(x)
        return chainer.functions.mean(y * y)

    def fail(self, x):
        raise ZeroDivisionError


def batch(*place):
    return np.random.RandomState(place).uniform(-1, 1, (2, 3))


def make(kind, comm, steps=1):
    return exchanging(kind, comm, chainer.optimizers.SGD(0.3), Model(comm.rank), steps)


def updates(optimizer, count):
    rank = optimizer.communicator.rank
    for number in range(count):
        optimizer.update(optimizer.target, batch(rank, number))


def step(model, optimizer, batches):
    """Step in one process along the mean over these batches."""
    model.cleargrads()
    (sum(model(x) for x in batches) / len(batches)).backward()
    optimizer.update()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whose", ["first", "last"])
def test_a_rank_may_skip_a_batch_after_others_have_left(comm, kind, whose):
    """The failed update counts on no rank; ranks in the block catch its error and go on."""
    optimizer = make(kind, comm)
    model, expected = optimizer.target, Model(0)
    single = chainer.optimizers.SGD(0.3).setup(expected)
    counts = [1 + 2 * rank for rank in range(comm.size)]
    failing = comm.size - 1 if whose == "last" else 1
    with join(optimizer):
        for number in range(counts[comm.rank]):
            fails = number == 2 and comm.rank == failing
            try:
                optimizer.update(
                    model.fail if fails else model, batch(comm.rank, number)
                )
            except ZeroDivisionError:
                assert fails
            except PeerError:
                assert number == 2
    for number in range(max(counts)):
        if number != 2:
            ranks = [rank for rank in range(comm.size) if number < counts[rank]]
            step(expected, single, [batch(rank, number) for rank in ranks])
    optimizer.flush()
    assert same_everywhere(comm, model)
    assert optimizer.t == single.t == max(counts) - 1
    if kind != "double buffering":  # whose gradients are of the parameters before
        assert_near(model, expected, 1e-10)
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_a_failed_update_between_two_steps_counts_one_gradient_less(comm):
    optimizer = make("synchronous", comm, steps=4)
    model = optimizer.target
    with join(optimizer):
        for number in range(1 if comm.rank == 0 else 3):
            fails = number == 1 and comm.rank == 1
            try:
                optimizer.update(
                    model.fail if fails else model, batch(comm.rank, number)
                )
            except ZeroDivisionError:
                assert fails
    expected = Model(0)
    used = [batch(0, 0), batch(1, 0), batch(1, 2)]
    used += [batch(rank, number) for rank in range(2, comm.size) for number in range(3)]
    step(expected, chainer.optimizers.SGD(0.3).setup(expected), used)
    assert optimizer.t == 1
    assert same_everywhere(comm, model)
    assert_near(model, expected, 1e-10)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("others", ["update", "have left", "catch and go on"])
@pytest.mark.parametrize(
    ("kind", "steps"), [*((kind, 1) for kind in KINDS), ("synchronous", 3)]
)
def test_an_error_that_leaves_the_block_is_told_to_all(comm, kind, steps, others):
    optimizer = make(kind, comm, steps)
    model = optimizer.target
    number = 0

    def train():
        nonlocal number
        with join(optimizer):
            while number < (3 if others == "have left" else 9 * steps):
                optimizer.update(model, batch(comm.rank, number))
                number += 1
                if comm.rank == comm.size - 1 and number == 2:
                    raise OSError("no such batch")
                if others == "catch and go on" and comm.rank == 0 and number == 3:
                    with pytest.raises(PeerError, match="no such batch"):
                        updates(optimizer, 2 * steps)

    if comm.rank == comm.size - 1:
        with pytest.raises(OSError, match="no such batch"):
            train()
    else:
        words = f"rank {comm.size - 1} left it by OSError: no such batch"
        with pytest.raises(PeerError, match=words):
            train()
    updates(optimizer, 2 * steps)  # nothing is left of the block
    optimizer.flush()
    assert same_everywhere(comm, model)
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_who_catches_all_errors_of_a_block_is_told_at_its_end(comm):
    optimizer = make("synchronous", comm)
    last = comm.size - 1

    def train():
        with join(optimizer):
            for number in range(4):
                if comm.rank == last and number == 2:
                    raise KeyError("boom")
                with contextlib.suppress(PeerError):
                    updates(optimizer, 1)

    with pytest.raises(KeyError if comm.rank == last else PeerError, match="boom"):
        train()
    assert comm.allreduce_obj(1) == comm.size  # nobody is one call ahead
    updates(optimizer, 2)
    assert same_everywhere(comm, optimizer.target)


def test_two_threads_have_a_block_each(comm):
    first = make("synchronous", comm)
    with comm.split(comm.rank, 0) as alone:
        second = make("synchronous", alone)

        def train_alone():
            with join(second):
                updates(second, 2)

        with join(first), ThreadPoolExecutor(1) as pool:
            pool.submit(train_alone).result()
            updates(first, 2 + comm.rank)
    assert same_everywhere(comm, first.target)


@pytest.mark.sizes(2, 3, 4)
def test_an_update_whose_error_leaves_the_block_ends_it_on_all_ranks(comm):
    optimizer = make("synchronous", comm)
    model = optimizer.target
    optimizer.update(model, batch(0))

    def train():
        with join(optimizer):
            for _ in range(1 if comm.rank == 0 else 2 * comm.rank - 2):
                optimizer.update(model.fail if comm.rank == 0 else model, batch(0))

    with pytest.raises(ZeroDivisionError if comm.rank == 0 else PeerError):
        train()
    optimizer.update(model, batch(comm.rank))
    assert same_everywhere(comm, model)


def test_blocks_within_blocks_are_refused(comm):
    first, second = make("synchronous", comm), make("synchronous", comm)
    with (
        pytest.raises(RuntimeError, match="already: leave the inner one out"),
        join(first),
        join(first),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"with join\(a, b\):"),
        join(first),
        join(second),
    ):
        pass
    with pytest.raises(ValueError, match="twice"), join(first, first):
        pass
    group = comm.split(0, comm.rank)
    elsewhere = create_multi_node_optimizer(chainer.optimizers.SGD(), group)
    with pytest.raises(ValueError, match="one communicator"), join(first, elsewhere):
        pass
    with (
        pytest.raises(TypeError, match="not SGD"),
        join(first, chainer.optimizers.SGD()),
    ):
        pass
    with join(first, second):
        pass
    group.finalize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [(1, 1), (1, 3)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (1, 2))]
)
def test_several_optimizers_are_updated_in_any_order_and_ratio(comm, kind, steps, seed):
    if kind != "synchronous" and max(steps) > 1:
        kind = "double buffering"
    optimizers = [make(kind, comm, count) for count in steps]
    expected = [Model(0), Model(0)]
    singles = [chainer.optimizers.SGD(0.3).setup(each) for each in expected]
    draw = np.random.RandomState(seed)
    order = draw.randint(0, 2, 12)
    lengths = draw.randint(0, 13, comm.size)
    with join(*optimizers):
        for number in range(lengths[comm.rank]):
            optimizer = optimizers[order[number]]
            optimizer.update(optimizer.target, batch(comm.rank, number))
    for model, single, which in zip(expected, singles, (0, 1), strict=True):
        numbers = [number for number in range(max(lengths)) if order[number] == which]
        for start in range(0, len(numbers), steps[which]):
            group = numbers[start : start + steps[which]]
            ranks = range(comm.size)
            step(
                model,
                single,
                [batch(r, n) for n in group for r in ranks if n < lengths[r]],
            )
    for optimizer, single, model in zip(optimizers, singles, expected, strict=True):
        optimizer.flush()
        assert same_everywhere(comm, optimizer.target)
        assert optimizer.t == single.t
        if kind != "double buffering":
            assert_near(optimizer.target, model, 1e-10)
        optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_update_different_optimizers_are_told(comm):
    pair = [make("synchronous", comm), make("synchronous", comm)]
    for each in pair:
        each.update(each.target, batch(0))
    own = pair[min(comm.rank, 1)]
    with (
        pytest.raises(
            RankMismatchError,
            match=r"arguments of join\(\): 0 on rank 0; 1 on ranks? 1",
        ),
        join(*pair),
    ):
        own.update(own.target, batch(comm.rank))
    for each in pair:
        each.update(each.target, batch(comm.rank))
        assert same_everywhere(comm, each.target)


@pytest.mark.sizes(2, 3, 4)
def test_an_optimizer_that_is_not_of_the_block_is_told(comm):
    joined, other = make("synchronous", comm), make("synchronous", comm)
    with pytest.raises(RankMismatchError, match="update"), join(joined):
        updates(other, 1 if comm.rank == 0 else 0)
    joined.update(joined.target, batch(comm.rank))
    assert same_everywhere(comm, joined.target)
