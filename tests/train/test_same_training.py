"""A resumed training is the same training: optimizers, hyperparameters, links without values."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers
from chainer.training import extensions

from chainermn_train import (
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
    multi_node_snapshot,
)
from tests.support.plugins.pairwise import pairwise
from tests.support.training.checkpoints import run_until
from tests.support.training.trainers import (
    parameter_bits,
    same_everywhere,
    trainer_over,
)

# Nothing here can tell whether files have reached the disk, which takes most of the
# time.
pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]

SAVED, STOP = 4, 8  # iterations


class Net(chainer.Chain):
    """Two layers in use, and what no forward uses before iteration `begin`."""

    def __init__(self, rank, begin=None):
        super().__init__()
        random = np.random.RandomState(rank)
        self.calls = 0
        self.begin = begin
        with self.init_scope():
            self.first = L.Linear(3, 4, initialW=random.uniform(-1, 1, (4, 3)))
            self.last = L.Linear(4, 1, initialW=random.uniform(-1, 1, (1, 4)))
            if begin is not None:
                self.late = L.Linear(None, 4, initialW=0.5)
                self.norm = L.BatchNormalization(axis=0)
                self.slope = chainer.Parameter(0.25)

    def __call__(self, x):
        h = F.tanh(self.first(x))
        if self.begin is not None and self.calls >= self.begin:
            if not self.slope.is_initialized:
                self.slope.initialize((4,))
            h = self.norm(self.late(h)) * F.broadcast_to(self.slope, h.shape)
        self.calls += 1
        return F.mean(self.last(h) ** 2)

    def serialize(self, serializer):
        super().serialize(serializer)
        self.calls = int(serializer("calls", self.calls))


class Both:
    """What a loop without a trainer saves."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def serialize(self, serializer):
        self.model.serialize(serializer["model"])
        self.optimizer.serialize(serializer["optimizer"])


def by_checkpointer(comm, trainer):
    checkpointer = create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(SAVED, "iteration"))
    checkpointer.maybe_load(trainer)


def by_snapshot(comm, trainer):
    snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [])
    trainer.extend(snapshot, trigger=(SAVED, "iteration"))


STORES = {"checkpointer": by_checkpointer, "snapshot": by_snapshot}


class Run:
    """A training of a rank: its model, optimizer and trainer, which goes on from what is there."""

    def __init__(self, comm, out, actual, store="checkpointer", *, plain=False, **how):
        self.model = Net(comm.rank, how.get("begin"))
        self.optimizer = actual
        if not plain:
            self.optimizer = create_multi_node_optimizer(actual, comm)
        self.optimizer.setup(self.model)
        # Equal on all ranks, so that snapshots are; their means still have other bits.
        examples = np.random.RandomState(0).uniform(-1, 1, (6, 3)).astype("f4")
        self.trainer = trainer_over(
            examples, 2, self.optimizer, (STOP, "iteration"), out
        )
        how.get("prepare", lambda _: None)(self)
        STORES[store](comm, self.trainer)

    def result(self):
        """All that training has changed."""
        rules = {name: it.update_rule for name, it in self.model.namedparams()}
        return parameter_bits(self.model), {
            name: (rule.t, rule.enabled, rule.hyperparam.get_dict())
            for name, rule in rules.items()
        }


def assert_resumes_the_same(comm, folder, make):
    """Interrupted after a save and resumed, as `make(out)` makes it, it ends as it would have."""
    whole = make(folder / "whole")
    whole.trainer.run()
    run_until(make(folder / "run").trainer, SAVED + 1)
    resumed = make(folder / "run")
    begun = []
    resumed.trainer.extend(
        lambda trainer: begun.append(trainer.updater.iteration),
        name="begun",
        trigger=lambda _: True,  # which has no state
    )
    resumed.trainer.run()
    assert begun[0] == SAVED + 1
    assert resumed.result() == whole.result()


@pairwise(
    store=STORES,
    optimizer=["Adam", "MomentumSGD", "SGD"],
    plain=[False, True],
    begin=[SAVED + 2, STOP + 1],
)
def test_a_link_without_values_when_it_was_saved_is_loaded(
    naive, folder, tmp_path, store, optimizer, plain, begin
):
    """Whether it is used later or never; a plain optimizer steps on its rank alone."""

    def make(out):
        return Run(
            *(naive, out, getattr(optimizers, optimizer)(), store),
            plain=plain,
            begin=begin,
        )

    # Ranks with models of their own have snapshots of their own.
    own = tmp_path if plain and store == "snapshot" else folder
    if plain and store == "snapshot":
        naive = naive.split(naive.rank, 0)
    assert_resumes_the_same(naive, own, make)


@pytest.mark.parametrize("store", ["checkpointer", "load_npz"])
def test_a_link_without_values_is_loaded_without_a_trainer(naive, folder, store):
    def make():
        actual = optimizers.Adam(alpha=0.1)
        optimizer = create_multi_node_optimizer(actual, naive).setup(
            Net(naive.rank, begin=5)
        )
        return optimizer, Both(optimizer.target, optimizer)

    def update(optimizer, start, stop):
        for number in range(start, stop):
            x = np.random.RandomState((number, naive.rank)).uniform(-1, 1, (2, 3))
            optimizer.update(optimizer.target, x.astype("f4"))

    whole, both = make()
    update(whole, 0, 3)
    path = folder / f"{naive.rank}.npz"
    if store == "load_npz":
        chainer.serializers.save_npz(path, both)
    else:
        create_multi_node_checkpointer("run", naive, path=folder).save(both)
    resumed, both = make()
    if store == "load_npz":
        chainer.serializers.load_npz(path, both)
        resumed.assume_synchronized()
    else:
        checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
        checkpointer.maybe_load(both, resumed)
    update(whole, 3, 8)
    update(resumed, 3, 8)
    assert parameter_bits(resumed.target) == parameter_bits(whole.target)
    assert same_everywhere(naive, whole.target)
