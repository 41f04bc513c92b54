"""A training job of which one rank fails as it is told to.

    python training.py FILE

The file has in JSON a `Case` and "stop" (iterations), "out" (the checkpoints' folder),
"status" (a folder, for the runner) and "fault" (see faults.py) or null. Prints the
processes of the ranks, the iteration that the job goes on from, those of which there is
a checkpoint, and at its end a digest of all that was trained and how long it took.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
from chainer import training
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from chainer.links import Linear
from chainer.optimizers import Adam
from chainer.training import StandardUpdater, Trainer
from mpi4py import MPI
from numpy.random import RandomState

from chainermn_comm import create_communicator
from chainermn_train import (
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
    scatter_dataset,
)
from tests.chaos.faults import Plan
from tests.support.training.checkpoints import Model, digest

INTERVAL = 3  # iterations between saves
EXAMPLES = 40
# Of the arrays of a checkpoint, those that are written before the fault.
ARRAYS_BEFORE = 10


class PlannedModel(Model):
    """Its loss is the user's code."""

    plan: Plan

    def forward(self, x, y):
        if self.plan.updater is not None:
            self.plan.at("user code")
        return super().forward(x, y)


def scatter(comm, plan):
    dataset = None
    if comm.rank == 0:
        x = RandomState(0).uniform(size=(EXAMPLES, 4)).astype("f4")
        dataset = TupleDataset(x, x.sum(axis=1, keepdims=True))

    def scatter_from(root):
        return scatter_dataset(dataset, comm, root=root, shuffle=True, seed=0)

    return plan.collective("scatter_dataset", comm, scatter_from, 0, 1)


def share(comm, plan, model):
    x = np.zeros((2, 4), "f4")
    model(x, x[:, :1])  # initializes it
    plan.collective("bcast_data", comm, comm.bcast_data, model, Linear(3, 2))


def plan_first_update(comm, plan):
    """Its mean of gradients is the first of all."""
    make = comm.make_reducer
    other = Linear(3, 2)
    other.cleargrads()

    def make_reducer(*arguments):
        reducer = make(*arguments)
        add = reducer.add

        def first_mean(model):
            plan.collective("first update", comm, add, model, other)

        reducer.add = first_mean
        return reducer

    comm.make_reducer = make_reducer


def plan_checkpoints(comm, plan, checkpointer, background):
    """A rank fails while it writes its file, or doesn't save as the others do."""
    real_write = np.lib.format.write_array_header_1_0
    real_save = checkpointer.save
    written = []

    def write(*arguments, **options):
        written.append(plan.updater.iteration)
        if written.count(plan.updater.iteration) == ARRAYS_BEFORE:
            plan.at("writing")
        return real_write(*arguments, **options)

    def save(target, iteration=None):
        number = plan.updater.iteration

        def save_and_note(iteration):
            real_save(target, iteration)
            if comm.rank == 0 and not background:
                say(f"COMMITTED {number}")

        plan.collective("checkpoint", comm, save_and_note, iteration, number + 1)

    np.lib.format.write_array_header_1_0 = write
    checkpointer.save = save


def make_planned_trainer(comm, plan, case):
    dataset = scatter(comm, plan)
    model = PlannedModel()
    model.plan = plan
    share(comm, plan, model)
    iterator = SerialIterator(dataset, 4)
    adam = Adam()
    optimizer = create_multi_node_optimizer(adam, comm, overlap=case["overlap"]).setup(
        model
    )
    plan.updater = StandardUpdater(iterator, optimizer)
    trainer = Trainer(plan.updater, (case["stop"], "iteration"), out=case["out"])

    @training.make_extension(trigger=(1, "iteration"))
    def agree(trainer):
        own = np.full(3, comm.rank, "f4")
        plan.collective("collective", comm, comm.allreduce, own, own[:2])

    trainer.extend(agree, "agree")
    plan_first_update(comm, plan)
    return trainer


def say(line: str):
    """Print it in one piece, since the ranks share the output."""
    print(f"{line}\n", end="", flush=True)


def main():
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    case = json.loads(Path(sys.argv[1]).read_text())
    status = Path(case["status"])
    out = Path(case["out"])
    # The disk has been cleared; no rank fills it yet.
    (out / "filler").unlink(missing_ok=True)
    # That some ranks take longer to start on a busy machine is no stall.
    MPI.COMM_WORLD.Barrier()
    comm = create_communicator(case["communicator"])
    plan = Plan(case["fault"], comm.rank, status, out)
    say(f"RANK {comm.rank} {os.getpid()}")
    begun = time.monotonic()
    plan.start()
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    trainer = make_planned_trainer(comm, plan, case)
    checkpointer = create_multi_node_checkpointer(
        "run", comm, cp_interval=1, gc_interval=1, background=case["background"]
    )
    plan_checkpoints(comm, plan, checkpointer, case["background"])
    trainer.extend(checkpointer, trigger=(INTERVAL, "iteration"))
    begin = checkpointer.maybe_load(trainer)
    if comm.rank == 0:
        say(f"BEGIN {begin or 0}")
    trainer.run()
    seconds = time.monotonic() - begun
    say(f"END {comm.rank} {digest(trainer.updater)} {seconds:.3f}")
    plan.collective("finalize", comm, lambda _: comm.finalize())
    plan.stop()


if __name__ == "__main__":
    main()
