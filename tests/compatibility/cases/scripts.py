"""What scripts do with several of the parts: whole runs and their files."""

from __future__ import annotations

import json
import os
import pickle
from copy import deepcopy
from pathlib import Path

import chainer.functions as F
import numpy as np
from chainer import Chain
from chainer.iterators import SerialIterator
from chainer.links import BatchNormalization, Classifier, Linear
from chainer.optimizers import SGD, Adam, MomentumSGD
from chainer.serializers import load_npz, save_npz
from chainer.training import StandardUpdater, extensions

from .models import Loss, backward, inputs, linear, state, trainer, training
from .table import case, each, of_rank_0, outcome


@case
def data_parallel(chainermn, comm):
    """Scattered data, an evaluator, and reports of rank 0: the examples' usual shape."""
    rows = [
        (row, np.int32(n % 2)) for n, row in enumerate(np.arange(24.0).reshape(8, 3))
    ]
    rows = [(row.astype(np.float32) / 10, label) for row, label in rows]
    model = Classifier(linear(0.5))
    optimizer = chainermn.create_multi_node_optimizer(Adam(), comm)
    optimizer.setup(model)
    model.cleargrads()
    optimizer.update()
    part = chainermn.scatter_dataset(of_rank_0(comm, rows), comm, shuffle=True, seed=1)
    run = trainer(optimizer, part, length=(2, "epoch"))
    once = SerialIterator(part, 2, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(
        extensions.Evaluator(once, model), comm
    )
    run.extend(evaluator)
    if comm.rank == 0:
        run.extend(extensions.LogReport())
        run.extend(extensions.snapshot(filename="snapshot"))
        run.extend(extensions.snapshot_object(model, "model"))
    run.run()
    files = of_rank_0(comm, sorted(os.listdir("result")))
    log = {}
    if comm.rank == 0:
        log = json.loads(Path("result/log").read_text())[-1]
    means = {key: float(value) for key, value in log.items() if "main" in key}
    return files, means, state(model), run.updater.epoch


@case
def hybrid(chainermn, comm):
    """Each rank is the only one of its group."""
    group = comm.split(comm.rank, 0)
    model = linear(comm.rank + 1.0)
    optimizer = chainermn.create_multi_node_optimizer(SGD(0.001), group)
    optimizer.setup(model)
    for _ in range(2):
        backward(model, comm.rank)
        optimizer.update()
    return state(model)


class Front(Chain):
    def __init__(self, comm, functions):
        super().__init__(inner=linear(0.1))
        self.comm = comm
        self.functions = functions

    def forward(self, x):
        return self.functions.send(self.inner(x), self.comm, rank=1)


class Back(Chain):
    def __init__(self, comm, functions):
        super().__init__(inner=Linear(2, 1, initialW=0.5))
        self.comm = comm
        self.functions = functions

    def forward(self):
        return F.sum(self.inner(self.functions.recv(self.comm, rank=0)) ** 2)


@case
def model_parallel(chainermn, comm):
    """Inputs on one rank, the loss on the other, which has an empty data set."""
    kind = Front
    if comm.rank:
        kind = Back
    model = kind(comm, chainermn.functions)
    optimizer = SGD(0.01).setup(model)
    examples = [*inputs(), *inputs(1)]
    if comm.rank:
        examples = chainermn.datasets.create_empty_dataset(examples)
    run = trainer(optimizer, examples, iterations=3)
    run.run()
    return state(model)


def exponential_shift(optimizer):
    return extensions.ExponentialShift("lr", 0.5)


def of_the_optimizer(optimizer):
    return extensions.ExponentialShift("lr", 0.5, optimizer=optimizer)


def linear_shift(optimizer):
    return extensions.LinearShift("lr", (0.1, 0.01), (0, 2))


SHIFTS = {
    "ExponentialShift": exponential_shift,
    "of the optimizer": of_the_optimizer,
    "LinearShift": linear_shift,
}


@each(**SHIFTS)
def learning_rates(chainermn, comm, shift):
    run, _ = training(chainermn, comm)
    optimizer = run.updater.get_optimizer("main")
    run.extend(shift(optimizer), trigger=(1, "iteration"))
    run.extend(extensions.observe_lr(), trigger=(1, "iteration"))
    run.run()
    return optimizer.lr, run.observation["lr"]


@each(
    "use_cleargrads",
    "use_fp32_update",
    "reallocate_cleared_grads",
    "call_hooks",
    "new_epoch",
)
def methods_of_the_optimizer(chainermn, comm, name):
    optimizer = chainermn.create_multi_node_optimizer(SGD(), comm)
    optimizer.setup(linear())
    if name == "call_hooks":
        return optimizer.call_hooks("pre")
    return getattr(optimizer, name)()


@case
def a_hook_that_a_script_wrote(chainermn, comm):
    """It is called with the optimizer; here with which one."""
    model = linear()
    actual = SGD(0.001)
    optimizer = chainermn.create_multi_node_optimizer(actual, comm)
    optimizer.setup(model)
    seen = []

    def look(each):
        seen.append((each is actual, each.t))

    optimizer.add_hook(look, "see")
    for _ in range(3):
        backward(model, comm.rank)
        optimizer.update()
    return seen


@each("optimizer", "updater", "trainer")
def saved_and_loaded(chainermn, comm, what):
    def made():
        run, _ = training(chainermn, comm, optimizer=MomentumSGD(0.001))
        updater = run.updater
        return run, {
            "optimizer": updater.get_optimizer("main"),
            "updater": updater,
            "trainer": run,
        }

    run, parts = made()
    run.run()
    again, others = made()
    # A trainer that hasn't begun can't be saved, but loaded.
    save_npz("file", parts[what])
    load_npz("file", others[what])
    target = again.updater.get_optimizer("main").target
    return state(target), again.updater.get_optimizer("main").t, again.updater.iteration


@each("deepcopy", "copy", "pickle")
def models_are_copied(chainermn, comm, how):
    model = chainermn.links.create_mnbn_model(
        Chain(a=linear(), b=BatchNormalization(2)), comm
    )

    def pickled(link):
        return pickle.loads(pickle.dumps(link))

    ways = {
        "deepcopy": deepcopy,
        "copy": lambda link: link.copy("copy"),
        "pickle": pickled,
    }
    made = outcome(lambda: ways[how](model))
    if isinstance(made, Exception):
        return made
    return made.b.comm is comm


@case
def an_updater_that_a_script_wrote(chainermn, comm):
    class Own(StandardUpdater):
        def update_core(self):
            optimizer = self.get_optimizer("main")
            loss = optimizer.target(np.stack(self.get_iterator("main").next()))
            optimizer.target.cleargrads()
            loss.backward()
            optimizer.update()

    model = Loss(comm.rank + 1.0)
    optimizer = chainermn.create_multi_node_optimizer(SGD(0.001), comm)
    optimizer.setup(model)
    iterator = SerialIterator([*inputs(comm.rank)], 2, shuffle=False)
    updater = Own(iterator, optimizer)
    for _ in range(3):
        updater.update()
    return state(model), updater.iteration
