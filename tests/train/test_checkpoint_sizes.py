"""A checkpoint goes on with any number of ranks: what is shared, summed up, or begun anew."""

from __future__ import annotations

import zlib

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Link, Sequential
from chainer.iterators import SerialIterator
from chainer.optimizers import SGD
from chainer.serializers import load_npz
from chainer.training import StandardUpdater
from numpy.random import RandomState
from numpy.testing import assert_allclose, assert_array_equal

from chainermn_comm import PeerError
from chainermn_modelparallel import MultiNodeChainList
from chainermn_train import (
    DistributedOrderSampler,
    create_multi_node_iterator,
    create_multi_node_optimizer,
    create_synchronized_iterator,
)
from tests.support.training.checkpoints import (
    Loop,
    bits,
    files,
    link,
    make_checkpointer,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]
LAUNCHERS = ("PMI", "OMPI", "PRTE", "HYDRA")
several = pytest.mark.sizes(2, 3, 4)


@pytest.fixture
def alone(naive):
    """This rank as a job of its own."""
    comm = naive.split(naive.rank, 0)
    yield comm
    comm.finalize()
    naive.allgather_obj(None)


@several
@pytest.mark.parametrize("background", [False, True])
def test_what_is_the_same_is_saved_once(naive, folder, background):
    shared = {"zeros": np.zeros(40_000), "ones": np.ones(40_000)}
    own = {
        # An order has the same numbers on all ranks, and is a rank's own.
        "order": RandomState(naive.rank).permutation(512),
        "nearly": np.append(np.zeros(39_999), naive.rank),
        "longer": np.zeros(30_000 + 10_000 * naive.rank),
    }
    target = Link()
    for name, array in {**shared, **own}.items():
        target.add_persistent(name, array.copy())
    checkpointer = make_checkpointer(naive, folder, background=background)
    for value in -1, naive.rank:  # so it is alike at first, and not at the next save
        target.nearly[-1] = value
        checkpointer.save(target)
    checkpointer.flush()
    for name in own | shared:
        getattr(target, name)[:] = -1
    assert make_checkpointer(naive, folder).maybe_load(target) == 2
    for name, array in {**shared, **own}.items():
        assert_array_equal(getattr(target, name), array)
    sizes = [path.stat().st_size for path in folder.glob("run.*.2")]
    owned = naive.allgather_obj(sum(array.nbytes for array in own.values()))
    once = 640_000 + sum(owned)
    more = 90_000  # a rank's random generators, as text
    assert once < sum(sizes) < once + more * naive.size
    assert max(sizes) < max(owned) + 320_000 + more  # no rank has both arrays


@pytest.mark.sizes(2)
def test_the_first_save_after_a_load_compares_each_array_once(
    naive, folder, monkeypatch
):
    target = link(*range(100), naive.rank)
    make_checkpointer(naive, folder).save(target)
    resumed = make_checkpointer(naive, folder)
    resumed.maybe_load(target)
    sizes = []
    checksum = zlib.crc32

    def record(data, *start):
        sizes.append(len(data))
        return checksum(data, *start)

    monkeypatch.setattr(zlib, "crc32", record)
    resumed.save(target)
    assert sizes.count(target.values.nbytes) == 1


@pytest.mark.ci
@pytest.mark.sizes(2)
def test_chainer_alone_loads_a_model_from_all_ranks_files(naive, folder):
    model = Sequential(L.Linear(300, 200), L.Linear(200, 3))
    naive.bcast_data(model)
    make_checkpointer(naive, folder).save(model, 7)
    naive.allgather_obj(None)
    alone = model.copy("init")
    for rank in range(naive.size):
        load_npz(folder / f"run.{rank}.7", alone, strict=False)
    assert bits(alone) == bits(model)


@several
def test_gradients_that_were_added_up_begin_anew(naive, alone, folder, capfd):
    def make(comm):
        model = Sequential(L.Linear(2, 1, initialW=1, initial_bias=0))
        inner = SGD(1)
        return create_multi_node_optimizer(inner, comm, accumulate_steps=3).setup(model)

    def update(optimizer, *values):
        for value in values:
            x = np.full((1, 2), value, "f4")

            def loss(x):
                return F.sum(optimizer.target(x))

            optimizer.update(loss, x)

    optimizer = make(naive)
    update(optimizer, 10 * naive.rank, 10)
    make_checkpointer(naive, folder).save(optimizer)
    naive.allgather_obj(None)
    if naive.rank == 0:
        resumed = make(alone)
        assert make_checkpointer(alone, folder).maybe_load(resumed) == 1
        assert "gradients that were added up" in capfd.readouterr().err
        update(resumed, 1, 2, 3)
        assert_allclose(resumed.target[0].W.array, 1 - 2, rtol=1e-6)


def each_its_own(comm):
    return SerialIterator(range(24 // comm.size), 1)


def dealt(comm):
    return SerialIterator(range(24), 1, order_sampler=DistributedOrderSampler(comm, 4))


def synchronized(comm):
    return create_synchronized_iterator(SerialIterator(range(24), 1), comm)


def of_rank_0(comm):
    return create_multi_node_iterator(SerialIterator(range(24), 1), comm)


def updater_over(comm, iterate):
    optimizer = SGD().setup(L.Linear(1, 1))
    comm.bcast_data(optimizer.target)
    iterator = iterate(comm)
    return StandardUpdater(iterator, optimizer), iterator


def take(iterator, count):
    return [int(next(iterator)[0]) for _ in range(count)]


@several
@pytest.mark.parametrize("iterate", [synchronized, of_rank_0, dealt, each_its_own])
def test_an_order_that_ranks_share_goes_on(naive, alone, folder, capfd, iterate):
    """Dealt, behind the last example that a rank has seen. Other orders begin anew."""
    updater, iterator = updater_over(naive, iterate)
    steps = 2 + naive.rank * (iterate is dealt)
    seen = take(iterator, steps)
    make_checkpointer(naive, folder).save(updater)
    everyones = {each for row in naive.allgather_obj(seen) for each in row}
    if iterate in (dealt, each_its_own):
        rest = []
    else:
        rest = take(iterator, 22)
    capfd.readouterr()
    updater, iterator = updater_over(alone, iterate)
    assert make_checkpointer(alone, folder).maybe_load(updater) == 0
    anew = "random numbers"
    if iterate is each_its_own:
        anew += ", the order of examples of iterator 'main'"
        assert updater.epoch_detail == pytest.approx(2 * naive.size / 24)
    elif iterate is dealt:
        rest = take(iterator, 24 - naive.size * (naive.size + 1))
        assert not everyones & set(rest)
        assert iterator.epoch == 1
    else:
        assert take(iterator, 22) == rest
    words = f"saved by {naive.size} ranks, goes on with 1; begun anew: {anew}\n"
    assert words in capfd.readouterr().err


def test_what_is_a_rank_s_own_goes_to_the_rank_of_its_number(naive, alone, folder):
    if naive.rank == 0:
        make_checkpointer(alone, folder).save(link(1, 2))
    naive.allgather_obj(None)
    target = link(0, 0)
    assert make_checkpointer(naive, folder).maybe_load(target) == 1
    assert target.values.tolist() == [1, 2]
    target.values[1] = naive.rank
    make_checkpointer(naive, folder, cp_interval=1, gc_interval=1).save(target, 2)
    assert files(naive, folder) >= {f"run.{rank}.2" for rank in range(naive.size)}
    assert make_checkpointer(alone, folder).maybe_load(target) == 2
    assert target.values.tolist() == [1, 0]


def updater_of(optimizer):
    return StandardUpdater(SerialIterator(range(4), 1), optimizer)


TARGETS = {
    "updater": updater_of,
    "loop": Loop,
    "model": lambda optimizer: optimizer.target,
}


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_model_in_parts_needs_as_many_ranks(naive, alone, folder, kind):
    """As where ranks have components of one shape; on 4 ranks, two copies of the model."""

    def make(comm):
        group = comm
        if comm.size == 4:
            group = comm.split(comm.rank // 2, comm.rank)
        model = MultiNodeChainList(group)
        model.add_link(L.Linear(1, 1, initialW=group.rank))
        return TARGETS[kind](SGD().setup(model)), model[0].W.array

    make_checkpointer(naive, folder).save(make(naive)[0], 1)
    target, weight = make(naive)
    before = weight.item()
    weight[:] = -1
    make_checkpointer(naive, folder).maybe_load(target)
    assert weight == before
    words = f"by {naive.size} ranks, goes on with 1.*0/W' was not the same on all"
    with pytest.raises(ValueError, match=words):
        make_checkpointer(alone, folder).maybe_load(make(alone)[0])
    fewer = naive.split(int(naive.rank == 0), naive.rank)
    words = words.replace("with 1", f"with {fewer.size}")
    with pytest.raises((ValueError, PeerError), match=words):
        make_checkpointer(fewer, folder).maybe_load(make(fewer)[0])
