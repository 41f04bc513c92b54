"""Snapshots of state that is the same on all ranks, taken with 4, serve 1, 2 and 8.

`test_fewer_and_more_ranks_go_on` does so within a world of the default tier.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import jobs

SCRIPT = (
    jobs.PRELUDE
    + """
import sys
import chainer, chainer.links as L, numpy as np
from chainer import training
from chainer.training import extensions
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer, multi_node_snapshot

comm = create_communicator("naive")
np.random.seed(1)
x = np.linspace(0, 1, 24, dtype="f4").reshape(12, 2)
model = L.Classifier(L.Linear(2, 1), lossfun=chainer.functions.mean_squared_error)
model.compute_accuracy = False
optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
dataset = chainer.datasets.TupleDataset(x, x[:, :1])
iterator = chainer.iterators.SerialIterator(dataset, 2, shuffle=False)
updater = training.StandardUpdater(iterator, optimizer)
trainer = training.Trainer(updater, (int(sys.argv[2]), "iteration"), out=sys.argv[1])
if comm.rank == 0:
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
snapshot = extensions.snapshot(autoload=True)
trainer.extend(multi_node_snapshot(comm, snapshot, [0]), trigger=(3, "iteration"))
begin = []
trainer.extend(lambda trainer: begin.append(trainer.updater.iteration), name="begin")
trainer.run()
bits = "".join(param.array.tobytes().hex() for _, param in sorted(model.namedparams()))
sys.stdout.write(f"{comm.size} {begin[0]} {optimizer.t} {bits}\\n")
"""
)
pytestmark = pytest.mark.full
STOP = 3  # when the snapshot is taken


def run(folder: Path, ranks: int, stop: int) -> list[list[str]]:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    job = jobs.run(ranks, script, folder, stop, seconds=120)
    assert job.returncode == 0, job
    return [line.split() for line in job.out.splitlines()]


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """A folder with a snapshot of four ranks."""
    folder = tmp_path_factory.mktemp("four") / "out"
    run(folder, 4, STOP)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one rank ends with that was never interrupted."""
    return run(tmp_path_factory.mktemp("one") / "out", 1, 2 * STOP)[0][3]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_taken_with_four_ranks_resumed_with(ranks, taken, whole, tmp_path):
    """All have the same examples, and means of 2^n equal numbers are exact: so are the bits."""
    folder = tmp_path / "out"
    shutil.copytree(taken, folder)
    lines = run(folder, ranks, 2 * STOP)
    assert lines == [[str(ranks), str(STOP + 1), str(2 * STOP), whole]] * ranks
