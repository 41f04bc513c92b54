"""A rank with fewer batches takes part without examples; errors in a block of `join`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from chainer.optimizers import SGD
from numpy.random import RandomState

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import join
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import HIERARCHICAL, KINDS, exchanging
from tests.support.training.small_models import Model, bad_batch, update
from tests.support.training.trainers import assert_near, same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


def batch(*place):
    return RandomState(place).uniform(-1, 1, (2, 3))


def make(kind, comm, steps=1):
    return exchanging(kind, comm, SGD(0.3), Model(comm.rank), steps)


def assert_goes_on(comm, optimizer, updates=1):
    update(optimizer, updates)
    optimizer.flush()
    assert same_everywhere(comm, optimizer.target)
    optimizer.finalize()


# What the last rank raises, that leaves the block.
LEAVING = {"a batch": OSError("no such batch"), "its update": FloatingPointError()}


@pairwise(kind=KINDS, steps=[1, 3], leaving=LEAVING, updates=[0, 5], caught=[0, 1, 99])
def test_an_error_that_leaves_the_block_is_told_to_all(
    comm, kind, steps, leaving, updates, caught
):
    """The others have left, or make updates and catch some errors of these."""
    optimizer = make(kind, comm, steps)
    last = comm.size - 1

    def train():
        update(optimizer, 2 * steps)
        if comm.rank == last:
            if leaving == "its update":
                optimizer.update(bad_batch)
            raise LEAVING[leaving]
        for number in range(updates * steps):
            with suppress(*[PeerError] * (number < caught)):
                update(optimizer)

    cause = type(LEAVING[leaving])
    with raises_on_all(comm.rank == last, cause) as raised, join(optimizer):
        train()
    if comm.rank != last and (leaving == "a batch" or caught or not updates):
        assert f"rank {last} left it by {cause.__name__}" in str(raised.value)
    assert comm.allreduce_obj(1) == comm.size  # nobody is one call ahead
    assert_goes_on(comm, optimizer, 2 * steps)


def test_two_threads_have_a_block_each(comm):
    first = make("synchronous", comm)
    with comm.split(comm.rank, 0) as alone:
        second = make("synchronous", alone)

        def train_alone():
            with join(second):
                update(second, 2)

        with join(first), ThreadPoolExecutor(1) as pool:
            pool.submit(train_alone).result()
            update(first, 2 + comm.rank)
    assert_goes_on(comm, first)


@pytest.mark.parametrize(
    ("outer", "inner", "error", "words"),
    [
        ("", "aa", ValueError, "twice"),
        ("", "ac", ValueError, "one communicator"),
        ("", "ad", TypeError, "not SGD"),
        ("b", "b", RuntimeError, "already: leave the inner one out"),
        ("b", "a", RuntimeError, r"with join\(a, b\):"),
    ],
)
def test_a_block_that_cannot_be_is_refused(comm, outer, inner, error, words):
    with comm.split(0, comm.rank) as group:
        a = make("synchronous", comm)
        b = make("synchronous", comm)
        c = make("synchronous", group)
        named = {"a": a, "b": b, "c": c, "d": a.actual_optimizer}
        if outer:
            outer_block = join(named[outer])
        else:
            outer_block = nullcontext()
        with (
            pytest.raises(error, match=words),
            outer_block,
            join(*[named[name] for name in inner]),
        ):
            pass
    with join(a, b):
        pass


@pytest.mark.usefixtures("double_precision")
@pairwise(kind=KINDS, steps=[(1, 1), (1, 3)], seed=[0, 1, 2])
def test_several_optimizers_are_updated_in_any_order_and_ratio(comm, kind, steps, seed):
    optimizers = [make(kind, comm, count) for count in steps]
    draw = RandomState(seed)
    order = draw.randint(0, 2, 12)
    lengths = draw.randint(0, 13, comm.size)
    with join(*optimizers):
        for number in range(lengths[comm.rank]):
            optimizer = optimizers[order[number]]
            optimizer.update(optimizer.target, batch(comm.rank, number))
    for which, optimizer in enumerate(optimizers):
        model = Model(0)
        single = SGD(0.3).setup(model)
        numbers = np.flatnonzero(order[: max(lengths)] == which)
        for start in range(0, len(numbers), steps[which]):
            losses = [
                model(batch(rank, number))
                for number in numbers[start : start + steps[which]]
                for rank in range(comm.size)
                if number < lengths[rank]
            ]
            mean = sum(losses) / len(losses)
            single.update(lambda mean=mean: mean)
        optimizer.flush()
        assert same_everywhere(comm, optimizer.target)
        assert optimizer.t == single.t
        if kind != "double buffering":  # whose gradients are of the parameters before
            assert_near(optimizer.target, model, KINDS[kind].tolerance)
        optimizer.finalize()


def update_first(first, second):
    update(first)


def update_second(first, second):
    update(second)


def flush_first(first, second):
    first.flush()


def leave(first, second):
    pass


# How many optimizers are in the block; what rank 0 does there, and the others.
DIFFERENT = [
    (1, flush_first, leave, "update"),
    (1, update_second, leave, "update"),
    (2, update_second, update_first, r"of join\(\): 1 on rank 0; 0 on ranks? 1"),
]


@HIERARCHICAL
def test_a_loss_that_communicates_is_told_of(comm):
    """A rank that has left computes none. A third party's `allreduce` has no handshake."""
    optimizer = make("synchronous", comm)

    def loss():
        comm.allreduce(np.ones(1))
        return optimizer.target(batch(0).astype("f"))

    def train():
        with join(optimizer):
            for _ in range(2 - min(comm.rank, 1)):
                optimizer.update(loss)

    with pytest.raises(RankMismatchError, match=r"allreduce.*update"):
        train()
    assert_goes_on(comm, optimizer)


@pytest.mark.parametrize(("count", "do", "others_do", "words"), DIFFERENT)
def test_something_else_within_is_told(comm, count, do, others_do, words):
    pair = [make("synchronous", comm), make("synchronous", comm)]
    for each in pair:
        update(each)
    own = do
    if comm.rank:
        own = others_do
    with pytest.raises(RankMismatchError, match=words), join(*pair[:count]):
        own(*pair)
    for each in pair:
        assert_goes_on(comm, each)
