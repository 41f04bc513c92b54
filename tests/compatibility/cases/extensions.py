"""Extensions of Chainer's Trainer, but for evaluators and checkpoints."""

from __future__ import annotations

import os

import chainer
import chainer.links as L
import numpy as np
from chainer import Chain, Link, Variable
from mpi4py import MPI

from .models import linear, state, training
from .table import case, each, outcome, together


def make_allreduce_persistent(chainermn, comm):
    return chainermn.extensions.AllreducePersistent(linear(), comm)


def make_observation_aggregator(chainermn, comm):
    return chainermn.extensions.ObservationAggregator(comm, "a")


def make_multi_node_snapshot(chainermn, comm):
    return chainermn.extensions.multi_node_snapshot(comm, snapshot(), [])


def make_checkpointer(chainermn, comm):
    return chainermn.create_multi_node_checkpointer("run", comm, path="checkpoints")


ATTRIBUTES = {
    "AllreducePersistent": make_allreduce_persistent,
    "ObservationAggregator": make_observation_aggregator,
    "multi_node_snapshot": make_multi_node_snapshot,
    "checkpointer": make_checkpointer,
}


@each(**ATTRIBUTES)
def attributes(chainermn, comm, make):
    extension = make(chainermn, comm)
    return extension.trigger, extension.priority, extension.name, extension.default_name


# -- AllreducePersistent


def normalized(rank):
    link = L.BatchNormalization(2)
    link.avg_mean += rank + 1
    link.avg_var += rank + 1
    link.N += rank + 1
    return link


@case
def allreduce_persistent(chainermn, comm):
    model = Chain(a=normalized(comm.rank), b=linear(comm.rank))
    return chainermn.extensions.AllreducePersistent(model, comm)(None), state(model)


class Persistents(Link):
    def __init__(self, rank):
        super().__init__()
        self.add_persistent("int32", np.full(2, rank, np.int32))
        self.add_persistent("float16", np.full(2, rank, np.float16))
        self.add_persistent("float64", np.full(2, rank, np.float64))
        self.add_persistent("number", float(rank))
        self.add_persistent("text", f"of {rank}")
        self.add_persistent("scalar", np.array(rank, np.float32))


@case
def allreduce_persistent_of_kinds(chainermn, comm):
    model = Persistents(comm.rank)
    chainermn.extensions.AllreducePersistent(model, comm)(None)
    return state(model)


# -- ObservationAggregator


def observed(chainermn, comm, values, iterations=2, key="a", target=None, **how):
    """What the trainer observes in each iteration, where a rank reports `values(rank, n)`."""
    trainer, _ = training(chainermn, comm, iterations)

    def report(each):
        chainer.report({key: values(comm.rank, each.updater.iteration)})

    trainer.extend(
        report, priority=chainer.training.PRIORITY_WRITER + 1, trigger=(1, "iteration")
    )
    trainer.extend(
        chainermn.extensions.ObservationAggregator(comm, key, target, **how),
        trigger=(1, "iteration"),
    )
    seen = []

    def look(each):
        seen.append({k: v for k, v in each.observation.items() if "main" not in k})

    trainer.extend(
        look,
        name="see",
        priority=-10,
        trigger=(1, "iteration"),
    )
    trainer.run()
    return seen


def python_float(rank, n):
    return rank + n * 10.0


def python_int(rank, n):
    return rank + n


def float32(rank, n):
    return np.float32(rank + n)


def array(rank, n):
    return np.array(rank + n, np.float32)


def vector(rank, n):
    return np.full(2, rank + n, np.float32)


def variable(rank, n):
    return Variable(np.array(rank + n, np.float32))


VALUES = {
    "float": python_float,
    "int": python_int,
    "float32": float32,
    "array": array,
    "vector": vector,
    "variable": variable,
}


@each(**VALUES)
def observation_aggregator(chainermn, comm, values):
    return observed(chainermn, comm, values)


@case
def observation_aggregator_of_another_key(chainermn, comm):
    return observed(chainermn, comm, VALUES["float"], target="b")


@case
def observation_aggregator_now_and_then(chainermn, comm):
    how = {"comm_trigger": (2, "iteration")}
    return observed(chainermn, comm, VALUES["float"], iterations=4, target="b", **how)


@case
def observation_aggregator_of_one_key_now_and_then(chainermn, comm):
    how = {"comm_trigger": (2, "iteration")}
    return observed(chainermn, comm, VALUES["float"], iterations=4, **how)


@case
def observation_aggregator_of_an_aggregator_now_and_then(chainermn, comm):
    how = {"comm_trigger": (2, "iteration"), "aggregator": lambda values: values}
    return observed(chainermn, comm, VALUES["float"], iterations=4, target="b", **how)


# -- MultiNodeEarlyStoppingTrigger


def stopped(chainermn, comm, values, **how):
    """The iteration in which training ends."""
    trigger = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
        comm,
        monitor="a",
        check_trigger=(1, "iteration"),
        max_trigger=(8, "iteration"),
        **how,
    )
    trainer, _ = training(chainermn, comm, length=trigger)

    def report(each):
        chainer.report({"a": values(comm.rank, each.updater.iteration)})

    trainer.extend(
        report, priority=chainer.training.PRIORITY_WRITER + 1, trigger=(1, "iteration")
    )
    trainer.run()
    return trainer.updater.iteration, sorted(trainer.observation)


@each(1, 2, 3)
def early_stopping(chainermn, comm, patience):
    return stopped(chainermn, comm, lambda rank, n: float(n + rank), patience=patience)


@each("min", "max", "auto")
def early_stopping_mode(chainermn, comm, mode):
    return stopped(chainermn, comm, lambda rank, n: float(n), patience=2, mode=mode)


@case
def early_stopping_where_ranks_differ(chainermn, comm):
    def values(rank, n):
        return float(n if rank else -3 * n)

    return stopped(chainermn, comm, values, patience=2, mode="min")


@case
def early_stopping_suffix(chainermn, comm):
    return stopped(chainermn, comm, lambda rank, n: float(n), patience=2, suffix="_own")


@case
def early_stopping_unknown_keyword(chainermn, comm):
    return stopped(chainermn, comm, lambda rank, n: float(n), unknown=2)


@case
def early_stopping_by_position(chainermn, comm):

    def make():
        return (
            chainermn.extensions.MultiNodeEarlyStoppingTrigger(comm, (1, "epoch"))
            is not None
        )

    return outcome(make)


# -- multi_node_snapshot


def files():
    if os.path.isdir("result"):
        return sorted(os.listdir("result"))
    return []


def snapshot(**how):
    return chainer.training.extensions.snapshot(
        filename="snapshot_{.updater.iteration}", autoload=True, **how
    )


@each(none=[], first=[[0]], all=[[0, 1]], each=[[0], [1]], numbers=range(1))
def multi_node_snapshot(chainermn, comm, replica_sets):
    trainer, _ = training(chainermn, comm)
    extension = chainermn.extensions.multi_node_snapshot(comm, snapshot(), replica_sets)
    trainer.extend(extension, trigger=(1, "iteration"))
    trainer.run()
    return files()


@case
def multi_node_snapshot_loads(chainermn, comm):
    together()
    first, model = training(chainermn, comm)
    make = chainermn.extensions.multi_node_snapshot
    first.extend(make(comm, snapshot(), []), trigger=(1, "iteration"))
    first.run()
    MPI.COMM_WORLD.Barrier()
    second, again = training(chainermn, comm, 3)
    second.extend(make(comm, snapshot(), []), trigger=(1, "iteration"))
    start = []

    def look(each):
        start.append(each.updater.iteration)

    second.extend(
        look,
        name="see",
        trigger=(1, "iteration"),
    )
    second.run()
    MPI.COMM_WORLD.Barrier()
    return start, state(model), state(again)


@each(twice=[[0], [0]], beyond=[[7]], negative=[[-1]])
def multi_node_snapshot_of_wrong_sets(chainermn, comm, sets):
    return chainermn.extensions.multi_node_snapshot(comm, snapshot(), sets) is not None
