"""The checkpointer without a Trainer: models, optimizers and links saved and loaded."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer
from tests.support.training.checkpoints import (
    bits,
    files,
    generation,
    link,
    make_checkpointer,
    noisy,
    save_and_flush,
    saved,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


class Both(chainer.Link):
    """A model and its optimizer as one object to save."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.parts = {"model": model, "optimizer": optimizer}

    def serialize(self, serializer):
        for name, part in self.parts.items():
            part.serialize(serializer[name])


def test_model_with_children_called_as_what_a_trainer_has(naive, folder):
    model = chainer.Chain(
        out=L.Linear(2, 3), updater=L.Linear(2, 3), iteration=L.Linear(2, 3)
    )
    make_checkpointer(naive, folder).save(model)
    expected = bits(model)
    model.out.W.array[:] = 0
    assert make_checkpointer(naive, folder).maybe_load(model) == 1
    assert bits(model) == expected
    assert files(naive, folder) == generation(naive, 1)


def test_without_a_trainer_or_a_folder(comm, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    target = link(1, comm.rank)
    checkpointer = make_checkpointer(comm)
    assert checkpointer.maybe_load(target) is None
    assert capfd.readouterr().err == ""
    for _ in range(3):
        checkpointer.save(target)
        target.values[0] += 1
    assert files(comm, folder / "result") == generation(comm, 1, 2, 3)
    again = link(0, 0)
    again.nothing, again.text = 5, "x"
    checkpointer = make_checkpointer(comm)
    assert checkpointer.maybe_load(again) == 3
    assert again.values.tolist() == [3, comm.rank]
    assert (again.nothing, again.text) == (None, "naïve")
    checkpointer.save(again)
    assert files(comm, folder / "result") == generation(comm, 1, 2, 3, 4)
    checkpointer.finalize()
    assert files(comm, folder / "result") == set()
    comm.allgather_obj(None)


def test_used_again_after_it_is_finalized(naive, folder):
    checkpointer = make_checkpointer(naive, folder, background=True)
    for _ in range(2):
        save_and_flush(checkpointer, 3)
        assert files(naive, folder) == generation(naive, 3)
        checkpointer.finalize()
        assert files(naive, folder) == set()


def test_background_keeps_what_was_there_at_the_save(comm, folder):
    checkpointer = make_checkpointer(comm, folder, background=True)
    big = link(*range(200_000))
    big.add_persistent("transposed", np.arange(6.0).reshape(2, 3).T)
    big.add_persistent("empty", np.empty((0, 3), "f4"))
    for iteration in (1, 2):
        big.values[:] = iteration
        checkpointer.save(big, iteration)
        big.values[:] = -1
    assert generation(comm, 1) <= files(comm, folder)
    checkpointer.flush()
    big.values[:] = big.transposed[:] = 0
    assert make_checkpointer(comm, folder).maybe_load(big) == 2
    assert (big.values == 2).all()
    np.testing.assert_array_equal(big.transposed, np.arange(6.0).reshape(2, 3).T)
    big.values = np.arange(5.0)  # it doesn't fit where the last copy lies
    checkpointer.save(big, 3)
    checkpointer.flush()
    big.values = np.zeros(5)
    assert make_checkpointer(comm, folder).maybe_load(big) == 3
    assert big.values.tolist() == [0, 1, 2, 3, 4]


def test_broadcast_is_spared_where_parameters_are_equal(comm, folder, monkeypatch):
    """And then an update without a loss function, after the resume, steps at once."""

    def make(seed):
        model = noisy(seed)
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(
            model
        )
        return model, optimizer, Both(model, optimizer)

    model, optimizer, both = make(comm.rank)
    optimizer.update(model, np.ones((2, 4), "f4"), np.ones((2, 1), "f4"))
    make_checkpointer(comm, folder).save(both, 1)
    broadcasts = []
    real = type(comm).bcast_data

    def bcast_data(self, model):
        broadcasts.append(model)
        real(self, model)

    monkeypatch.setattr(type(comm), "bcast_data", bcast_data)
    for equal in (True, False)[: comm.size]:
        again, resumed, both_again = make(comm.rank + 5)
        make_checkpointer(comm, folder).maybe_load(both_again, resumed)
        again.cleargrads()
        broadcasts.clear()
        resumed.update()
        assert len(broadcasts) == (0 if equal else 1)
        assert resumed.t == (2 if equal else 1)
        model.out.b.array += comm.rank  # no longer equal on all ranks
        make_checkpointer(comm, folder).save(both, 2)


def test_maybe_load_from_another_folder_this_time(naive, folder):
    saved(naive, folder / "old", 10)
    target = link(0, 0)
    checkpointer = make_checkpointer(naive, folder / "new")
    assert checkpointer.maybe_load(target, path=str(folder / "old")) == 10
    checkpointer.save(target)
    assert files(naive, folder / "new") == generation(naive, 11)
    assert files(naive, folder / "old") == generation(naive, 10)


def test_several_runs_in_one_folder(naive, folder):
    names = ("run.0", "run.commit", "r.n", "räksmörgås [1]*", "run")
    checkpointers = [
        create_multi_node_checkpointer(n, naive, path=folder) for n in names
    ]
    for number, checkpointer in enumerate(checkpointers):
        checkpointer.save(link(number, 0), 5)
    for number, name in enumerate(names):
        target = link(9, 9)
        create_multi_node_checkpointer(name, naive, path=folder).maybe_load(target)
        assert target.values.tolist() == [number, 0]
    for checkpointer in checkpointers:
        checkpointer.finalize()
    assert files(naive, folder) == set()
