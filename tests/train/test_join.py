"""A rank with fewer batches takes part without examples; errors in a block of `join`."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import chainer
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer, join
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.linear import Model, bad_batch, update
from tests.support.training.trainers import assert_near, same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


def batch(*place):
    return np.random.RandomState(place).uniform(-1, 1, (2, 3))


def make(kind, comm, steps=1):
    return exchanging(kind, comm, chainer.optimizers.SGD(0.3), Model(comm.rank), steps)


def assert_goes_on(comm, optimizer, updates=1):
    update(optimizer, updates)
    optimizer.flush()
    assert same_everywhere(comm, optimizer.target)
    optimizer.finalize()


# What the last rank does that leaves the block, and the others meanwhile.
LEAVING = {"a batch": OSError("no such batch"), "its update": FloatingPointError()}
OTHERS = ["update", "have left", "catch one and update", "catch all"]


@pairwise(kind=KINDS, steps=[1, 3], leaving=LEAVING, others=OTHERS)
def test_an_error_that_leaves_the_block_is_told_to_all(
    comm, kind, steps, leaving, others
):
    optimizer = make(kind, comm, steps)
    is_last = comm.rank == comm.size - 1

    def train():
        with join(optimizer):
            update(optimizer, 2 * steps)
            if is_last and leaving == "its update":
                optimizer.update(bad_batch)
            if is_last:
                raise LEAVING[leaving]
            if others == "have left":
                return
            if others == "catch one and update":
                with contextlib.suppress(PeerError):
                    update(optimizer, 2 * steps)
            for _ in range(3 * steps):
                with contextlib.suppress(*[PeerError] * (others == "catch all")):
                    update(optimizer)

    error = type(LEAVING[leaving])
    with pytest.raises(error if is_last else PeerError) as raised:
        train()
    if leaving == "a batch" or others == "catch all":
        assert is_last or f"rank {comm.size - 1} left it by {error.__name__}" in str(
            raised.value
        )
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


REFUSED = {
    "twice at once": (lambda a, b, elsewhere: join(a, a), ValueError, "twice"),
    "elsewhere": (
        lambda a, b, elsewhere: join(a, elsewhere),
        ValueError,
        "one communicator",
    ),
    "Chainer's": (
        lambda a, b, elsewhere: join(a, b.actual_optimizer),
        TypeError,
        "not SGD",
    ),
    "within its own": (
        lambda a, b, elsewhere: join(b),
        RuntimeError,
        "already: leave the inner one out",
    ),
    "within another's": (
        lambda a, b, elsewhere: join(a),
        RuntimeError,
        r"with join\(a, b\):",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_block_that_cannot_be_is_refused(comm, what):
    first = make("synchronous", comm)
    second = make("synchronous", comm)
    with comm.split(0, comm.rank) as group:
        elsewhere = create_multi_node_optimizer(chainer.optimizers.SGD(), group)
        make_block, error, words = REFUSED[what]
        outer = join(second) if "within" in what else contextlib.nullcontext()
        with (
            pytest.raises(error, match=words),
            outer,
            make_block(first, second, elsewhere),
        ):
            pass
    with join(first, second):
        pass


@pytest.mark.usefixtures("double_precision")
@pairwise(kind=KINDS, steps=[(1, 1), (1, 3)], seed=[0, 1, 2])
def test_several_optimizers_are_updated_in_any_order_and_ratio(comm, kind, steps, seed):
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
    for which, (model, single) in enumerate(zip(expected, singles, strict=True)):
        numbers = [number for number in range(max(lengths)) if order[number] == which]
        for start in range(0, len(numbers), steps[which]):
            losses = [
                model(batch(rank, number))
                for number in numbers[start : start + steps[which]]
                for rank in range(comm.size)
                if number < lengths[rank]
            ]
            model.cleargrads()
            (sum(losses) / len(losses)).backward()
            single.update()
    for optimizer, single in zip(optimizers, singles, strict=True):
        optimizer.flush()
        assert same_everywhere(comm, optimizer.target)
        assert optimizer.t == single.t
        if kind != "double buffering":  # whose gradients are of the parameters before
            assert_near(optimizer.target, single.target, 1e-10)
        optimizer.finalize()


# What a rank that has no more examples, and others do, that isn't an update of all.
DIFFERENT = {
    "a flush": (lambda pair: pair[0].flush(), "update"),
    "no optimizer of the block": (lambda pair: update(pair[1]), "update"),
    "another one of the block": (
        lambda pair: update(pair[1]),
        r"arguments of join\(\): 1 on rank 0; 0 on ranks? 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_something_else_within_is_told(comm, what):
    pair = [make("synchronous", comm), make("synchronous", comm)]
    for each in pair:
        update(each)
    do, words = DIFFERENT[what]
    has_both = what == "another one of the block"

    def train():
        with join(*pair) if has_both else join(pair[0]):
            if comm.rank == 0:
                do(pair)
            elif has_both:
                update(pair[0])

    with pytest.raises(RankMismatchError, match=words):
        train()
    for each in pair:
        assert_goes_on(comm, each)
