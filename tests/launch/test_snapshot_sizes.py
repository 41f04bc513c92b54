"""Snapshots of state that is the same on all ranks, taken with 4, serve 1, 2 and 8."""

from __future__ import annotations

import pytest

from . import jobs

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


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """A folder with a snapshot of 4 ranks, and the script."""
    folder = tmp_path_factory.mktemp("taken")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return folder, script


def run(taken, ranks: int, stop: int) -> list[list[str]]:
    folder, script = taken
    job = jobs.run(ranks, script, folder / "out", stop, seconds=120)
    assert job.returncode == 0, job
    return [line.split() for line in job.out.splitlines()]


def test_taken_with_four_ranks_resumed_with_one_two_and_eight(taken):
    run(taken, 4, 3)
    # One rank goes on alone, for set 0; two can only begin where both sets have a snapshot.
    for ranks, stop, begin in ((1, 6, 4), (2, 6, 4), (8, 9, 7)):
        lines = run(taken, ranks, stop)
        assert [line[:3] for line in lines] == [[str(ranks), str(begin), str(stop)]] * ranks
        assert len({line[3] for line in lines}) == 1  # the same bits on all ranks
