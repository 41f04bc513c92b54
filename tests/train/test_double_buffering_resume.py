"""Gradients in flight inside a Trainer, and in snapshots."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_train import create_multi_node_evaluator, create_multi_node_optimizer
from tests.support.stale import (
    BATCH,
    Net,
    adam,
    assert_same_bits,
    batch,
    buffered,
    stale_loop,
)

pytestmark = pytest.mark.world


def trainer_of(comm, model, optimizer, out, updates=8):
    examples = np.concatenate([batch(comm.rank, number) for number in range(3)])
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(examples), BATCH, shuffle=False
    )
    updater = training.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (updates, "iteration"), out=str(out))


def test_in_a_trainer_with_an_evaluator(every, tmp_path):
    model, expected = Net(every.rank), Net(0)
    optimizer = buffered(every, model)
    trainer = trainer_of(every, model, optimizer, tmp_path)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(batch(every.rank, 0)), BATCH, repeat=False, shuffle=False
    )

    class Report(chainer.Chain):
        def __call__(self, x):
            chainer.report({"loss": model(x)}, self)

    evaluator = create_multi_node_evaluator(extensions.Evaluator(iterator, Report()), every)
    trainer.extend(evaluator, trigger=(1, "iteration"))
    trainer.run()
    assert optimizer.t == 7
    (mean,) = [value for key, value in trainer.observation.items() if key.endswith("loss")]
    assert every.allgather_obj(float(mean)) == [float(mean)] * every.size
    batches = [batch(every.rank, number % 3) for number in range(8)]
    stale_loop(every, expected, adam(expected), batches)
    assert_same_bits(model, expected)
    optimizer.finalize()


def test_resumed_training_gives_the_bits_of_uninterrupted_training(comm, tmp_path):
    whole = Net(comm.rank)
    trainer = trainer_of(comm, whole, buffered(comm, whole), tmp_path)
    name = f"snapshot_{comm.rank}_{{.updater.iteration}}"
    trainer.extend(extensions.snapshot(filename=name), trigger=(1, "iteration"))
    trainer.run()
    for iteration in 1, 4:
        resumed = Net(comm.rank + 10)
        optimizer = buffered(comm, resumed)
        trainer = trainer_of(comm, resumed, optimizer, tmp_path)
        chainer.serializers.load_npz(tmp_path / f"snapshot_{comm.rank}_{iteration}", trainer)
        assert optimizer.t == iteration - 1
        if iteration == 4:
            optimizer.assume_synchronized()
        trainer.run()
        assert_same_bits(resumed, whole)


def saved(optimizer) -> dict[str, Any]:
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(optimizer)
    return serializer.target


def load(optimizer, target: dict[str, Any]) -> None:
    chainer.serializers.NpzDeserializer(target).load(optimizer)


def test_snapshots_of_other_kinds_are_loaded_or_refused(naive):
    model = Net(0)
    optimizer = buffered(naive, model)
    for number in range(3):
        optimizer.update(model, batch(0, number))
    snapshot = saved(optimizer)
    assert all(np.asarray(value).dtype != object for value in snapshot.values())  # no pickles
    plain = adam(Net(0))
    load(plain, snapshot)
    assert plain.t == 2
    load(optimizer, saved(plain))  # Chainer's own: nothing is in flight
    optimizer.update(model, batch(0, 3))
    assert optimizer.t == 2
    synchronous = create_multi_node_optimizer(adam(Net(0)), naive)
    with pytest.raises(ValueError, match="double_buffering=True"):
        load(synchronous, snapshot)
    load(optimizer, saved(synchronous))
    optimizer.update(model, batch(0, 3))
    optimizer.flush()


def test_parameters_that_all_ranks_restored_are_not_broadcast_again(comm, monkeypatch):
    model = Net(0)
    optimizer = create_multi_node_optimizer(adam(model), comm)
    optimizer.assume_synchronized()
    model.cleargrads()
    model(batch(0, 0)).backward()

    def refuse(_):
        raise AssertionError("broadcast")

    monkeypatch.setattr(comm, "bcast_data", refuse)
    optimizer.update()
    assert optimizer.t == 1
