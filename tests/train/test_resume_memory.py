"""What a rank has of its own, only that rank keeps in memory as it resumes."""

from __future__ import annotations

import pytest

from tests.support.jobs.runner import run_text
from tests.support.plugins.pairwise import in_full

MB = 1 << 20
OWN = 20 * MB
SHARED = 2 * MB
# What is shared is loaded whole; of its own, a rank reads the file, and has a copy. The
# rest is MPI's, and Python's own.
MOST = SHARED + 2.5 * OWN + 6 * MB

SCRIPT = """
import pathlib, sys
import chainer
import numpy as np
from chainer.training import extensions, StandardUpdater, Trainer
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_checkpointer, multi_node_snapshot

store, folder, what, own, shared = sys.argv[1:]
comm = create_communicator()

def memory(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition(name + ":")[2].split()[0]) << 10

model = chainer.Link()
model.add_persistent("own", np.full(int(own), comm.rank + 1, np.uint8))
model.add_persistent("shared", np.ones(int(shared), np.uint8))

def step(save):
    if store == "checkpointer":
        checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
        checkpointer.save(model) if save else checkpointer.maybe_load(model)
        return
    iterator = chainer.iterators.SerialIterator(np.zeros((4, 1), "f4"), 2)
    optimizer = chainer.optimizers.SGD().setup(chainer.Link())
    trainer = Trainer(StandardUpdater(iterator, optimizer), (1, "iteration"), out=folder)
    snapshot = multi_node_snapshot(
        comm, extensions.snapshot(autoload=True, target=model), range(comm.size)
    )
    snapshot(trainer) if save else snapshot.initialize(trainer)

if what == "save":
    step(save=True)
else:
    model.own[:] = 0
    before = memory("VmRSS")
    step(save=False)
    assert (model.own == comm.rank + 1).all() and (model.shared == 1).all()
    print(f"GREW {memory('VmHWM') - before}", flush=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "store"),
    [
        (2, "snapshot"),
        (4, "checkpointer"),
        *in_full((2, "checkpointer"), (6, "checkpointer"), (4, "snapshot")),
    ],
)
def test_a_resume_keeps_a_ranks_own_state_in_its_memory_alone(tmp_path, ranks, store):
    for what in ("save", "load"):
        job = run_text(ranks, SCRIPT, store, tmp_path, what, OWN, SHARED)
        assert job.returncode == 0, job
    grew = [int(line.split()[1]) for line in job.out.splitlines()]
    assert len(grew) == ranks
    assert max(grew) <= MOST, [round(each / MB) for each in grew]
