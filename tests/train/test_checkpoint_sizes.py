"""A checkpoint goes on with any number of ranks: what is shared, summed up, or begun anew."""

from __future__ import annotations

import os
import subprocess
import sys

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.iterators import SerialIterator
from chainer.serializers import load_npz

from chainermn_train import (
    DistributedOrderSampler,
    ResumableOrderSampler,
    create_multi_node_iterator,
    create_multi_node_optimizer,
    create_synchronized_iterator,
)
from tests.support.training.checkpoints import (
    bits,
    files,
    link,
    make_checkpointer,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]
EXAMPLES, GLOBAL_BATCH = 1740, 60  # of digits: epochs of 29 iterations
LAUNCHERS = ("PMI", "OMPI", "PRTE", "HYDRA")


@pytest.fixture
def alone(naive):
    """This rank as a job of its own."""
    comm = naive.split(naive.rank, 0)
    yield comm
    comm.finalize()
    naive.allgather_obj(None)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("background", [False, True])
def test_what_is_the_same_is_saved_once(naive, folder, background):
    alike = {"zeros": np.zeros(40_000), "ones": np.ones(40_000)}
    own = {
        # An order has the same numbers on all ranks, and is a rank's own.
        "order": np.random.RandomState(naive.rank).permutation(512),
        "nearly": np.append(np.zeros(39_999), naive.rank),
        "longer": np.zeros(30_000 + 10_000 * naive.rank),
    }
    target = chainer.Link()
    for name, array in {**alike, **own}.items():
        target.add_persistent(name, array.copy())
    checkpointer = make_checkpointer(naive, folder, background=background)
    target.nearly[-1] = -1  # so it is alike now, and not at the next save
    checkpointer.save(target)
    target.nearly[-1] = naive.rank
    checkpointer.save(target)
    checkpointer.flush()
    for name in own | alike:
        getattr(target, name)[:] = -1
    assert make_checkpointer(naive, folder).maybe_load(target) == 2
    for name, array in {**alike, **own}.items():
        np.testing.assert_array_equal(getattr(target, name), array)
    # Beside these there are the random generators, as text.
    sizes = [path.stat().st_size for path in folder.glob("run.*.2")]
    owned = naive.allgather_obj(sum(array.nbytes for array in own.values()))
    assert len(sizes) == naive.size
    assert (
        640_000 + sum(owned) < sum(sizes) < 640_000 + sum(owned) + 90_000 * len(sizes)
    )
    assert max(sizes) < max(owned) + 320_000 + 90_000  # no rank has both


def command(*arguments):
    words = [sys.executable, "-m", "chainermn_train.checkpoint", *map(str, arguments)]
    # It is no rank.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS)
    }
    return subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env=env
    )


@pytest.mark.ci
@pytest.mark.sizes(2)
def test_a_command_makes_a_file_for_chainer_alone(naive, folder):
    model = chainer.Sequential(L.Linear(300, 200), L.Linear(200, 3))
    naive.bcast_data(model)
    make_checkpointer(naive, folder).save(model, 7)
    naive.allgather_obj(None)
    if naive.rank == 0:
        done = command(folder / "run.1.7", folder / "model.npz")
        assert done.returncode == 0, done.stderr
        alone = chainer.Sequential(L.Linear(300, 200), L.Linear(200, 3))
        load_npz(folder / "model.npz", alone)
        assert bits(alone) == bits(model)
        (folder / "run.0.7").unlink()
        done = command(folder / "run.1.7", folder / "model.npz")
        assert done.returncode == 1
        assert "run.0.7" in done.stderr
        assert command().returncode == 1
        (folder / "notes").write_text("of somebody else")
        done = command(folder / "notes", folder / "model.npz")
        assert "notes is damaged, or no file of a checkpoint" in done.stderr
    naive.allgather_obj(None)


@pytest.mark.sizes(2, 3, 4)
def test_gradients_that_were_added_up_begin_anew(naive, alone, folder, capfd):
    def make(comm):
        model = chainer.Sequential(L.Linear(2, 1, initialW=1, initial_bias=0))
        inner = chainer.optimizers.SGD(1)
        return create_multi_node_optimizer(inner, comm, accumulate_steps=3).setup(model)

    def update(optimizer, value):
        x = np.full((1, 2), value, "f4")
        optimizer.update(lambda: chainer.functions.sum(optimizer.target(x)))

    optimizer = make(naive)
    for _ in range(2):
        update(optimizer, 10 * naive.rank)
    make_checkpointer(naive, folder).save(optimizer)
    naive.allgather_obj(None)
    if naive.rank == 0:
        resumed = make(alone)
        assert make_checkpointer(alone, folder).maybe_load(resumed) == 1
        assert "gradients that were added up" in capfd.readouterr().err
        for value in 1, 2, 3:
            update(resumed, value)
        np.testing.assert_allclose(resumed.target[0].W.array, 1 - 2, rtol=1e-6)


@pytest.mark.sizes(2, 3, 4)
def test_others_begin_anew_and_it_is_said(naive, alone, folder, capfd):
    def make(comm):
        dataset = np.zeros((24 // comm.size, 1), "f4")
        model = chainer.Sequential(L.Linear(1, 1))
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(
            model
        )
        iterator = SerialIterator(dataset, 2)
        return training.StandardUpdater(
            iterator, optimizer, loss_func=lambda x: model(x)[0, 0]
        )

    updater, detail = make(naive), 6 * naive.size / 24
    for _ in range(3):
        updater.update()
    make_checkpointer(naive, folder).save(updater)
    naive.allgather_obj(None)
    capfd.readouterr()
    resumed = make(alone)
    assert make_checkpointer(alone, folder).maybe_load(resumed) == 3
    assert resumed.epoch_detail == pytest.approx(detail)
    words = "goes on with 1; begun anew: random numbers, the order of examples of iterator 'main'"
    assert f"'run': saved by {naive.size} ranks, {words}\n" in capfd.readouterr().err


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", ["synchronized", "of rank 0"])
def test_an_order_that_ranks_share_goes_on(naive, alone, folder, capfd, kind):
    def make(comm):
        sampler = ResumableOrderSampler()
        iterator = SerialIterator(np.arange(20), 3, order_sampler=sampler)
        if kind == "synchronized":
            iterator = create_synchronized_iterator(iterator, comm)
        else:
            iterator = create_multi_node_iterator(iterator, comm)
        optimizer = chainer.optimizers.SGD().setup(L.Linear(1, 1))
        return training.StandardUpdater(iterator, optimizer), iterator

    updater, iterator = make(naive)
    for _ in range(3):
        next(iterator)
    make_checkpointer(naive, folder).save(updater)
    rest = [[int(it) for it in next(iterator)] for _ in range(3)]  # of the epoch
    capfd.readouterr()
    again, resumed = make(alone)
    assert make_checkpointer(alone, folder).maybe_load(again) == 0
    assert [[int(it) for it in next(resumed)] for _ in range(3)] == rest
    words = f"saved by {naive.size} ranks, goes on with 1; begun anew: random numbers\n"
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


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_saw_different_numbers_go_on_behind_the_last_one(
    naive, alone, folder
):
    def make(comm):
        sampler = DistributedOrderSampler(comm, 4)
        iterator = SerialIterator(list(range(24)), 1, order_sampler=sampler)
        optimizer = chainer.optimizers.SGD().setup(L.Linear(1, 1))
        comm.bcast_data(optimizer.target)
        return training.StandardUpdater(iterator, optimizer), iterator

    (updater, iterator), seen = make(naive), []
    for _ in range(2 + naive.rank):
        seen += iterator.next()
    make_checkpointer(naive, folder).save(updater)
    seen = {each for row in naive.allgather_obj(seen) for each in row}
    if naive.rank == 0:
        updater, iterator = make(alone)
        make_checkpointer(alone, folder).maybe_load(updater)
        rest = [iterator.next()[0] for _ in range(24 - naive.size * (naive.size + 1))]
        assert not seen & set(rest)
        assert iterator.epoch == 1
