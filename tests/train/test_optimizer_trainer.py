"""The multi-node optimizer inside a Trainer, in snapshots, and with a loss scale."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_train import create_multi_node_optimizer
from tests.support.linear import Model, X, same_everywhere, sgd, weights

pytestmark = pytest.mark.world


def trainer_of(comm, model, optimizer, out):
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(np.roll(X, comm.rank, axis=0)), 2, shuffle=False
    )
    updater = training.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (6, "iteration"), out=str(out))


def test_learning_rate_extensions_in_a_trainer(comm, tmp_path):
    model = Model(comm.rank)
    optimizer = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(lr=0.5), comm)
    optimizer.setup(model)
    trainer = trainer_of(comm, model, optimizer, tmp_path)
    trainer.extend(extensions.ExponentialShift("lr", 0.5), trigger=(2, "iteration"))
    shift = extensions.LinearShift("momentum", (0.9, 0.5), (0, 4))
    trainer.extend(shift, trigger=(1, "iteration"))
    trainer.extend(extensions.observe_lr(), trigger=(1, "iteration"))
    trainer.run()
    assert optimizer.t == 6
    assert optimizer.lr == optimizer.actual_optimizer.lr == 0.5**4
    assert optimizer.momentum == 0.5
    assert optimizer.epoch == trainer.updater.epoch > 0  # the updater calls new_epoch
    assert trainer.observation["lr"] == 0.5**3  # observed before it is shifted
    assert same_everywhere(comm, model)


def test_snapshot_and_resume_give_the_bits_of_uninterrupted_training(comm, tmp_path):
    """Also where ranks were at different weights before they resumed."""

    def adam(seed):
        model = Model(seed)
        optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
        return model, optimizer, trainer_of(comm, model, optimizer, tmp_path)

    whole, _, trainer = adam(comm.rank)
    name = f"snapshot_{comm.rank}_{{.updater.iteration}}"
    trainer.extend(extensions.snapshot(filename=name), trigger=(3, "iteration"))
    trainer.run()
    resumed, optimizer, trainer = adam(comm.rank + 10)
    chainer.serializers.load_npz(tmp_path / f"snapshot_{comm.rank}_3", trainer)
    assert optimizer.t == 3
    trainer.run()
    assert optimizer.t == 6
    for name, array in weights(resumed).items():
        np.testing.assert_array_equal(array, weights(whole)[name])


def test_the_optimizer_alone_is_saved_and_loaded(naive, tmp_path):
    model = Model(0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), naive).setup(model)
    optimizer.update(model, X)
    path = tmp_path / "optimizer.npz"
    chainer.serializers.save_npz(path, optimizer)
    other_model = Model(0)
    other = create_multi_node_optimizer(chainer.optimizers.Adam(), naive).setup(other_model)
    chainer.serializers.load_npz(path, other)
    assert other.t == 1
    np.testing.assert_array_equal(
        other_model.main.W.update_rule.state["m"], model.main.W.update_rule.state["m"]
    )


def test_loss_scale_of_the_updater_reaches_the_actual_optimizer(comm):
    model, expected = Model(0), Model(0)
    optimizer = sgd(comm, model)
    seen = []
    optimizer.add_hook(lambda _: seen.append(model.main.W.grad.copy()), name="see")
    iterator = chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(X), 4, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer, loss_scale=64.0)
    updater.update()
    single = chainer.optimizers.SGD(lr=0.5).setup(expected)
    single.update(expected, X)
    assert optimizer.actual_optimizer._loss_scale == 64.0
    np.testing.assert_allclose(seen[0], 64 * expected.main.W.grad, rtol=1e-5)
    np.testing.assert_allclose(model.main.W.array, expected.main.W.array, rtol=1e-5)


@pytest.mark.sizes(2, 3, 4)
def test_loss_scale_is_undone_where_a_rank_has_no_gradient(comm):
    """Rank 0 doesn't use `more`; the others' mean arrives there scaled."""
    model = Model(0)
    with model.init_scope():
        model.more = L.Linear(2, 2)
    optimizer = sgd(comm, model)
    optimizer.set_loss_scale(64.0)
    mine = model.main if comm.rank == 0 else model.more
    before = model.more.W.array.copy()
    for _ in range(2):
        optimizer.update(lambda: chainer.functions.sum(mine.b) + chainer.functions.sum(mine.W))
        assert same_everywhere(comm, model)
    mean = (comm.size - 1) / comm.size
    np.testing.assert_allclose(model.more.W.array, before - 2 * 0.5 * mean, rtol=0, atol=1e-5)
