"""Ranks deal one permutation of a data set, also where each has very few examples of it."""

from __future__ import annotations

import chainer.links as L
import numpy as np
import pytest
from chainer.optimizers import SGD
from chainer.serializers import load_npz, save_npz
from chainer.training import StandardUpdater

from chainermn_train import DistributedOrderSampler
from tests.support.training.checkpoints import make_checkpointer
from tests.support.training.trainers import processes, serial, threads

pytestmark = pytest.mark.world

FEW = [1, 2, 6]
KINDS = [serial, threads, pytest.param(processes, marks=pytest.mark.ci)]
# Examples that each rank takes between two saves. They end within epochs and with them.
STEPS = [1, 2, 4, 3, 6, 5]


def updater_over(comm, kind, count, **options):
    """An updater whose iterator gives one example at a time, of ``count`` in all."""
    sampler = DistributedOrderSampler(comm, **options)
    iterator = kind(list(range(count)), 1, order_sampler=sampler)
    optimizer = SGD().setup(L.Linear(1, 1))
    comm.bcast_data(optimizer.target)
    return StandardUpdater(iterator, optimizer)


def take(updater, steps):
    iterator = updater.get_iterator("main")
    return [next(iterator)[0] for _ in range(steps)]


def in_turn(comm, seen):
    """What all ranks have seen, step by step."""
    return np.transpose(comm.allgather_obj(seen)).ravel().tolist()


def each_epoch_has_all(examples, count):
    epochs = len(examples) // count
    whole = np.reshape(examples[: epochs * count], (epochs, count))
    return bool(np.all(np.sort(whole) == np.arange(count)))


class Resumed:
    """Takes examples in several runs, of which each goes on where the last one was."""

    def __init__(self, comm, kind, count, folder):
        self.make = lambda: updater_over(comm, kind, count)
        self.comm = comm
        self.folder = folder

    def by_checkpoints(self, number, steps):
        updater = self.make()
        checkpointer = make_checkpointer(self.comm, self.folder)
        assert checkpointer.maybe_load(updater) == (number or None)
        seen = take(updater, steps)
        checkpointer.save(updater, number + 1)
        updater.finalize()
        return in_turn(self.comm, seen)

    def by_files(self, number, steps):
        """One of each rank's own, as Chainer's snapshots are, which know of no communicator."""
        path = self.folder / f"{self.comm.rank}.npz"
        updater = self.make()
        if number:
            load_npz(path, updater)
        seen = take(updater, steps)
        save_npz(path, updater)
        updater.finalize()
        return in_turn(self.comm, seen)


@pytest.mark.parametrize("per_rank", FEW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [Resumed.by_checkpoints, Resumed.by_files])
@pytest.mark.usefixtures("forkserver")
def test_a_resume_goes_on_where_ranks_were(naive, folder, kind, per_rank, run):
    """Though an iterator may have drawn the next epoch's order, which may be equal."""
    count = per_rank * naive.size
    resumed = Resumed(naive, kind, count, folder)
    examples = [
        x for number, steps in enumerate(STEPS) for x in run(resumed, number, steps)
    ]
    assert each_epoch_has_all(examples, count)
    updater = updater_over(naive, serial, count)
    whole = take(updater, sum(STEPS))
    assert examples == in_turn(naive, whole)
    updater.get_iterator("main").reset()
    assert take(updater, sum(STEPS)) == whole


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("per_rank", FEW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("forkserver")
def test_a_resume_on_another_number_of_ranks_goes_on_there(
    naive, folder, kind, per_rank
):
    count = per_rank * naive.size
    examples = []
    with naive.split(naive.rank, 0) as alone:
        for number, steps in enumerate(STEPS):
            if number % 2 == 0:
                resumed = Resumed(naive, kind, count, folder)
                examples += resumed.by_checkpoints(number, steps)
            elif naive.rank == 0:
                resumed = Resumed(alone, kind, count, folder)
                # What is left of an epoch has to be enough for all ranks.
                examples += resumed.by_checkpoints(number, steps * naive.size)
            naive.allgather_obj(None)
    if naive.rank == 0:
        assert each_epoch_has_all(examples, count)


def test_an_order_of_another_seed_or_data_set_is_refused(naive):
    begun = DistributedOrderSampler(naive, 1)(np.arange(9 * naive.size), 0)
    for order in begun, np.arange(5)[::-1]:
        with pytest.raises(ValueError, match=r"isn't one that .*\(seed=2, drop_last=F"):
            DistributedOrderSampler(naive, 2)(order, 0)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", [serial, threads])
def test_fewer_examples_than_ranks_can_not_drop_the_last(naive, kind):
    words = r"drop_last=True\) leaves nothing of 1 examples for"
    with pytest.raises(ValueError, match=words):
        updater_over(naive, kind, 1, drop_last=True)
    # Without it, an example goes to several ranks.
    assert take(updater_over(naive, kind, 1), 3) == [0, 0, 0]
