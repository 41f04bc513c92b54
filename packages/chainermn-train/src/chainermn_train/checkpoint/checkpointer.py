"""The multi-node checkpointer: a job that was killed goes on as if it had not been."""

from __future__ import annotations

import operator
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from chainer.training import Extension

from chainermn_comm import CommunicatorBase

from ..collective_errors import SharedFailure, allgather_checked, raise_on_all_ranks
from ..trainer_introspection import updater_of, warn_of_lost_order
from .atomic_file import FileDigest, atomic_write
from .background_writer import BackgroundWriter
from .directory import CheckpointDirectory, has_other_writer, register_writer, release_writer
from .files import CheckpointPaths
from .mark_synchronized import mark_synchronized_if_equal
from .recovery import OPERATION, explain, scan, select_latest
from .state_dict import (
    RESERVED_PREFIX,
    load_random_state,
    load_state_dict,
    open_state,
    random_state,
    state_dict,
    write_npz,
)

_RANDOM = RESERVED_PREFIX + "random"
_DEFAULT_FOLDER = "result"  # the trainer's own default


class MultiNodeCheckpointer(Extension):
    """The extension that :func:`create_multi_node_checkpointer` makes.

    ``name``, ``comm``, ``cp_interval``, ``gc_interval``, ``path`` and ``background`` are as there,
    where they are checked. Making one is not collective; its methods are, but for
    :meth:`initialize`, :meth:`get_stats` and :meth:`on_error`. Copying or pickling it raises
    TypeError.
    """

    trigger = (1, "iteration")
    priority = -200  # after all others, also after Chainer's snapshots, so their state is saved

    def __init__(
        self,
        name: str,
        comm: CommunicatorBase,
        cp_interval: int,
        gc_interval: int,
        path: str | None,
        background: bool,
    ) -> None:
        self.run_name = self.name = name  # a trainer may change `name`, which is the extension's
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path = path
        self._writer = BackgroundWriter() if background else None
        self._writing: tuple[int, Future[FileDigest]] | None = None
        self._directory: CheckpointDirectory | None = None  # once known where it saves
        self._last = 0  # the iteration saved or loaded last
        self._saved: tuple[Any, int] = (None, 0)  # the trainer or updater, and its iteration
        self._random: str | None = None  # state of the generators to begin training with
        self._iterators_checked = False
        self._failed = False
        self._handled = sys.exc_info()[1]
        self._seconds: list[float] = []  # that each save took

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
        self._check_iterators(target)
        with SharedFailure(self.comm.handshake, OPERATION):
            own = getattr(updater_of(target), "iteration", self._last + 1)
            number = operator.index(own if iteration is None else iteration)
            if number < 0:
                raise ValueError(f"an iteration is not negative, as {number} is")
        self.comm.handshake(OPERATION, (("iteration", number),))
        views = allgather_checked(
            self.comm, OPERATION, lambda: self._is_saved(target, iteration, number)
        )
        if all(saved for saved, _ in views):
            return
        began = time.perf_counter()
        self.flush()
        with raise_on_all_ranks(self.comm, OPERATION):
            register_writer(self, self._paths_for(target))
            state = state_dict(target)
            state[_RANDOM] = np.array(random_state(target))
        if any(elsewhere for _, elsewhere in views):
            self._require_equal_settings()
            self._directory = CheckpointDirectory(self.comm, self._paths_for(target))
        assert self._directory is not None
        path = self._directory.path_for(number)
        intervals = self.cp_interval, self.gc_interval
        self._last = number
        if self._writer is None:
            self._directory.commit(number, lambda: _write(path, state))
            self._directory.remove(self._directory.expired(*intervals))
        else:
            delete = self._directory.deferred_delete(self._directory.expired(*intervals))

            def delete_and_write(copies: dict[str, np.ndarray]) -> FileDigest:
                delete()
                return _write(path, copies)

            self._writing = number, self._writer.start(delete_and_write, state)
        self._saved = (target if updater_of(target) is not None else None), number
        self._seconds.append(time.perf_counter() - began)

    def get_stats(self) -> str:
        """Return in words how long saves have held this rank, in seconds (not collective).

        The numbers follow ``avg=``, ``min=`` and ``max=``. What is written in the background
        counts only where training waits for it.
        """
        times = self._seconds
        if not times:
            return "no checkpoint has been saved"
        mean = sum(times) / len(times)
        return (
            f"seconds that a checkpoint took: avg={mean:f}, min={min(times):f}, max={max(times):f}"
        )

    def flush(self) -> None:
        """Wait for what is being written in the background, and commit it (collective).

        Raises:
            OSError: a file could not be written.
            PeerError: it failed on another rank.
        """
        if self._writing is not None:
            (iteration, future), self._writing = self._writing, None
            saved, self._saved = self._saved, (None, 0)  # unless it can be committed
            assert self._directory is not None
            self._directory.commit(iteration, future.result)
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
        self._check_iterators(trainer)
        self.flush()
        self._require_equal_settings()
        with SharedFailure(self.comm.handshake, OPERATION):
            if not callable(getattr(trainer, "serialize", None)):
                raise TypeError(
                    "a checkpoint is loaded into what Chainer can serialize, not "
                    f"{type(trainer).__name__}: give what was saved, made in the same way"
                )
            paths = self._paths_for(trainer, path)
            here = path is None and not has_other_writer(self, paths)
        writable = allgather_checked(self.comm, OPERATION, lambda: here)
        found, skipped = select_latest(self.comm, paths, scan(self.comm, paths))
        begin = 0 if found is None else found
        if skipped and self.comm.rank == 0:
            text = f"{explain(skipped, 'iteration ')}; training goes on from iteration {begin}"
            print(f"chainermn: checkpoint {self.run_name!r}: {text}", file=sys.stderr, flush=True)
        if all(writable):  # otherwise it only reads
            self._directory = CheckpointDirectory(self.comm, paths, skipped)
        if found is None:
            return None
        with raise_on_all_ranks(self.comm, OPERATION):
            with paths.state(self.comm.rank, begin).open("rb") as file:
                state = open_state(file)
                load_state_dict(trainer, state)
                self._random = str(state[_RANDOM])
            load_random_state(trainer, self._random)
        mark_synchronized_if_equal(self.comm, trainer, optimizer)
        self._last = begin
        return begin

    def initialize(self, trainer: Any) -> None:
        """Begin with the random numbers that come next in the run, whatever was drawn since.

        Not collective.
        """
        self._handled = sys.exc_info()[1]
        if self._random is not None:
            load_random_state(trainer, self._random)
            self._random = None

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Keep the checkpoints (not collective: the other ranks may not have failed).

        Neither ``trainer`` nor the exception ``exc`` and its traceback ``tb`` matters.
        """
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
            if not failed and self._directory is not None:
                self.flush()
                self._directory.clear()
        finally:
            self._writing = self._directory = None
            self._saved = None, 0
            release_writer(self)
            if self._writer is not None:
                self._writer.close()
                self._writer = BackgroundWriter()

    def _check_iterators(self, target: Any) -> None:
        if not self._iterators_checked and self.comm.rank == 0:
            self._iterators_checked = True
            warn_of_lost_order(target)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "a MultiNodeCheckpointer can't be copied or pickled: it holds a communicator, and a "
            "copy would write the same files; make another one, with another name or folder"
        )

    def _is_saved(self, target: Any, iteration: int | None, number: int) -> tuple[bool, bool]:
        """Return whether that is saved already, and whether it has to be saved elsewhere."""
        elsewhere = self._directory is None or self._paths_for(target) != self._directory.paths
        of, last = self._saved
        saved = iteration is None and of is not None and of is target and last == number
        return saved and not elsewhere, elsewhere

    def _paths_for(self, target: Any, path: Any = None) -> CheckpointPaths:
        out = getattr(target, "out", None)
        folders = path, self.path, out if isinstance(out, str | os.PathLike) else _DEFAULT_FOLDER
        folder = next(each for each in folders if each is not None)
        return CheckpointPaths(Path(folder).absolute(), self.run_name)

    def _require_equal_settings(self) -> None:
        settings = {
            "name": self.run_name,
            "cp_interval": self.cp_interval,
            "gc_interval": self.gc_interval,
            "background": self._writer is not None,
        }
        self.comm.handshake("create_multi_node_checkpointer", settings.items())


def _write(path: Path, state: dict[str, np.ndarray]) -> FileDigest:
    return atomic_write(path, lambda file: write_npz(file, state))
