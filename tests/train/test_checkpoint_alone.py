"""The checkpointer without a Trainer: models, optimizers and links saved and loaded."""

from __future__ import annotations

import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Link
from chainer.optimizers import SGD
from numpy.testing import assert_array_equal

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer
from tests.support.training.checkpoints import (
    bits,
    files,
    files_of,
    link,
    make_checkpointer,
    noisy,
)
from tests.support.training.trainers import same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


class Both(Link):
    """A model and its optimizer as one object to save."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.parts = {"model": model, "optimizer": optimizer}

    def serialize(self, serializer):
        for name, part in self.parts.items():
            part.serialize(serializer[name])


def test_model_with_children_called_as_what_a_trainer_has(naive, folder):
    model = Chain(**{name: L.Linear(2, 3) for name in ("out", "updater", "iteration")})
    make_checkpointer(naive, folder).save(model)
    expected = bits(model)
    model.out.W.array[:] = 0
    assert make_checkpointer(naive, folder).maybe_load(model) == 1
    assert bits(model) == expected


def test_without_a_trainer_or_a_folder(comm, folder, monkeypatch, capfd):
    """It can be used again once it is finalized."""
    monkeypatch.chdir(folder)
    target = link(1, comm.rank)
    checkpointer = make_checkpointer(comm)
    assert checkpointer.maybe_load(target) is None
    assert not (folder / "result").exists()
    for _ in range(2):
        for _ in range(3):
            checkpointer.save(target)
            target.values[0] += 1
        again = link(0, 0)
        again.nothing = 5
        again.text = "x"
        assert make_checkpointer(comm).maybe_load(again) is not None
        assert again.values.tolist() == [target.values[0] - 1, comm.rank]
        assert again.nothing is None
        assert again.text == "naïve"
        checkpointer.finalize()
        assert files(comm, folder / "result") == set()
    assert capfd.readouterr().err == ""


def test_background_keeps_what_was_there_at_the_save(comm, folder):
    checkpointer = make_checkpointer(comm, folder, background=True)
    big = link()
    big.add_persistent("empty", np.empty((0, 3), "f4"))
    arrays = [np.full(200_000, 1), np.full(200_000, 2), np.arange(6.0).reshape(2, 3).T]
    for iteration, array in enumerate(arrays, 1):
        big.values = array.copy("K")
        checkpointer.save(big, iteration)
        big.values[:] = -1
    assert files_of(comm, 1, 2) <= files(comm, folder)
    checkpointer.flush()
    assert make_checkpointer(comm, folder).maybe_load(big) == 3
    assert_array_equal(big.values, arrays[2])
    for rank in range(comm.size):
        (folder / f"run.{rank}.3").unlink(missing_ok=True)
    big.values = np.zeros_like(arrays[1])
    assert make_checkpointer(comm, folder).maybe_load(big) == 2
    assert_array_equal(big.values, arrays[1])


def test_broadcast_is_spared_where_parameters_are_equal(comm, folder):
    """And then an update without a loss function, after the resume, steps at once."""

    def make(seed):
        model = noisy(seed)
        sgd = SGD()
        optimizer = create_multi_node_optimizer(sgd, comm).setup(model)
        return model, optimizer, Both(model, optimizer)

    model, optimizer, both = make(comm.rank)
    optimizer.update(model, np.ones((2, 4), "f4"), np.ones((2, 1), "f4"))
    make_checkpointer(comm, folder).save(both, 1)
    for steps in (2, 1)[: comm.size]:
        again, resumed, both_again = make(comm.rank + 5)
        make_checkpointer(comm, folder).maybe_load(both_again, resumed)
        again.cleargrads()
        resumed.update()
        assert resumed.t == steps
        model.out.b.array += comm.rank  # no longer equal on all ranks
        make_checkpointer(comm, folder).save(both, 2)


@pytest.mark.parametrize("why", ["given on rank 0", "loaded alone", "unknown ranks"])
def test_ranks_that_were_not_compared_get_rank_0s_state(naive, tmp_path, why):
    model = noisy(naive.rank)
    sgd = SGD()
    mpi_comm = naive.mpi_comm.Dup()
    color = 0
    if why == "loaded alone":
        color = naive.rank
    with (
        create_communicator("naive", mpi_comm) as everyone,
        everyone.split(color, 0) as comm,
    ):
        mpi_comm.Free()  # as its user may
        optimizer = create_multi_node_optimizer(sgd, everyone).setup(model)
        given = optimizer
        if why == "given on rank 0" and naive.rank:
            given = None
        make_checkpointer(comm, tmp_path).save(model, 1)
        assert make_checkpointer(comm, tmp_path).maybe_load(model, given) == 1
        optimizer.update(model, np.ones((2, 4), "f4"), np.ones((2, 1), "f4"))
        assert same_everywhere(naive, model)


def test_several_runs_in_one_folder(naive, folder):
    names = ("run.0", "run.commit", "r.n", "räksmörgås [1]*", "run")
    for number, name in enumerate(names):
        create_multi_node_checkpointer(name, naive, path=folder).save(link(number), 5)
    for number, name in enumerate(names):
        target = link(9)
        checkpointer = create_multi_node_checkpointer(name, naive, path=folder)
        assert checkpointer.maybe_load(target) == 5
        assert target.values == [number]
        checkpointer.finalize()
    assert files(naive, folder) == set()
