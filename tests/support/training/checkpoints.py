"""What the tests of checkpoints share: a trainer with state everywhere, links, and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import training

from chainermn_train import create_multi_node_checkpointer
from tests.support.training import stateful


def noisy(seed: int) -> stateful.Model:
    """A model whose weights differ by the seed; its loss draws from two generators."""
    np.random.seed(seed)
    return stateful.Model(4)


def make_checkpointer(comm, path: Path | None = None, **options: Any) -> Any:
    return create_multi_node_checkpointer("run", comm, path=path, **options)


def make_trainer(
    comm, out, stop=8, seed=None, every=2, iterate=stateful.shuffled, **options: Any
) -> tuple[Any, stateful.Model, Any]:
    """A trainer, its model, and its checkpointer, which saves `every` iterations; 0: never."""
    model = noisy(comm.rank if seed is None else seed)
    trainer = stateful.make_trainer(comm, out, stop, model, iterate)
    checkpointer = make_checkpointer(comm, **options)
    if every:
        trainer.extend(checkpointer, trigger=(every, "iteration"))
    return trainer, model, checkpointer


def bits(model) -> dict[str, bytes]:
    return {name: param.array.tobytes() for name, param in model.namedparams()}


def files(comm, folder: Path) -> set[str]:
    """The checkpoint files there, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {path.name for path in folder.iterdir()} - {"log", "run.lock"}
    comm.allgather_obj(None)
    return found


def contents(comm, folder: Path) -> dict[str, Any]:
    """All that is in a folder, by name, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {
        path.name: (path.is_file() and path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }
    comm.allgather_obj(None)
    return found


def on_rank_0(comm, change: Callable[[], Any]) -> None:
    """Change files while no other rank does anything (collective)."""
    comm.allgather_obj(None)
    if comm.rank == 0:
        change()
    comm.allgather_obj(None)


def files_of(comm, *iterations: Any) -> set[str]:
    return {f"run.{rank}.{each}" for rank in range(comm.size) for each in iterations}


def run_until(
    trainer, iteration: int, error: type[BaseException] = InterruptedError
) -> None:
    """End training as a failing script does, after all other extensions."""

    @training.make_extension(priority=-1000)
    def stop(trainer):
        if trainer.updater.iteration == iteration:
            raise error("stopped by the test")

    trainer.extend(stop, name="stop")
    with pytest.raises(error):
        trainer.run(show_loop_exception_msg=False)


def link(*values: float) -> chainer.Link:
    made = chainer.Link()
    made.add_persistent("values", np.array(values, "f8"))
    made.add_persistent("nothing", None)
    made.add_persistent("text", "naïve")
    return made


def saved(comm, folder: Path, *iterations: int) -> None:
    """Save checkpoints whose link holds the number of the iteration and the rank."""
    checkpointer = make_checkpointer(comm, folder)
    for iteration in iterations:
        checkpointer.save(link(iteration, comm.rank), iteration)


def loaded(comm, folder: Path) -> list[float]:
    """The values of the link in the newest checkpoint; [0, 0] without one."""
    target = link(0, 0)
    make_checkpointer(comm, folder).maybe_load(target)
    return target.values.tolist()


def save_and_flush(checkpointer, iteration: int, value: float | None = None) -> None:
    value = iteration if value is None else value
    checkpointer.save(link(value, value), iteration)
    checkpointer.flush()
