"""Gradients that no step has used at the end: a warning tells of them."""

from __future__ import annotations

import gc
import warnings
from copy import copy, deepcopy

import pytest
from chainer.optimizers import SGD

from tests.support.jobs import runner
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.small_models import Model, update

WARNING = "gradients are left that no step has used"
ALL_WARNINGS = pytest.mark.filterwarnings("always")


# What happens to an optimizer, and how often it is told of then. A shallow copy has the
# same gradients left, a deep copy its own.
ENDS = {
    "collected": (lambda optimizer: None, 1),
    "finalized": (lambda optimizer: optimizer.finalize(), 1),
    "copied": (copy, 1),
    "copied deeply": (deepcopy, 2),
}


@pytest.mark.world
@ALL_WARNINGS
@pairwise(kind=KINDS, steps=[1, 3], flushes=[True, False], end=ENDS)
def test_what_no_step_has_used_is_warned_of_once(comm, kind, steps, flushes, end):
    optimizer = exchanging(kind, comm, SGD(), Model(0), steps)
    update(optimizer, 4)
    is_left = not flushes and (steps > 1 or kind == "double buffering")
    if flushes:
        optimizer.flush()
    end_it, expected = ENDS[end]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        twin = end_it(optimizer)
        del optimizer, twin
        gc.collect()
    told = [str(each.message) for each in found if WARNING in str(each.message)]
    assert len(told) == expected * (is_left and comm.rank == 0)
    for each in told:
        assert "flush()" in each


@pytest.mark.world
@ALL_WARNINGS
def test_gradients_that_are_dropped_on_purpose_are_not_warned_of(comm):
    optimizer = exchanging("double buffering", comm, SGD(), Model(0))
    update(optimizer, 2)
    optimizer.setup(Model(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.finalize()
    assert optimizer.target is not None


TRAINS = """
import chainer, numpy as np, sys
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.training.small_models import Model, X

def train():
    comm = create_communicator("naive")
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, double_buffering=True).setup(Model(0))
    iterator = chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(X), 2)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (3, "iteration"), out=sys.argv[2])
    trainer.run()
    return trainer

kept = train()
if sys.argv[1] == "flushes":
    kept.updater.get_optimizer("main").flush()
"""


@pytest.mark.parametrize(
    "then", ["ends", pytest.param("flushes", marks=pytest.mark.full)]
)
def test_a_script_that_ends_with_gradients_left_is_told_once(then, tmp_path):
    job = runner.run_text(2, TRAINS, then, tmp_path)
    assert job.returncode == 0, job
    assert job.err.count(WARNING) == (then == "ends"), job


PATCHES = """
import sys, types, warnings
import chainer, numpy as np
import chainer.links as L
from chainer import training
from chainer.training import extensions

chainer.get_array_types()  # which Chainer finds at the first call

def held():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "chainer" or type(module) is not types.ModuleType:
            continue
        for attribute, value in list(vars(module).items()):
            found[name, attribute] = value
            if isinstance(value, type) and value.__module__.startswith("chainer."):
                for own, of_class in vars(value).items():
                    found[value.__module__, value.__qualname__, own] = of_class
    return found

before = held()
import chainermn
from chainermn import functions, links
from tests.support.training.small_models import Model, X

comm = chainermn.create_communicator("naive")
KINDS = {"double_buffering": True}, {"overlap": True}, {"accumulate_steps": 2}
for number, arguments in enumerate(KINDS):
    model = L.Classifier(L.Linear(3, 2))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, **arguments).setup(model)
    data = chainer.datasets.TupleDataset(X, np.zeros(4, np.int32))
    data = chainermn.scatter_dataset(data, comm)
    iterator = chainer.iterators.SerialIterator(data, 2)
    updater = training.StandardUpdater(iterator, optimizer)
    out = f"{sys.argv[1]}/{number}"
    trainer = training.Trainer(updater, (4, "iteration"), out=out)
    once = chainer.iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(once, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(chainermn.create_multi_node_checkpointer("run", comm))
    snapshot = extensions.snapshot(autoload=True)
    trainer.extend(chainermn.extensions.multi_node_snapshot(comm, snapshot, []))
    trainer.extend(chainermn.extensions.ObservationAggregator(comm, "main/loss"))
    trainer.extend(chainermn.extensions.ThroughputReport(comm))
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))

    @training.make_extension(trigger=(4, "iteration"))
    def longer(trainer):
        if trainer.updater.iteration == 4:
            trainer.stop_trigger.period += 1

    trainer.extend(longer)
    trainer.run()
    assert trainer.updater.iteration == 5
    optimizer.flush()
chain = links.MultiNodeChainList(comm)
chain.add_link(links.MultiNodeBatchNormalization(3, comm), None, None)
chainer.functions.sum(functions.allgather(comm, chain(X))[0]).backward()
after = held()
changed = [key for key, value in before.items() if after.get(key) is not value]
# Warnings are recorded in each module that has given one.
print([key for key in changed if key[-1] != "__warningregistry__"])
"""


def test_nothing_of_chainers_is_patched(tmp_path):
    """Whatever of ours a process uses: modules and classes of Chainer's hold what they held."""
    job = runner.run_text(1, PATCHES, tmp_path)
    assert job.returncode == 0, job
    assert job.out.splitlines()[-1] == "[]", job
