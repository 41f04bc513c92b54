"""The checkpointer without a Trainer: models, optimizers and links saved and loaded."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_train import (
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
)
from tests.support.checkpoints import (
    Noisy,
    bits,
    files,
    generation,
    link,
    rng,
    save_and_flush,
    saved,
)

# Nothing here can tell whether files have reached the disk, which takes most of the time.
pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


def test_model_with_children_called_as_what_a_trainer_has(naive, folder, monkeypatch):
    monkeypatch.chdir(folder)
    model = chainer.Chain(out=L.Linear(2, 3), updater=L.Linear(2, 3), iteration=L.Linear(2, 3))
    checkpointer = create_multi_node_checkpointer("run", naive)
    checkpointer.save(model)
    expected = bits(model)
    model.out.W.array[:] = 0
    assert create_multi_node_checkpointer("run", naive).maybe_load(model) == 1
    assert bits(model) == expected
    assert files(naive, folder / "result") == generation(naive, 1)
    naive.allgather_obj(None)


def test_without_a_trainer(comm, folder, monkeypatch):
    monkeypatch.chdir(folder)
    target = link(1, comm.rank)
    checkpointer = create_multi_node_checkpointer("run", comm)
    assert checkpointer.maybe_load(target) is None
    for _ in range(3):
        checkpointer.save(target)
        target.values[0] += 1
    assert files(comm, folder / "result") == generation(comm, 1, 2, 3)
    again = link(0, 0)
    again.nothing, again.text = 5, "x"
    checkpointer = create_multi_node_checkpointer("run", comm)
    assert checkpointer.maybe_load(again) == 3
    assert again.values.tolist() == [3, comm.rank]
    assert (again.nothing, again.text) == (None, "naïve")
    checkpointer.save(again)
    assert files(comm, folder / "result") == generation(comm, 1, 2, 3, 4)
    checkpointer.finalize()
    assert files(comm, folder / "result") == set()
    comm.allgather_obj(None)


def test_nothing_there_says_nothing(comm, folder, capfd):
    target = link(4, 4)
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder / "new")
    assert checkpointer.maybe_load(target) is None
    assert target.values.tolist() == [4, 4]
    checkpointer.finalize()
    assert capfd.readouterr().err == ""


def test_used_again_after_it_is_finalized(naive, folder):
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder, background=True)
    for _ in range(2):
        save_and_flush(checkpointer, 3)
        assert files(naive, folder) == generation(naive, 3)
        checkpointer.finalize()
        assert files(naive, folder) == set()


def test_background_keeps_what_was_there_at_the_save(comm, folder):
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder, background=True)
    big = link(*range(200_000))
    big.add_persistent("transposed", np.arange(6.0).reshape(2, 3).T)
    big.add_persistent("empty", np.empty((0, 3), "f4"))
    for iteration in (1, 2):
        big.values[:] = iteration
        checkpointer.save(big, iteration)
        big.values[:] = -1
    assert "run.commit.1" in files(comm, folder)
    assert "run.commit.2" not in files(comm, folder)
    checkpointer.flush()
    for array in (big.values, big.transposed):
        array[:] = 0
    assert create_multi_node_checkpointer("run", comm, path=folder).maybe_load(big) == 2
    assert (big.values == 2).all()
    np.testing.assert_array_equal(big.transposed, np.arange(6.0).reshape(2, 3).T)


def test_broadcast_is_spared_where_parameters_are_equal(comm, folder, monkeypatch):
    """And then an update without a loss function, after the resume, steps at once."""
    model = Noisy(comm.rank)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    x, y = np.ones((2, 4), "f4"), np.ones((2, 1), "f4")
    optimizer.update(model, x, y)
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
    checkpointer.save(Both(model, optimizer), 1)
    broadcasts = []
    real = type(comm).bcast_data

    def bcast_data(self, model):
        broadcasts.append(model)
        real(self, model)

    monkeypatch.setattr(type(comm), "bcast_data", bcast_data)
    for equal in (True, False):
        again = Noisy(comm.rank + 5)
        resumed = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(again)
        checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
        checkpointer.maybe_load(Both(again, resumed), resumed)
        again.cleargrads()
        broadcasts.clear()
        resumed.update()
        assert len(broadcasts) == (0 if equal else 1)
        assert resumed.t == (2 if equal else 1)
        if comm.size == 1:
            break
        model.out.b.array += comm.rank  # no longer equal on all ranks
        create_multi_node_checkpointer("run", comm, path=folder).save(Both(model, optimizer), 2)


class Both(chainer.Link):
    """A model and its optimizer as one object to save."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.parts = {"model": model, "optimizer": optimizer}

    def serialize(self, serializer):
        for name, part in self.parts.items():
            part.serialize(serializer[name])


def test_lazy_links_are_loaded_initialised(naive, folder):
    def make():
        model = chainer.Sequential(L.Linear(None, 3))
        optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), naive).setup(model)
        return model, optimizer

    model, optimizer = make()
    for _ in range(2):
        optimizer.update(lambda: chainer.functions.sum(model(np.ones((2, 4), "f4"))))
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
    checkpointer.save(Both(model, optimizer))
    again, resumed = make()
    checkpointer.maybe_load(Both(again, resumed), resumed)
    assert bits(again) == bits(model)
    for each, of in ((optimizer, model), (resumed, again)):
        each.update(lambda of=of: chainer.functions.sum(of(np.ones((2, 4), "f4"))))
    assert resumed.t == optimizer.t == 2
    assert bits(again) == bits(model)


@pytest.mark.parametrize("double_buffering", [False, True])
def test_the_optimizer_itself(naive, folder, double_buffering):
    """Which has names of its own beside Chainer's."""
    x = np.ones((2, 4), "f4") + naive.rank

    def make(seed):
        model = chainer.Sequential(L.Linear(4, 3, initialW=rng(seed).uniform(size=(3, 4))))
        adam = chainer.optimizers.Adam()
        optimizer = create_multi_node_optimizer(adam, naive, double_buffering, accumulate_steps=2)
        return model, optimizer.setup(model)

    def update(model, optimizer, count):
        for _ in range(count):
            optimizer.update(lambda: chainer.functions.sum(model(x) ** 2))

    model, optimizer = make(1)
    update(model, optimizer, 5)
    create_multi_node_checkpointer("run", naive, path=folder).save(optimizer)
    again, resumed = make(2)
    again.copyparams(model)
    assert create_multi_node_checkpointer("run", naive, path=folder).maybe_load(resumed) == 1
    for each in (model, optimizer), (again, resumed):
        update(*each, 5)
        each[1].flush()
    assert bits(again) == bits(model)
    assert resumed.t == optimizer.t == 5


def test_maybe_load_from_another_folder_this_time(naive, folder):
    saved(naive, folder / "old", 10)
    target = link(0, 0)
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder / "new")
    assert checkpointer.maybe_load(target, path=str(folder / "old")) == 10
    checkpointer.save(target)
    assert files(naive, folder / "new") == generation(naive, 11)
    assert files(naive, folder / "old") == generation(naive, 10)


def test_two_runs_in_one_folder(naive, folder):
    names = ("run", "run.0", "run.commit", "r.n", "räksmörgås [1]*")
    checkpointers = [create_multi_node_checkpointer(n, naive, path=folder) for n in names]
    for number, checkpointer in enumerate(checkpointers):
        checkpointer.save(link(number, 0), 5)
    for number, name in enumerate(names):
        target = link(9, 9)
        create_multi_node_checkpointer(name, naive, path=folder).maybe_load(target)
        assert target.values.tolist() == [number, 0]
    for checkpointer in checkpointers:
        checkpointer.finalize()
    assert files(naive, folder) == set()
