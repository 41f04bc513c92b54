"""Training that resumes in the middle of whatever it was at gives the same bits."""

from __future__ import annotations

import chainer
import numpy as np
import pytest
from chainer.training import extensions, triggers

from chainermn_train import create_multi_node_optimizer
from tests.support.plugins.pairwise import pairwise
from tests.support.training.stale import BATCH, TanhNet, batch_of, buffered, hooked_adam
from tests.support.training.trainers import (
    load_state,
    parameter_bits,
    same_everywhere,
    state_of,
    trainer_over,
)

pytestmark = [
    pytest.mark.world,
    pytest.mark.ranks(2),  # the third would do as the second does
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

UPDATES, WIDTH = 12, 7
PRECISIONS = {
    "float32": np.dtype("float32"),
    "float16": np.dtype("float16"),
    "mixed": chainer.mixed16,  # and a dynamic loss scale
}


def optimizer_of(comm, model, precision, **kwds):
    if precision == "float32":
        return create_multi_node_optimizer(hooked_adam(model), comm, **kwds)
    actual = chainer.optimizers.MomentumSGD(lr=0.01)
    optimizer = create_multi_node_optimizer(actual, comm, **kwds)
    if precision == "mixed":
        optimizer.use_fp32_update()
        optimizer.loss_scaling(interval=3)
    return optimizer.setup(model)


@pairwise(precision=PRECISIONS, double_buffering=[False, True], accumulate_steps=[1, 3])
def test_resumed_training_gives_the_bits_of_uninterrupted_training(
    comm, tmp_path, precision, double_buffering, accumulate_steps
):
    """Before the first step, in the middle of a group and at its end, and after the last update."""
    kwds = {"double_buffering": double_buffering, "accumulate_steps": accumulate_steps}

    def run(seed, resume=None):
        model = TanhNet(seed, WIDTH, 16)
        optimizer = optimizer_of(comm, model, precision, **kwds)
        examples = np.concatenate(
            [batch_of(comm.rank, n, width=WIDTH) for n in range(3)]
        )
        trainer = trainer_over(
            examples, BATCH, optimizer, (UPDATES, "iteration"), tmp_path
        )
        if resume is None:
            snapshot = extensions.snapshot(filename="snapshot_{.updater.iteration}")
            moments = triggers.ManualScheduleTrigger([1, 5, 6, UPDATES], "iteration")
            trainer.extend(snapshot, trigger=moments)
        else:
            chainer.serializers.load_npz(tmp_path / f"snapshot_{resume}", trainer)
            stale = double_buffering and resume >= accumulate_steps
            assert optimizer.t == resume // accumulate_steps - stale
            if resume == 6:  # as parameters were loaded on all ranks
                optimizer.assume_synchronized()
        trainer.run()
        optimizer.flush()
        assert same_everywhere(comm, model)
        optimizer.finalize()
        return parameter_bits(model), optimizer.t, optimizer._loss_scale

    with chainer.using_config("dtype", PRECISIONS[precision]):
        whole = run(comm.rank)
        assert (whole[2] or 0) > 1 or precision != "mixed"  # the scale is dynamic
        for iteration in 1, 5, 6, UPDATES:
            assert run(comm.rank + 20, iteration) == whole


def test_snapshots_of_other_kinds_are_loaded_or_refused(naive):
    model = TanhNet(0)
    optimizer = buffered(naive, model)
    for number in range(3):
        optimizer.update(model, batch_of(0, number))
    snapshot = state_of(optimizer)
    # No pickles.
    assert all(np.asarray(value).dtype != object for value in snapshot.values())
    plain = hooked_adam(TanhNet(0))
    load_state(plain, snapshot)
    assert plain.t == 2
    load_state(optimizer, state_of(plain))  # Chainer's own: nothing is in flight
    optimizer.update(model, batch_of(0, 3))
    assert optimizer.t == 2
    synchronous = create_multi_node_optimizer(hooked_adam(TanhNet(0)), naive)
    with pytest.raises(ValueError, match="double_buffering=True"):
        load_state(synchronous, snapshot)
    load_state(optimizer, state_of(synchronous))
    optimizer.update(model, batch_of(0, 3))
    optimizer.flush()
    assert optimizer.t == 3


def save(path, thing):
    formats = {
        ".npz": chainer.serializers.save_npz,
        ".h5": chainer.serializers.save_hdf5,
    }
    formats[path.suffix](path, thing)


def load(path, thing, strict):
    if path.suffix == ".npz":
        chainer.serializers.load_npz(path, thing, strict=strict)
        return
    import h5py

    with h5py.File(path, "r") as file:
        chainer.serializers.HDF5Deserializer(file, strict=strict).load(thing)


@pytest.mark.ci
@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "kind", ["plain", "synchronous", "double_buffering", "accumulating"]
)
def test_snapshots_of_chainers_own_optimizer_are_loaded_and_load_there(
    naive, tmp_path, suffix, strict, kind
):
    """Which are those of older versions, too; also within a trainer's, and out of one."""
    if suffix == ".h5":
        pytest.importorskip("h5py")
    kwds = {"double_buffering": kind == "double_buffering"}
    kwds["accumulate_steps"] = 1 + (kind == "accumulating")

    def trained(kind, updates=3):
        model = TanhNet(0)
        optimizer = hooked_adam(model)
        if kind != "plain":
            optimizer = create_multi_node_optimizer(optimizer, naive, **kwds)
        examples = np.concatenate([batch_of(0, number) for number in range(3)])
        trainer = trainer_over(
            examples, BATCH, optimizer, (updates, "iteration"), tmp_path
        )
        trainer.run()
        return model, optimizer, trainer

    for own, other in ("plain", kind), (kind, "plain"):
        model, optimizer, trainer = trained(own)
        save(tmp_path / f"optimizer{suffix}", optimizer)
        save(tmp_path / f"trainer{suffix}", trainer)
        moments = model.first.W.update_rule.state["m"].tobytes()
        for path in "optimizer", "trainer":
            model, found, trainer = trained(other, 1)
            thing = found if path == "optimizer" else trainer
            load(tmp_path / f"{path}{suffix}", thing, strict)
            assert found.t == optimizer.t > 1 - (kind == "accumulating")
            assert model.first.W.update_rule.state["m"].tobytes() == moments
        if suffix == ".npz":
            model, found, _ = trained(other, 1)
            file, path = tmp_path / "trainer.npz", "updater/optimizer:main/"
            chainer.serializers.load_npz(file, found, path=path, strict=strict)
            assert found.t == optimizer.t
            assert model.first.W.update_rule.state["m"].tobytes() == moments


def test_parameters_that_all_ranks_restored_are_not_broadcast_again(comm):
    model = TanhNet(0)
    optimizer = create_multi_node_optimizer(hooked_adam(model), comm)
    optimizer.assume_synchronized()
    model.cleargrads()
    model(batch_of(0, 0)).backward()
    optimizer.update()
    assert optimizer.t == 1  # else it would broadcast, and not step
