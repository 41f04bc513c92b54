"""What Chainer's serializers wrote of an older version's objects, ours loads, and goes on."""

from __future__ import annotations

import pytest

from tests.support.jobs import runner

TEXT = """
import sys, chainer, chainermn, numpy as np
from tests.compatibility.cases.models import state, training

def run(iterations):
    comm = chainermn.create_communicator("naive")
    rule = chainer.optimizers.MomentumSGD(0.001)
    trainer, model = training(chainermn, comm, iterations, optimizer=rule)
    iterator = chainermn.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(list(range(8)), 2), comm
    )
    bn = chainermn.links.MultiNodeBatchNormalization(3, comm)
    return comm.rank, model, {"trainer": trainer, "iterator": iterator, "bn": bn}

rank, model, parts = run(2 if sys.argv[1] == "save" else 3)
if sys.argv[1] == "save":
    parts["trainer"].run()
    parts["iterator"].next()
    for name, part in parts.items():
        chainer.serializers.save_npz(f"{name}.{rank}", part)
else:
    for name, part in parts.items():
        chainer.serializers.load_npz(f"{name}.{rank}", part)
    assert parts["trainer"].updater.iteration == 2
    parts["trainer"].run()
    assert parts["trainer"].updater.iteration == 3
    parts["iterator"].next()
    assert parts["iterator"].current_position == 4
    _, uninterrupted, others = run(3)
    others["trainer"].run()
    for name, array in state(uninterrupted).items():
        np.testing.assert_array_equal(state(model)[name], array)
    print("went on", rank)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    bundled = {"CHAINERMN_USE_BUNDLED": "1", "PYTHONWARNINGS": "ignore"}
    job = runner.run_text(
        2,
        f"import warnings; warnings.resetwarnings()\n{TEXT}",
        "save",
        environment=bundled,
        cwd=folder,
    )
    assert job.returncode == 0, job
    return folder


def test_snapshots_of_chainer_7s_are_loaded_and_go_on(written):
    job = runner.run_text(2, TEXT, "load", cwd=written)
    assert job.returncode == 0, job
    assert sorted(job.out.splitlines()) == ["went on 0", "went on 1"]
