"""Snapshots of other kinds of optimizers, Chainer's own among them, are loaded or refused."""

from __future__ import annotations

import numpy as np
import pytest
from chainer.serializers import HDF5Deserializer, load_npz, save_hdf5, save_npz

from chainermn_train import create_multi_node_optimizer
from tests.support.training.small_models import (
    BATCH,
    TanhNet,
    batch_of,
    buffered,
    hooked_adam,
)
from tests.support.training.trainers import (
    load_state,
    state_of,
    trainer_over,
)

# The third rank would do as the second does.
pytestmark = [pytest.mark.world, pytest.mark.ranks(2)]


def test_snapshots_of_other_kinds_are_loaded_or_refused(naive):
    model = TanhNet(0)
    optimizer = buffered(naive, model)
    for number in range(3):
        optimizer.update(model, batch_of(0, number))
    snapshot = state_of(optimizer)
    # No pickles.
    for value in snapshot.values():
        assert np.asarray(value).dtype != object
    plain = hooked_adam(TanhNet(0))
    synchronous = create_multi_node_optimizer(hooked_adam(TanhNet(0)), naive)
    load_state(plain, snapshot)
    assert plain.t == 2
    with pytest.raises(ValueError, match="double_buffering=True"):
        load_state(synchronous, snapshot)
    for other in plain, synchronous:  # which has loaded the number of steps
        load_state(optimizer, state_of(other))  # nothing is in flight
        optimizer.update(model, batch_of(0, 3))
        assert optimizer.t == 2
    optimizer.flush()
    assert optimizer.t == 3


def save(path, thing):
    formats = {
        ".npz": save_npz,
        ".h5": save_hdf5,
    }
    formats[path.suffix](path, thing)


def load(path, thing, strict):
    if path.suffix == ".npz":
        load_npz(path, thing, strict=strict)
        return
    import h5py

    with h5py.File(path, "r") as file:
        HDF5Deserializer(file, strict=strict).load(thing)


KINDS = {
    "synchronous": {},
    "double_buffering": {"double_buffering": True},
    "accumulating": {"accumulate_steps": 2},
}


@pytest.mark.ci
@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_saved_by_chainer", [True, False])
@pytest.mark.parametrize("whole", ["optimizer", "trainer"])
def test_snapshots_of_chainers_own_optimizer_are_loaded_and_load_there(
    naive, tmp_path, suffix, strict, kind, is_saved_by_chainer, whole
):
    """Which are those of older versions, too."""
    if suffix == ".h5":
        pytest.importorskip("h5py")

    def trained(is_chainers, updates):
        optimizer = hooked_adam(TanhNet(0))
        if not is_chainers:
            optimizer = create_multi_node_optimizer(optimizer, naive, **KINDS[kind])
        examples = np.concatenate([batch_of(0, number) for number in range(3)])
        trainer = trainer_over(
            examples, BATCH, optimizer, (updates, "iteration"), tmp_path
        )
        trainer.run()
        return {"optimizer": optimizer, "trainer": trainer}

    saved = trained(is_saved_by_chainer, 3)
    save(tmp_path / f"saved{suffix}", saved[whole])
    loaded = trained(not is_saved_by_chainer, 1)
    load(tmp_path / f"saved{suffix}", loaded[whole], strict)
    expected = saved["optimizer"]
    found = loaded["optimizer"]
    assert found.t == expected.t > 1 - (kind == "accumulating")
    moments = [it.target.first.W.update_rule.state["m"] for it in (expected, found)]
    assert moments[0].tobytes() == moments[1].tobytes()
