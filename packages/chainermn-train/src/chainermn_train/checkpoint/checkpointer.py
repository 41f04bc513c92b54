"""The multi-node checkpointer: a job that was killed goes on as if it had not been killed."""

from __future__ import annotations

import operator
import os
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from chainer.training import Extension, Trainer

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import is_raised_on_all

from ..collective_errors import raise_together
from ..leaving import leave_when_warned
from ..optimizer_state import Restorer
from ..random_states import random_state
from ..trainer_introspection import updater_of, warn_of_lost_order
from .atomic_file import new_file
from .checked_file import RankFile, State, write_file, write_npz
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles, SaveNumber
from .loading import RANDOM, load, restore, saved_state, whole_states
from .same_on_all import by_size, divide, names_alike
from .state_dict import require_serializable

_DEFAULT_FOLDER = "result"  # the trainer's own default


class MultiNodeCheckpointer(Extension):
    """The extension that :func:`create_multi_node_checkpointer` makes.

    ``name``, ``comm``, ``cp_interval``, ``gc_interval``, ``path`` and ``background``
    are the arguments of that function. The function checks them, so the class raises
    nothing. Making a checkpointer is not collective. All methods are collective but
    :meth:`initialize` and :meth:`get_stats`.
    """

    trigger = (1, "iteration")
    # The checkpointer runs after all other extensions, also after Chainer's snapshots,
    # so that it saves their latest state.
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
        # A trainer may change `name`, which is also the name of the extension.
        self.run_name = self.name = name
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path = path
        self.background = background
        # Settings that must be the same on all ranks.
        self._settings = {
            "name": name,
            "cp_interval": cp_interval,
            "gc_interval": gc_interval,
            "background": background,
        }
        # A thread without MPI calls. The interpreter waits for this thread before it
        # ends.
        self._threads = ThreadPoolExecutor(1, "chainermn-checkpoint")
        # Names of the arrays that were the same on all ranks at the last save or load.
        self._alike: list[str] = []
        self._last = 0  # the iteration saved or loaded last
        # Functions that set the state with which training begins.
        self._restorers: list[Restorer] = []
        self._handled = sys.exc_info()[1]
        self._seconds: list[float] = []  # how long each save took
        self._reset()

    def _reset(self) -> None:
        """Forget the folder, and the work that is left to do there."""
        self._folder: CheckpointFolder | None = None  # see `_folder_of`
        # The tasks of the thread: to remove expired saves, and in the background to
        # write this save. They begin when the call of `save` ends: if they began
        # earlier, they would take the core that the copies need.
        self._tasks: list[Callable[[], None]] = []
        self._futures: list[Future[None]] = []
        # The save that the thread writes, until it is counted.
        self._written: SaveNumber | None = None
        # The arrays that the thread writes. The next save fills the same memory again,
        # because fresh memory takes longer to fill.
        self._copies: State = {}

    def __call__(self, trainer: Any) -> None:
        """Save the trainer; Chainer calls it when the trigger fires (collective)."""
        self.save(trainer)

    def save(self, target: Any, iteration: int | None = None) -> None:
        """Save the state of all ranks (collective).

        The new checkpoint replaces an older one of the same iteration. A job that is
        killed meanwhile goes on from one of the two.

        Args:
            target: a trainer, or another object that has Chainer's ``serialize``.
            iteration: number of the checkpoint, the same on all ranks. None for the
                iteration of the trainer or updater; for another target, one more than
                the last number.

        Raises:
            TypeError: the target can't be serialized without pickle.
            ValueError: the iteration is older than the newest checkpoint in the folder,
                from which a resume would go on; or it differs between ranks; or another
                checkpointer of this process, not yet finalized, or another job, saves
                by the same name there.
            OSError: a file (in the background, a file of the previous save) could not be
                written, or an older file could not be removed. The text names the file
                and a remedy. Older checkpoints are unchanged.
            PeerError: another rank raised one of these.
        """
        with raise_together(self.comm.handshake, OPERATION) as call:
            number = iteration
            if number is None:
                number = getattr(updater_of(target), "iteration", self._last + 1)
            number = operator.index(number)
            if number < 0:
                raise ValueError(f"an iteration is not negative, as {number} is")
            call.signature = {**self._settings, "iteration": number}.items()
            call.payload = secrets.token_bytes(8)
        began = time.perf_counter()
        try:
            self._finish()
        finally:  # an error of the previous save is raised after this save
            self._save(target, number, call.payloads[0].hex())
            self._seconds.append(time.perf_counter() - began)

    def _save(self, target: Any, iteration: int, identity: str) -> None:
        comm = self.comm
        with whole_states(comm, target):
            state = saved_state(target)
            state[RANDOM] = np.array(random_state(target))
        folder = self._folder_of(target)
        if not folder.is_begun and comm.rank == 0:
            warn_of_lost_order(target)
        folder.begin()
        number = folder.next_number(iteration)
        self._last = iteration
        write = partial(self._write, folder.files, number, identity, state)
        if self.background:
            write()
            self._written = number
        else:
            self._count(number, write)
        self._start()

    def _write(
        self, files: RunFiles, number: SaveNumber, identity: str, state: State
    ) -> None:
        """Write this rank's file, or copy the arrays for the thread to write (collective)."""
        comm = self.comm
        path = files.file(number, comm.rank)

        def arrays() -> State:
            shared, own = divide(comm, state, self._alike)
            return RankFile(
                files.name, number.text, identity, comm.rank, comm.size, shared, own
            ).arrays()

        # Ranks expect that the same arrays as at the last save or load are equal again,
        # and compare while the disk is busy. At the first save of a new run, and for the
        # thread, they must compare before.
        if self.background or not self._alike:
            self._alike = names_alike(comm, state)
        with raise_together(comm.handshake, OPERATION):
            if self.background:
                copies = self._copied(arrays())
                self._tasks.append(lambda: write_file(path, copies))
                return
            with new_file(path) as file:
                write_npz(file, arrays())
                expected = self._alike
                file.flush()
                syncing = self._threads.submit(os.fsync, file.fileno())
                self._alike = names_alike(comm, state)
                syncing.result()
                if self._alike != expected:
                    file.seek(0)
                    file.truncate()
                    write_npz(file, arrays())

    def _copied(self, arrays: State) -> State:
        """Return copies of arrays; a copy takes the memory of the last copy if that fits."""
        copies = {}
        for name, array in arrays.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
                copy = np.empty_like(array)
            np.copyto(copy, array)
            copies[name] = copy
        self._copies = copies
        return copies

    def _count(self, number: SaveNumber, finish: Callable[[], Any]) -> None:
        """Call ``finish``, and count the save if all ranks' calls return (collective).

        The thread gets the task to remove the saves that have expired.
        """
        folder = self._folder
        assert folder is not None
        try:
            finish()
        except BaseException as error:
            # After an error of this rank alone, other ranks may have counted the save.
            if is_raised_on_all(self.comm.handshake, error):
                folder.files.file(number, self.comm.rank).unlink(missing_ok=True)
            raise
        self._tasks.append(
            folder.replace_by(number, self.cp_interval, self.gc_interval)
        )

    def get_stats(self) -> str:
        """Return a text that says how long saves have held this rank (not collective).

        The text has seconds after ``avg=``, ``min=`` and ``max=``. Time in which the
        thread writes counts only if training waits for the thread.
        """
        times = self._seconds
        if not times:
            return "no checkpoint has been saved"
        return (
            f"seconds that a checkpoint took: avg={sum(times) / len(times):f}, "
            f"min={min(times):f}, max={max(times):f}"
        )

    def flush(self) -> None:
        """Wait until the thread has written the last save and removed expired ones (collective).

        Raises:
            OSError: a file could not be written or removed.
            PeerError: another rank raised this error.
        """
        self._finish()
        self._start()  # the thread removes the saves that have expired
        self._finish()

    def _start(self) -> None:
        self._futures += map(self._threads.submit, self._tasks)
        self._tasks = []

    def _finish(self) -> None:
        """Wait for the thread, and count the save that the thread has written (collective)."""
        futures = self._futures
        number = self._written
        self._futures = []
        self._written = None

        def finish() -> None:
            with raise_together(self.comm.handshake, OPERATION):
                wait(futures)
                for future in futures:
                    future.result()

        if number is None:
            finish()
        else:
            self._count(number, finish)

    def maybe_load(
        self,
        trainer: Any,
        optimizer: Any = None,
        path: str | os.PathLike[str] | None = None,
    ) -> int | None:
        """Load the newest checkpoint that is complete (collective), on any number of ranks.

        Call this method after all extensions have been added to the trainer. Rank 0
        prints which checkpoints are incomplete, and why.

        If another number of ranks saved the checkpoint, every rank gets the state that
        was the same on all of them. Gradients that ``accumulate_steps`` had added up
        are dropped. An iterator with a :class:`DistributedOrderSampler` goes on behind
        the last example that any rank has seen. Any other iterator is as far in its epoch
        as rank 0's was, in a new order unless ranks share the iterator. Random numbers are
        drawn anew. Each rank gets all other state from the rank that had its number; if
        there are more ranks now, they count again from rank 0. Rank 0 prints which state
        begins anew. A model whose parameters differed between ranks, as one that ranks hold
        in parts, needs as many ranks as saved it.

        From now on a trainer also obeys a scheduler's warning. After SIGTERM or SIGUSR1
        on any rank all ranks save at the end of the iteration, and leave with exit
        status 75. A second signal ends a rank at once, and so does CHAINERMN_GRACE:
        seconds since the first signal, by default 30. Signals that the user's program
        handles itself are left to the program.

        Args:
            trainer: the object to load, made as the one that was saved.
            optimizer: a multi-node optimizer. Its first update needn't broadcast rank
                0's state if all ranks of the optimizer give this argument here and have
                the same bits now. A trainer's optimizers are found without it.
            path: another folder to look in, this time. None for the folder of saves.

        Returns:
            The iteration from which training goes on. None, with nothing changed, if
            there never was a complete checkpoint.

        Raises:
            TypeError: ``trainer`` has no ``serialize``.
            RuntimeError: on all ranks: there are checkpoints, but none is complete.
            ValueError: the checkpoint doesn't fit ``trainer``, which may be partly
                loaded.
            PeerError: another rank raised.
        """
        self.flush()
        comm = self.comm
        with raise_together(comm.handshake, OPERATION) as call:
            call.signature = self._settings.items()
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
        self._restorers = load(
            comm,
            self.run_name,
            trainer,
            found.states,
            found.own,
            found.shared,
            optimizer,
        )
        self._alike = by_size(found.shared)
        if not isinstance(trainer, Trainer):
            self._restore()
        self._last = found.number.iteration
        return self._last

    def _save_now(self, trainer: Any) -> None:
        self.save(trainer)
        self.flush()

    def initialize(self, trainer: Any) -> None:
        """Set random generators and optimizers' numbers as they were saved (not collective).

        Since the load, the script and other extensions may have drawn random numbers and
        set other values.
        """
        self._handled = sys.exc_info()[1]
        self._restore()

    def _restore(self) -> None:
        restore(self.comm, self.run_name, self._restorers)
        self._restorers = []

    def finalize(self) -> None:
        """Remove all checkpoints, unless training ended by an exception (collective).

        Without a trainer, call this method when training has ended.

        Raises:
            OSError: the thread could not write a file. Then the older checkpoints are
                kept.
            ValueError: another job saves by the same name there.
            PeerError: another rank raised one of these.
        """
        failed = sys.exc_info()[1] is not self._handled
        wait(self._futures)
        try:
            if not failed and self._folder is not None:
                self.flush()
                self._folder.begin()
                self._folder.clear()
        finally:
            self._reset()

    def _folder_of(self, target: Any) -> CheckpointFolder:
        """Return the folder; the first target since :meth:`finalize` decides on it."""
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
