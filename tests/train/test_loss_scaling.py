"""Mixed precision on several ranks: loss scales, overflow, float32 parameters."""

from __future__ import annotations

import warnings
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer

pytestmark = [
    pytest.mark.world,
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

BATCH, WIDTH = 6, 8
KINDS: dict[str, Any] = {
    "synchronous": {},
    "double buffering": {"double_buffering": True},
    "accumulating": {"accumulate_steps": 2},
}


class Net(chainer.Chain):
    def __init__(self, seed):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first = L.Linear(WIDTH, 16)
            self.second = L.Linear(16, 3)

    def __call__(self, x):
        return F.mean(self.second(F.tanh(self.first(x))) ** 2)


@pytest.fixture(autouse=True)
def mixed():
    with chainer.using_config("dtype", chainer.mixed16):
        yield


def batch(*seed):
    random = np.random.RandomState(seed)
    return random.uniform(-1, 1, (BATCH, WIDTH)).astype(np.float16)


def mixed_precision(comm, model, **kwds):
    optimizer = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(lr=0.01), comm, **kwds)
    optimizer.use_fp32_update()
    optimizer.setup(model)
    optimizer.loss_scaling(interval=3)
    return optimizer


def bits(model):
    arrays = {name: param.array.tobytes() for name, param in model.namedparams()}
    for name, param in model.namedparams():
        master = param.update_rule._fp32_param
        if master is not None:
            assert master.array.dtype == np.float32
            arrays[name + "+"] = master.array.tobytes()
    return arrays


def assert_same_everywhere(comm, optimizer):
    mine = bits(optimizer.target), optimizer._loss_scale, optimizer.t
    for others in comm.allgather_obj(mine):
        assert others == mine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [0, -1])
def test_overflow_on_one_rank_makes_all_skip_the_step(comm, kind, where):
    def overflow(x):
        return model(x) * np.float16(60000) * np.float16(60000)

    model = Net(comm.rank)
    optimizer = mixed_precision(comm, model, **KINDS[kind])
    bad = where % comm.size
    skipped = 0
    for number in range(16):
        spoilt = number in (6, 9) and comm.rank == bad
        before, scale, t = bits(model), optimizer._loss_scale, optimizer.t
        with np.errstate(all="ignore"):
            optimizer.update(overflow if spoilt else model, batch(comm.rank, number))
        if optimizer.t > t and optimizer._loss_scale < scale:
            skipped += 1
            assert optimizer._loss_scale == scale / 2
            assert bits(model) == before
        elif optimizer.t > t:
            assert optimizer._loss_scale > scale
            assert bits(model) != before
        assert_same_everywhere(comm, optimizer)
    assert skipped == 2
    assert all(np.isfinite(param.array).all() for param in model.params())


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_are_kept_in_float32(comm, kind):
    """They would be lost in float16."""
    model = Net(comm.rank)
    optimizer = mixed_precision(comm, model, **KINDS[kind])
    optimizer.lr = 1e-5
    optimizer.update(model, batch(comm.rank, 0))
    optimizer.flush()
    assert model.first.W.dtype == np.float16
    start = model.first.W.update_rule._fp32_param.array.copy()
    for number in range(20):
        optimizer.update(model, batch(comm.rank, number))
    optimizer.flush()
    assert not np.array_equal(model.first.W.update_rule._fp32_param.array, start)
    assert_same_everywhere(comm, optimizer)


def test_the_mean_gradient_is_unscaled_as_in_one_process(comm):
    """All ranks have the same batch; whole powers of two change no bit of these gradients."""
    model, expected = Net(comm.rank), Net(0)
    optimizer = mixed_precision(comm, model)
    single = chainer.optimizers.MomentumSGD(lr=0.01)
    single.use_fp32_update()
    single.setup(expected)
    single.loss_scaling(interval=3)
    for number in range(6):
        optimizer.update(model, batch(number))
        single.update(expected, batch(number))
        assert optimizer._loss_scale == single._loss_scale
    for (name, param), (_, other) in zip(
        sorted(model.namedparams()), sorted(expected.namedparams()), strict=True
    ):
        np.testing.assert_allclose(param.array, other.array, rtol=2e-3, atol=1e-4, err_msg=name)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_scale_differently_are_told(comm, kind):
    model = Net(0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **KINDS[kind])
    optimizer.setup(model)
    optimizer.set_loss_scale(8.0 if comm.rank else 4.0)
    with pytest.raises(RankMismatchError, match=r"4\.0 on rank 0, 8\.0 on rank 1.*loss_scaling"):
        optimizer.update(model, batch(0))
    optimizer.set_loss_scale(8.0)
    for number in range(2):
        optimizer.update(model, batch(number))
    if comm.rank == comm.size - 1:
        optimizer.loss_scaling()
    with pytest.raises(RankMismatchError, match=f"dynamic, now 1.0 on rank {comm.size - 1}"):
        optimizer.update(model, batch(0))


@pytest.mark.sizes(2, 3, 4)
def test_float32_parameters_are_broadcast_with_the_others(comm):
    """A rank that has new ones starts from rank 0's, not from what float16 keeps of them."""
    model = Net(0)
    optimizer = mixed_precision(comm, model)
    for number in range(3):
        optimizer.update(model, batch(comm.rank, number))
    if comm.rank == comm.size - 1:
        del model.second
        with model.init_scope():
            model.second = L.Linear(16, 3)
        for param in model.second.params():
            param.update_rule = optimizer.create_update_rule()
            param.update_rule.use_fp32_update()
    for param in model.second.params():  # momenta are not broadcast
        param.update_rule._state = None
        param.update_rule.t = 3
    optimizer.update(model, batch(comm.rank, 4))
    assert_same_everywhere(comm, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_gives_the_bits_of_uninterrupted_training(comm, tmp_path, kind):
    def run(seed, resume=None):
        model = Net(seed)
        optimizer = mixed_precision(comm, model, **KINDS[kind])
        examples = np.concatenate([batch(comm.rank, number) for number in range(3)])
        iterator = chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(examples), BATCH, shuffle=False
        )
        updater = training.StandardUpdater(iterator, optimizer)
        trainer = training.Trainer(updater, (12, "iteration"), out=str(tmp_path))
        if resume is None:
            name = f"snapshot_{comm.rank}_{{.updater.iteration}}"
            trainer.extend(extensions.snapshot(filename=name), trigger=(1, "iteration"))
        else:
            path = tmp_path / f"snapshot_{comm.rank}_{resume}"
            chainer.serializers.load_npz(path, trainer)
        with warnings.catch_warnings():
            trainer.run()
        assert_same_everywhere(comm, optimizer)
        return bits(model), optimizer._loss_scale

    whole = run(comm.rank)
    assert whole[1] > 8  # it was dynamic
    for iteration in 1, 6:
        assert run(comm.rank + 20, iteration) == whole
