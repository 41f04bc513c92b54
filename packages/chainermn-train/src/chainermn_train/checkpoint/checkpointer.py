"""The multi-node checkpointer: a job that was killed goes on as if it had not been."""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from chainer.training import Extension, Trainer

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import is_raised_on_all

from ..collective_errors import allgather_checked, raise_together
from ..leaving import leave_when_warned
from ..optimizer_state import Restorer
from ..random_states import load_random_state, random_state
from ..trainer_introspection import updater_of, warn_of_lost_order
from .atomic_file import new_file
from .checked_file import Head, State, write_npz
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles, SaveNumber, say
from .loading import (
    RANDOM,
    load,
    mark_synchronized_if_equal,
    restore,
    saved_state,
)
from .same_on_all import names_alike, rank_file
from .state_dict import require_serializable

_DEFAULT_FOLDER = "result"  # the trainer's own default


class _ChangedError(Exception):
    """What is the same on all ranks isn't what was so at the last save."""


class MultiNodeCheckpointer(Extension):
    """The extension that :func:`create_multi_node_checkpointer` makes.

    ``name``, ``comm``, ``cp_interval``, ``gc_interval``, ``path`` and ``background``
    are as there, where they are checked, so nothing is raised here. To make one is not
    collective. Its methods are, but for :meth:`initialize` and :meth:`get_stats`.
    """

    trigger = (1, "iteration")
    # After all others, also after Chainer's snapshots, so their state is saved.
    priority = -200

    def __init__(
        self,
        name: str,
        comm: CommunicatorBase,
        cp_interval: int,
        gc_interval: int,
        path: str | None,
        background: bool,
    ) -> None:
        # A trainer may change `name`, which is the extension's.
        self.run_name = self.name = name
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path = path
        self.background = background
        # What must be the same on all ranks.
        self._settings = (
            ("name", name),
            ("cp_interval", cp_interval),
            ("gc_interval", gc_interval),
            ("background", background),
        )
        # A thread that calls no MPI; the interpreter waits for it before it ends.
        self._threads = ThreadPoolExecutor(1, "chainermn-checkpoint")
        # What it is to do once a save is over, as it would take the core that copies
        # need, and what it does: it removes old saves, and writes this one, if any.
        self._tasks: list[Callable[[], None]] = []
        self._futures: list[Future[None]] = []
        self._written: SaveNumber | None = None
        # What is written in the background. Fresh memory would take longer to fill.
        self._copies: State = {}
        # Names of what was the same on all ranks at the last save.
        self._alike: set[str] | None = None
        self._folder: CheckpointFolder | None = None  # once known where it saves
        self._last = 0  # the iteration saved or loaded last
        self._saved_target: Any = None  # a trainer or updater
        # What training begins with: the state of generators, and optimizers' numbers.
        self._random: str | None = None
        self._restorers: list[Restorer] = []
        self._handled = sys.exc_info()[1]
        self._seconds: list[float] = []  # that each save took

    def __call__(self, trainer: Any) -> None:
        """Save the trainer; Chainer calls it when the trigger fires (collective)."""
        self.save(trainer)

    def save(self, target: Any, iteration: int | None = None) -> None:
        """Save the state of all ranks (collective).

        A trainer or updater that was saved at its iteration already is not saved again,
        so several triggers may fire at once. Where ``iteration`` is given, the new
        checkpoint takes the place of an older one of that number; a job that is killed
        meanwhile goes on from one or the other.

        Args:
            target: what to save: a trainer, or anything that has Chainer's
                ``serialize``.
            iteration: number of the checkpoint, the same on all ranks. None for that of
                the trainer or updater; for another target, one more than the last.

        Raises:
            TypeError: the target can't be serialized without pickle.
            ValueError: the iteration is older than the newest checkpoint in the folder,
                from which a resume would go on; or it differs between ranks; or another
                checkpointer of this process, not yet finalized, or another job, saves
                by the same name there.
            OSError: a file, which the text names with a remedy, could not be written,
                in the background that of the save before, or an older one not be
                removed. Older checkpoints are as they were.
            PeerError: another rank raised one of these.
        """
        with raise_together(self.comm.handshake, OPERATION) as call:
            number = iteration
            if number is None:
                number = getattr(updater_of(target), "iteration", self._last + 1)
            number = operator.index(number)
            if number < 0:
                raise ValueError(f"an iteration is not negative, as {number} is")
            is_same = self._saved_target is target and self._last == number
            is_saved = is_same and iteration is None
            saved = ("iteration", number), ("is it saved already", is_saved)
            call.signature = (*self._settings, *saved)
            call.payload = secrets.token_bytes(8)
        if is_saved:
            return
        began = time.perf_counter()
        try:
            self._finish()
        finally:  # an error of the save before is raised after this one
            self._save(target, number, call.payloads[0].hex())
            self._seconds.append(time.perf_counter() - began)

    def _save(self, target: Any, iteration: int, identity: str) -> None:
        comm = self.comm
        with raise_together(comm.handshake, OPERATION):
            state = saved_state(target)
            state[RANDOM] = np.array(random_state(target))
        folder = self._folder_of(target)
        if not folder.is_begun:
            folder.begin()
            if comm.rank == 0:
                warn_of_lost_order(target)
        number = folder.next_number(iteration)
        head = Head(self.run_name, f"{iteration}", identity, comm.rank, comm.size)
        path = folder.files.file(number, comm.rank)
        self._last = iteration
        if self.background:
            self._write(path, head, state)
            self._written = number
        else:
            self._count(number, lambda: self._write(path, head, state))
        self._saved_target = None if updater_of(target) is None else target
        self._start()

    def _write(self, path: Path, head: Head, state: State) -> None:
        """Write this rank's file, or have a copy written by the thread (collective).

        Ranks expect that what was the same at the last save is so again, and compare
        while the disk is busy. Otherwise the file is written anew.
        """
        comm = self.comm
        # Those of rank 0, the largest array first.
        names = comm.bcast_obj(sorted(state, key=lambda name: -state[name].nbytes))
        expected = self._alike
        if expected is None or self.background:
            alike = names_alike(comm, state, names)
        else:
            with (
                raise_together(comm.handshake, OPERATION),
                contextlib.suppress(_ChangedError),
                new_file(path) as file,
            ):
                write_npz(file, rank_file(head, state, names, expected).arrays())
                file.flush()
                syncing = self._threads.submit(os.fsync, file.fileno())
                alike = names_alike(comm, state, names)
                syncing.result()
                if alike == expected:
                    return
                raise _ChangedError
        self._alike = alike
        with raise_together(comm.handshake, OPERATION):
            arrays = rank_file(head, state, names, alike).arrays()
            if self.background:
                arrays = self._copied(arrays)
            else:
                _write_new(path, arrays)
        if self.background:
            self._tasks.append(lambda: _write_new(path, arrays))

    def _copied(self, arrays: State) -> State:
        """Return copies of arrays, in the memory of the last ones where they fit."""
        copies = {}
        for name, array in arrays.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
                copy = np.empty(array.shape, array.dtype)
            np.copyto(copy, array)
            copies[name] = copy
        self._copies = copies
        return copies

    def _count(self, number: SaveNumber, finish: Callable[[], Any]) -> None:
        """Count a save once ``finish`` has returned on all ranks (collective).

        The thread removes what expires by it.
        """
        folder = self._folder
        assert folder is not None
        try:
            finish()
        except BaseException as error:
            self._saved_target = None
            # Otherwise other ranks may count it.
            if is_raised_on_all(self.comm.handshake, error):
                folder.files.file(number, self.comm.rank).unlink(missing_ok=True)
            raise
        self._tasks.append(
            folder.replace_by(number, self.cp_interval, self.gc_interval)
        )

    def get_stats(self) -> str:
        """Return in words how long saves have held this rank, in seconds (not collective).

        The numbers follow ``avg=``, ``min=`` and ``max=``. What is written in the
        background counts only where training waits for it.
        """
        if not (times := self._seconds):
            return "no checkpoint has been saved"
        stats = (
            f"avg={sum(times) / len(times):f}, min={min(times):f}, max={max(times):f}"
        )
        return f"seconds that a checkpoint took: {stats}"

    def flush(self) -> None:
        """Wait for what is being written in the background (collective).

        Raises:
            OSError: a file could not be written.
            PeerError: it failed on another rank.
        """
        self._finish()
        self._start()  # what is removed then
        self._finish()

    def _start(self) -> None:
        self._futures += map(self._threads.submit, self._tasks)
        self._tasks = []

    def _finish(self) -> None:
        """Wait for the thread, and count what it has written (collective)."""
        futures = self._futures
        number = self._written
        self._futures = []
        self._written = None

        def finish() -> None:
            wait(futures)
            allgather_checked(
                self.comm, OPERATION, lambda: [each.result() for each in futures]
            )

        if number is not None:
            self._count(number, finish)
        elif futures:
            finish()

    def maybe_load(
        self,
        trainer: Any,
        optimizer: Any = None,
        path: str | os.PathLike[str] | None = None,
    ) -> int | None:
        """Load the newest checkpoint that is complete (collective), on any number of ranks.

        Call it after all extensions have been added to the trainer. Rank 0 prints which
        checkpoints are incomplete, and why.

        Where another number of ranks saved it, all get what was the same on all of
        them. Gradients that were added up are those of rank 0. An iterator with a
        :class:`DistributedOrderSampler` goes on behind the last example that any rank
        has seen; another one is as far in its epoch as those were on average, in a new
        order unless all shared one. Random numbers are drawn anew, and the rest that
        was a rank's own is that of the rank of its number (where there are more, again
        from rank 0 on). Rank 0 prints what begins anew.

        From now on a trainer also obeys a scheduler's warning. After SIGTERM or SIGUSR1
        on any rank all save at the end of the iteration, and leave with exit status 75.
        A second signal ends a rank at once, and so does CHAINERMN_GRACE: seconds since
        the first one, by default 30. What the user's program handles itself is left to
        it.

        Args:
            trainer: what was saved, made in the same way.
            optimizer: a multi-node optimizer whose first update needn't broadcast the
                parameters when they were loaded with the same bits on all ranks. Those
                of a trainer are found without it.
            path: another folder to look in, this time. None for the one where it saves.

        Returns:
            The iteration that training goes on from; None, with nothing changed, where
            nothing was ever saved completely.

        Raises:
            TypeError: ``trainer`` has no ``serialize``.
            RuntimeError: on all ranks: there are checkpoints, but none is complete.
            ValueError: a checkpoint doesn't fit ``trainer``, which may be partly
                loaded.
            PeerError: another rank raised.
        """
        self.flush()
        comm = self.comm
        with raise_together(comm.handshake, OPERATION) as call:
            call.signature = self._settings
            if isinstance(trainer, Trainer):
                leave_when_warned(trainer, comm, self._save_now, self.priority - 100)
            require_serializable(trainer)
            if path is None:
                folder = self._folder_of(trainer)
            else:
                folder = self._folder_at(path)
        found = folder.newest()
        if found is None:
            return None
        with raise_together(comm.handshake, OPERATION):
            change, self._restorers = load(trainer, found.states, found.own, comm)
            if len(found.states) == comm.size:
                self._random = str(found.states[found.own][RANDOM])
                load_random_state(trainer, self._random)
        say(comm, self.run_name, change)
        if not isinstance(trainer, Trainer):
            self._restore(trainer)
        mark_synchronized_if_equal(comm, trainer, optimizer)
        self._last = found.number.iteration
        return self._last

    def _save_now(self, trainer: Any) -> None:
        self.save(trainer)
        self.flush()

    def initialize(self, trainer: Any) -> None:
        """Begin with what was saved, whatever was drawn or set since (not collective).

        That is random numbers, and the numbers of optimizers.
        """
        self._handled = sys.exc_info()[1]
        self._restore(trainer)

    def _restore(self, target: Any) -> None:
        if self._random is not None:
            load_random_state(target, self._random)
        self._random = None
        say(self.comm, self.run_name, restore(self._restorers))
        self._restorers = []

    def finalize(self) -> None:
        """Remove all checkpoints, unless training ended by an exception (collective).

        Without a trainer, call it when all is done.

        Raises:
            OSError: what was written in the background could not be. Then the older
                ones are kept.
            ValueError: another job saves by the same name there.
            PeerError: that happened on another rank.
        """
        failed = sys.exc_info()[1] is not self._handled
        wait(self._futures)
        try:
            if not failed and self._folder is not None:
                self.flush()
                if not self._folder.is_begun:
                    self._folder.begin()
                self._folder.clear()
        finally:
            self._tasks = []
            self._futures = []
            self._written = self._folder = None
            self._saved_target = None
            self._copies = {}

    def _folder_of(self, target: Any) -> CheckpointFolder:
        """Return the folder of the first target until all is finalized."""
        if self._folder is None:
            path = self.path
            if path is None:
                path = getattr(target, "out", None)
            if not isinstance(path, str | os.PathLike):
                path = _DEFAULT_FOLDER
            self._folder = self._folder_at(path)
        return self._folder

    def _folder_at(self, path: str | os.PathLike[str]) -> CheckpointFolder:
        files = RunFiles(Path(path).resolve(), self.run_name)
        return CheckpointFolder(self.comm, files, range(self.comm.size))


def _write_new(path: Path, arrays: State) -> None:
    with new_file(path) as file:
        write_npz(file, arrays)
