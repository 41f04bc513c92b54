"""The checkpointer: its files, what it loads, and its figures."""

from __future__ import annotations

import os
from contextlib import suppress

from mpi4py import MPI

from .models import state, training
from .table import case, each, outcome, together


def make(chainermn, comm, path="checkpoints", **how):
    return chainermn.create_multi_node_checkpointer("run", comm, path=path, **how)


def without_locks(names):
    """Ours locks a name while a job saves under it."""
    return sorted(name for name in names if not name.endswith(".lock"))


def listed(path="checkpoints"):
    if os.path.isdir(path):
        return without_locks(os.listdir(path))
    return None


def trained(chainermn, comm, iterations=4, every=1, **how):
    """The checkpointer and the model of a run that is killed: nothing is finalized."""
    trainer, model = training(chainermn, comm, iterations + 1)
    checkpointer = make(chainermn, comm, **how)
    trainer.extend(checkpointer, trigger=(every, "iteration"))

    def stop(each):
        if each.updater.iteration == iterations:
            raise KeyboardInterrupt

    trainer.extend(stop, name="stop", trigger=(1, "iteration"), priority=-1000)
    finalize = checkpointer.finalize
    checkpointer.finalize = lambda: None
    with suppress(KeyboardInterrupt):
        trainer.run()
    checkpointer.finalize = finalize
    # Older files go while training goes on.
    getattr(checkpointer, "flush", lambda: None)()
    MPI.COMM_WORLD.Barrier()
    return checkpointer, model


@each(True, False)
def files(chainermn, comm, same_folder):
    if same_folder:
        together()
    trained(chainermn, comm)
    return listed()


@each(1, 2, 5)
def files_where_old_ones_go(chainermn, comm, interval):
    trained(chainermn, comm, iterations=12, cp_interval=2, gc_interval=interval)
    return [name for name in listed() if "commit" not in name]


@case
def files_without_a_path(chainermn, comm):
    trainer, _ = training(chainermn, comm, 3)
    checkpointer = chainermn.create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    seen = []

    def look(each):
        seen.append(without_locks(os.listdir("result")))

    trainer.extend(
        look,
        name="see",
        trigger=(2, "iteration"),
        priority=-1000,
    )
    trainer.run()
    return seen


@case
def what_is_loaded(chainermn, comm):
    together()
    _, model = trained(chainermn, comm)
    trainer, again = training(chainermn, comm, 6, value=9.0)
    optimizer = trainer.updater.get_optimizer("main")
    loaded = make(chainermn, comm).maybe_load(trainer, optimizer)
    return loaded, trainer.updater.iteration, state(model), state(again)


@case
def a_run_goes_on(chainermn, comm):
    together()
    trained(chainermn, comm, iterations=2)
    trainer, model = training(chainermn, comm, 4, value=9.0)
    checkpointer = make(chainermn, comm)
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    checkpointer.maybe_load(trainer, trainer.updater.get_optimizer("main"))
    trainer.run()
    return trainer.updater.iteration, state(model)


@case
def nothing_is_loaded(chainermn, comm):
    trainer, _ = training(chainermn, comm)
    return make(chainermn, comm).maybe_load(trainer), trainer.updater.iteration


@case
def save_without_a_trainer(chainermn, comm):
    trainer, _ = training(chainermn, comm)
    checkpointer = make(chainermn, comm)
    return [checkpointer.save(trainer.updater, n) for n in (1, 2)], listed()


@case
def stats(chainermn, comm):
    checkpointer, _ = trained(chainermn, comm)
    found = checkpointer.get_stats()
    return type(found).__name__, sorted(found) if isinstance(
        found, dict
    ) else found is not None


@case
def stats_of_nothing(chainermn, comm):

    def ask():
        return type(make(chainermn, comm).get_stats()).__name__

    return outcome(ask)


@each("name", "cp_interval", "gc_interval", "path", "files", "stats")
def attribute(chainermn, comm, name):
    return getattr(make(chainermn, comm), name)


@each("", "a b", "a.b", "a/b", "snapshot")
def names(chainermn, comm, name):
    trainer, _ = training(chainermn, comm)
    checkpointer = chainermn.create_multi_node_checkpointer(
        name, comm, path="checkpoints"
    )
    checkpointer.save(trainer.updater, 1)
    return listed()


@each(0, -1, 1.5)
def intervals(chainermn, comm, interval):
    return make(chainermn, comm, cp_interval=interval) is not None


@case
def finalize(chainermn, comm):
    together()
    checkpointer, _ = trained(chainermn, comm, iterations=2)
    checkpointer.finalize()
    MPI.COMM_WORLD.Barrier()
    return listed()


@case
def a_run_that_an_error_ends(chainermn, comm):
    """Chainer finalizes all extensions then, too."""
    trainer, _ = training(chainermn, comm, 3)
    trainer.extend(make(chainermn, comm), trigger=(1, "iteration"))

    def fail(each):
        raise ArithmeticError

    trainer.extend(fail, name="fail", trigger=(2, "iteration"), priority=-1000)
    error = outcome(trainer.run)
    MPI.COMM_WORLD.Barrier()
    return error, listed()


@case
def save_and_load_without_a_trainer(chainermn, comm):
    """As the manual's loop does, but for the number, which Chainer 7's needs."""
    together()
    trainer, model = training(chainermn, comm)
    make(chainermn, comm).save(trainer.updater, 7)
    MPI.COMM_WORLD.Barrier()
    again, other = training(chainermn, comm, value=9.0)
    loaded = make(chainermn, comm).maybe_load(
        again.updater, again.updater.get_optimizer("main")
    )
    return loaded, state(model), state(other)


@case
def save_without_a_number(chainermn, comm):
    trainer, _ = training(chainermn, comm)
    make(chainermn, comm).save(trainer.updater)
    return listed()


@each(default=None, twice=(2, "iteration"))
def how_often(chainermn, comm, trigger):
    """Of 2 epochs of 2 iterations."""
    trainer, _ = training(chainermn, comm, 4)
    checkpointer = make(chainermn, comm)
    trainer.extend(checkpointer, trigger=trigger)
    checkpointer.finalize = lambda: None
    trainer.run()
    return [name for name in listed() if not name.startswith("run.commit")]
