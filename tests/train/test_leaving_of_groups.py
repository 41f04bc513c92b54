"""A warning on any rank of a grid: all ranks save the same iteration, whoever trains with whom."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.jobs import runner
from tests.support.plugins.pairwise import in_full

TRAIN = """
import os, signal, sys
import chainer
import chainer.links as L
import numpy as np
from chainer import training
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer

out, columns, warned, trains, saves, how = sys.argv[1:]
world = create_communicator("flat")
place = {"world": 0, "row": world.rank // int(columns), "column": world.rank % int(columns)}
groups = {name: world.split(place[name], world.rank) for name in ("row", "column")}
groups["world"] = world

optimizers = {}
for name in trains.split():
    optimizer = chainer.optimizers.SGD()
    if name != "plain":
        steps = 1000 if how == "accumulating" else 1
        optimizer = create_multi_node_optimizer(
            optimizer, groups[name], accumulate_steps=steps
        )
    optimizers[name] = optimizer.setup(L.Linear(2, 2))

class Updater(training.StandardUpdater):
    def update_core(self):
        for optimizer in self.get_all_optimizers().values():
            model = optimizer.target
            x = np.ones((1, 2), "f4")
            if not (how == "frozen" and optimizer is named["main"] and self.iteration > 1):
                optimizer.update(lambda: chainer.functions.sum(model(x)))
            if self.iteration == 3 and world.rank == int(warned):
                os.kill(os.getpid(), signal.SIGTERM)

data = chainer.datasets.TupleDataset(np.ones((8, 2), "f4"))
iterator = chainer.iterators.SerialIterator(data, 2)
named = {"main": optimizers.pop(trains.split()[0]), **optimizers}
trainer = training.Trainer(Updater(iterator, named), (200, "iteration"), out=out)
name = f"{saves}{place[saves]}"
create_multi_node_checkpointer(name, groups[saves]).maybe_load(trainer)
trainer.run()
"""

# Rows and columns of a grid, the rank that is warned, the ranks that train together and
# those that save together, and when updates agree.
FIRST = [
    (2, 2, 0, "column", "world", "always"),
    (2, 1, 1, "world", "world", "frozen"),
    (2, 1, 1, "world", "world", "accumulating"),
    pytest.param(2, 1, 1, "world row", "world", "frozen", marks=pytest.mark.ci),
]
WARNED = [(2, 1, 0), (2, 1, 1), *[(2, 2, rank) for rank in range(4)], (3, 2, 0)]
TRAIN_AND_SAVE = [
    *[(trains, "world") for trains in ("column", "row", "plain", "world column")],
    ("plain column", "world"),
    # A row of ranks that trains alone and saves alone hears of no other row.
    *[(trains, "row") for trains in ("column", "world", "column world")],
    ("row", "column"),
]
GRIDS = [
    (*warned, *groups, "always")
    for warned, groups in product([*WARNED, (3, 2, 5)], TRAIN_AND_SAVE)
]


@pytest.mark.parametrize(
    ("rows", "columns", "warned", "trains", "saves", "how"), [*FIRST, *in_full(*GRIDS)]
)
def test_all_ranks_of_a_grid_save_the_same_iteration_and_leave(
    tmp_path, rows, columns, warned, trains, saves, how
):
    ranks = rows * columns
    done = runner.run_text(ranks, TRAIN, tmp_path, columns, warned, trains, saves, how)
    assert done.returncode == 75, done
    names = [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert len(names) == ranks, names
    found = len({name.rpartition(".")[2] for name in names})
    assert found == 1, names
