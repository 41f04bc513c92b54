"""The multi-node checkpointer: a job that was killed goes on as if it had not been."""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from chainer.training import Extension

from chainermn_comm import CommunicatorBase

from .agreement import call_or_raise
from .background import BackgroundWriter
from .claims import claim, release, taken_by_another
from .durable import Contents, write_durably
from .generations import Generations
from .npz_state import OWN, StoredState, capture, restore, write_npz
from .random_state import capture_random, restore_random
from .resume import choose, explain, survey
from .store import Store
from .synchronized import spare_broadcasts
from .targets import folder_of, updater_of, warn_of_lost_order

_RANDOM = OWN + "random"
_DEFAULT_FOLDER = "result"  # the trainer's own default


class MultiNodeCheckpointer(Extension):
    """What :func:`create_multi_node_checkpointer` makes; all its methods are collective."""

    trigger = (1, "epoch")
    priority = -200  # after all others, also after Chainer's snapshots, so their state is saved
    default_name = "multi_node_checkpointer"

    def __init__(
        self,
        name: str,
        comm: CommunicatorBase,
        cp_interval: int,
        gc_interval: int,
        path: str | None,
        background: bool,
    ) -> None:
        self.run_name = name  # not `name`, which a trainer sets
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path = path
        self._writer = BackgroundWriter() if background else None
        self._pending: tuple[int, Future[Contents]] | None = None
        self._store: Store | None = None  # where it saves, once that is known
        self._last = 0  # the iteration saved or loaded last
        self._saved: tuple[Any, int] = (
            None,
            0,
        )  # trainer or updater that it was saved of, and when
        self._random: str | None = None  # what to begin training with
        self._looked = False  # whether the iterators have been looked at
        self._failed = False
        self._handled = sys.exc_info()[1]

    def __call__(self, trainer: Any) -> None:
        """Save the trainer; Chainer calls it when the trigger fires (collective)."""
        self.save(trainer)

    def save(self, target: Any, iteration: int | None = None) -> None:
        """Save the state of all ranks (collective).

        A trainer or updater that was saved at its iteration already is not saved again, so
        several triggers may fire at once. Where ``iteration`` is given, the new generation
        takes the place of an older one of that number; a job that is killed meanwhile goes on
        from one or the other.

        Args:
            target: what to save: a trainer, or anything that has Chainer's ``serialize``.
            iteration: number of the generation, the same on all ranks. None for that of the
                trainer or updater; for another target, one more than the last.

        Raises:
            TypeError: the target can't be serialized without pickle.
            ValueError: the iteration is older than the newest generation in the folder,
                from which a resume would go on; or it differs between ranks; or another
                checkpointer of this process, not yet finalized, saves by the same name there.
            OSError: a file could not be written. Older generations are as they were.
            PeerError: another rank raised one of these.
        """
        self._look(target)
        views = call_or_raise(self.comm, lambda: self._plan(target, iteration))
        number = views[0][0]
        if any(each != number for each, _, _ in views):
            numbers = ", ".join(f"{each} on rank {rank}" for rank, (each, _, _) in enumerate(views))
            raise ValueError(f"a checkpoint needs one iteration on all ranks, not {numbers}")
        if all(saved for _, saved, _ in views):
            return
        self.flush()
        state: dict[str, np.ndarray] = {}

        def prepare() -> None:
            claim(self, self._where(target))
            state.update(_state_of(target))

        call_or_raise(self.comm, prepare)
        if any(elsewhere for _, _, elsewhere in views):
            self._open(self._where(target))
        assert self._store is not None
        path = self._store.path_for(number)
        self._last = number
        if self._writer is None:
            self._store.commit(number, lambda: _write(path, state))
            self._store.remove(self._outdated())
        else:
            write = functools.partial(
                _collect_and_write, self._store.removal(self._outdated()), path
            )
            self._pending = number, self._writer.start(write, state)
        self._saved = (target if updater_of(target) is not None else None), number

    def flush(self) -> None:
        """Wait for what is being written in the background, and commit it (collective).

        Raises:
            OSError: a file could not be written.
            PeerError: it failed on another rank.
        """
        if self._pending is not None:
            (iteration, future), self._pending = self._pending, None
            saved, self._saved = self._saved, (None, 0)  # unless it can be committed
            assert self._store is not None
            self._store.commit(iteration, future.result)
            self._saved = saved

    def maybe_load(
        self, trainer: Any, optimizer: Any = None, path: str | os.PathLike[str] | None = None
    ) -> int | None:
        """Load the newest checkpoint that is committed and whole on all ranks (collective).

        Call it after all extensions have been added to the trainer. Rank 0 prints which
        generations it skipped, and why. What a killed job left half written is removed.

        Args:
            trainer: what was saved, made in the same way.
            optimizer: a multi-node optimizer whose first update needn't broadcast the
                parameters when they were loaded with the same bits on all ranks. Those of a
                trainer are found without it.
            path: another folder to look in, this time. None for the one where it saves.

        Returns:
            The iteration that training goes on from; None, with nothing changed, where
            nothing was ever committed.

        Raises:
            TypeError: ``trainer`` has no ``serialize``.
            RuntimeError: on all ranks: there are checkpoints, but none is whole, or another
                number of ranks wrote them.
            ValueError: a checkpoint doesn't fit ``trainer``, which may be partly loaded.
            PeerError: another rank raised.
        """
        self._look(trainer)
        self.flush()
        self._require_equal_settings()
        here: list[Generations] = []

        def prepare() -> bool:
            if not callable(getattr(trainer, "serialize", None)):
                raise TypeError(
                    "a checkpoint is loaded into what Chainer can serialize, not "
                    f"{type(trainer).__name__}: give what was saved, made in the same way"
                )
            here.append(self._where(trainer, path))
            return path is None and not taken_by_another(self, here[0])

        views = call_or_raise(self.comm, prepare)
        choice = choose(self.comm, here[0], survey(self.comm, here[0]))
        begin = 0 if choice.record is None else choice.record.iteration
        if choice.skipped and self.comm.rank == 0:
            text = f"{explain(choice.skipped)}; training goes on from iteration {begin}"
            print(f"chainermn: checkpoint {self.run_name!r}: {text}", file=sys.stderr, flush=True)
        if all(views):  # otherwise it only reads
            self._open(here[0], choice.skipped)
        if choice.record is None:
            return None
        call_or_raise(self.comm, lambda: self._load(trainer, here[0], begin))
        spare_broadcasts(self.comm, trainer, optimizer)
        self._last = begin
        return begin

    def initialize(self, trainer: Any) -> None:
        """Begin with the random numbers that come next in the run, whatever was drawn since."""
        self._handled = sys.exc_info()[1]
        if self._random is not None:
            restore_random(trainer, self._random)
            self._random = None

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Keep the checkpoints; the others may not have failed, so nothing is agreed on."""
        self._failed = True

    def finalize(self) -> None:
        """Remove all checkpoints, unless training ended by an exception (collective).

        Without a trainer, call it when all is done.

        Raises:
            OSError: what was written in the background could not be. Then the older
                generations are kept.
            PeerError: that happened on another rank.
        """
        failed = self._failed or sys.exc_info()[1] is not self._handled
        try:
            if not failed and self._store is not None:
                self.flush()
                self._store.clear()
        finally:
            self._pending = self._store = None
            self._saved = None, 0
            release(self)
            if self._writer is not None:
                self._writer.close()
                self._writer = BackgroundWriter()

    def _look(self, target: Any) -> None:
        if not self._looked and self.comm.rank == 0:
            self._looked = True
            warn_of_lost_order(target)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "a MultiNodeCheckpointer can't be copied or pickled: it holds a communicator, and a "
            "copy would write the same files; make another one, with another name or folder"
        )

    def _plan(self, target: Any, iteration: int | None) -> tuple[int, bool, bool]:
        """The iteration to save, whether that is done already, and whether elsewhere."""
        given = iteration
        if iteration is None:
            iteration = getattr(updater_of(target), "iteration", None)
        number = self._last + 1 if iteration is None else operator.index(iteration)
        if number < 0:
            raise ValueError(f"an iteration is not negative, as {number} is")
        elsewhere = self._store is None or self._where(target) != self._store.generations
        of, last = self._saved
        done = given is None and of is not None and of is target and last == number
        return number, done and not elsewhere, elsewhere

    def _where(self, target: Any, path: Any = None) -> Generations:
        for folder in (path, self.path, folder_of(target)):
            if folder is not None:
                return Generations(Path(os.fspath(folder)).absolute(), self.run_name)
        return Generations(Path(_DEFAULT_FOLDER).absolute(), self.run_name)

    def _open(self, generations: Generations, damaged: Iterable[int] = ()) -> None:
        """Save there from now on (collective)."""
        self._require_equal_settings()
        self._store = Store(self.comm, generations, damaged)

    def _require_equal_settings(self) -> None:
        settings = (self.run_name, self.cp_interval, self.gc_interval, self._writer is not None)
        views = call_or_raise(self.comm, lambda: settings)
        if len(set(views)) > 1:
            raise ValueError(
                "ranks made the checkpointer with arguments that differ (name, cp_interval, "
                "gc_interval, background): "
                + ", ".join(f"{view} on rank {rank}" for rank, view in enumerate(views))
            )

    def _outdated(self) -> list[int]:
        assert self._store is not None
        return self._store.outdated(self.cp_interval, self.gc_interval)

    def _load(self, target: Any, generations: Generations, iteration: int) -> None:
        with generations.state(self.comm.rank, iteration).open("rb") as file:
            state = StoredState(file)
            restore(target, state)
            self._random = str(state[_RANDOM])
        restore_random(target, self._random)


def _state_of(target: Any) -> dict[str, np.ndarray]:
    return {**capture(target), _RANDOM: np.array(capture_random(target))}


def _write(path: Path, state: dict[str, np.ndarray]) -> Contents:
    return write_durably(path, lambda file: write_npz(file, state))


def _collect_and_write(
    collect: Callable[[], None], path: Path, state: dict[str, np.ndarray]
) -> Contents:
    collect()
    return _write(path, state)
