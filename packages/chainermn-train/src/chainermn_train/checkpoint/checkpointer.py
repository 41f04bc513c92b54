"""The multi-node checkpointer: a job that was killed goes on as if it had not been."""

from __future__ import annotations

import operator
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from chainer.training import Extension, Trainer

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import is_raised_on_all

from ..collective_errors import allgather_checked, raise_together
from ..leaving import leave_when_warned
from ..optimizer_state import Restorer
from ..random_states import load_random_state, random_state
from ..trainer_introspection import updater_of, warn_of_lost_order
from .atomic_file import write_file
from .checked_file import Head, State, write_npz
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles, SaveNumber
from .loading import RANDOM, load, mark_synchronized_if_equal, restore, saved_state
from .same_on_all import names_alike, shard
from .state_dict import require_serializable

_DEFAULT_FOLDER = "result"  # the trainer's own default


class _View(NamedTuple):
    """What a rank knows before a save."""

    iteration: int
    is_saved: bool  # already
    is_begun: bool  # whether this job may save in the folder
    id: str  # that of rank 0 is the checkpoint's


class MultiNodeCheckpointer(Extension):
    """The extension that :func:`create_multi_node_checkpointer` makes.

    ``name``, ``comm``, ``cp_interval``, ``gc_interval``, ``path`` and ``background``
    are as there, where they are checked. Making one is not collective; its methods are,
    but for :meth:`initialize` and :meth:`get_stats`. Copying or
    pickling it raises TypeError.
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
        self._threads = _one_thread()
        # What it does: it writes this save, if any, or removes older ones.
        self._futures: list[Future[None]] = []
        # Not all ranks know yet that it is complete.
        self._written: SaveNumber | None = None
        # What is written in the background. Fresh memory would take longer to fill.
        self._copies: dict[Any, np.ndarray] = {}
        # Names of what was the same on all ranks at the last save.
        self._alike: list[str] | None = None
        self._folder: CheckpointFolder | None = None  # once known where it saves
        self._last = 0  # the iteration saved or loaded last
        self._saved_target: Any = None  # a trainer or updater
        # What training begins with: the state of generators, and optimizers' numbers.
        self._random: str | None = None
        self._restorers: list[Restorer] = []
        self._iterators_checked = False
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
        self._check_iterators(target)
        views = allgather_checked(
            self.comm, OPERATION, lambda: self._view(target, iteration)
        )
        if len({view.iteration for view in views}) > 1:
            numbers = ", ".join(f"{view.iteration}" for view in views)
            raise ValueError(f"ranks save different iterations: {numbers}, by rank")
        if all(view.is_saved for view in views):
            return
        began = time.perf_counter()
        try:
            self.flush()
        finally:  # an error of the save before is raised after this one
            self._save(target, views)
            self._seconds.append(time.perf_counter() - began)

    def _save(self, target: Any, views: list[_View]) -> None:
        comm = self.comm
        iteration = views[0].iteration
        with raise_together(comm.handshake, OPERATION):
            state = saved_state(target)
            state[RANDOM] = np.array(random_state(target))
        folder = self._folder_for(target)
        if not all(view.is_begun for view in views):
            self._require_equal_settings()
            folder.begin()
        self._folder = folder
        number = folder.next_number(iteration)
        head = Head(self.run_name, f"{iteration}", views[0].id, comm.rank, comm.size)
        path = folder.files.file(number, comm.rank)
        self._last = iteration
        self._futures = self._begin_file(folder, path, head, state)
        self._written = number
        if not self.background:
            self.flush()
            self._futures = [self._remove_expired(folder)]
        self._saved_target = None if updater_of(target) is None else target

    def _begin_file(
        self, folder: CheckpointFolder, path: Path, head: Head, state: State
    ) -> list[Future[None]]:
        """Have this rank's file written by the thread, in the background behind removals.

        Ranks expect that what was the same at the last save is so again, and compare
        their states while the file goes to the disk. Otherwise it is written anew.
        """
        comm = self.comm

        def begin(
            alike: list[str], is_wanted: Callable[[], bool]
        ) -> list[Future[None]]:
            arrays = shard(head, state, alike).arrays()
            futures = []
            if self.background:
                arrays = self._copied(arrays)
                futures.append(self._remove_expired(folder))
            is_filled = threading.Event()

            def fill(file: BinaryIO) -> None:
                write_npz(file, arrays)
                is_filled.set()

            writing = self._threads.submit(write_file, path, fill, is_wanted)
            writing.add_done_callback(lambda _: is_filled.set())
            if not self.background:
                is_filled.wait()
            return [*futures, writing]

        if self.background or self._alike is None:
            self._alike = names_alike(comm, state)
            with raise_together(comm.handshake, OPERATION):
                return begin(self._alike, lambda: True)
        alike: list[str] | None = None
        is_right = Future[bool]()
        try:
            writing = begin(self._alike, is_right.result)
            alike = names_alike(comm, state)
        finally:
            is_right.set_result(alike == self._alike)
        if alike == self._alike:
            return writing
        self._alike = alike
        return begin(alike, lambda: True)

    def _copied(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of arrays, in the memory of the last ones where they fit."""
        copies = {}
        for name, array in arrays.items():
            key = (name, array.shape, array.dtype)
            copy = self._copies.get(key)
            if copy is None:
                copy = np.empty(array.shape, array.dtype)
            np.copyto(copy, array)
            copies[key] = copy
        self._copies = copies
        return {name: copy for (name, _, _), copy in copies.items()}

    def _remove_expired(self, folder: CheckpointFolder) -> Future[None]:
        """Have the thread remove what isn't needed any more."""
        expired = folder.expired(self.cp_interval, self.gc_interval)
        return self._threads.submit(folder.remover(expired))

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
        futures = self._futures
        written = self._written
        self._futures = []
        self._written = None

        def finish() -> None:
            wait(futures)
            for future in futures:
                future.result()

        if not futures:
            return
        folder = self._folder
        assert folder is not None
        try:
            allgather_checked(self.comm, OPERATION, finish)
        except BaseException as error:
            if written is not None:
                self._saved_target = None
                # Otherwise other ranks may count it.
                if is_raised_on_all(self.comm.handshake, error):
                    folder.files.file(written, self.comm.rank).unlink(missing_ok=True)
            raise
        if written is not None:
            folder.note_written(written)

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
        self._check_iterators(trainer)
        self.flush()
        self._require_equal_settings()
        with raise_together(self.comm.handshake, OPERATION):
            if isinstance(trainer, Trainer):
                leave_when_warned(
                    trainer, self.comm, self._save_now, self.priority - 100
                )
            require_serializable(trainer)
            folder = self._folder_for(trainer, path)
        found, skipped = folder.newest()
        iteration: int | None = None if found is None else found.iteration
        if skipped:
            self._say(f"{skipped}; training goes on from iteration {iteration or 0}")
        if path is None:  # otherwise it only reads
            self._folder = folder
        if found is None:
            return None
        comm = self.comm
        size = len(found.states)
        with raise_together(comm.handshake, OPERATION):
            loaded = load(trainer, found.state, found.states, comm.rank % size, comm)
            self._restorers = loaded.restorers
            if RANDOM in found.state and size == comm.size:
                self._random = str(found.state[RANDOM])
                load_random_state(trainer, self._random)
        if size != comm.size:
            rest = ""
            if loaded.anew:
                rest = f"; begun anew: {', '.join(loaded.anew)}"
            self._say(f"saved by {size} ranks, goes on with {comm.size}{rest}")
        if not isinstance(trainer, Trainer):
            self._restore()
        mark_synchronized_if_equal(comm, trainer, optimizer)
        self._last = found.iteration
        return iteration

    def _restore(self) -> None:
        words = restore(self._restorers)
        self._restorers = []
        if words:
            self._say(words)

    def _save_now(self, trainer: Any) -> None:
        self.save(trainer)
        self.flush()

    def _say(self, text: str) -> None:
        if self.comm.rank == 0:
            print(
                f"chainermn: checkpoint {self.run_name!r}: {text}",
                file=sys.stderr,
                flush=True,
            )

    def initialize(self, trainer: Any) -> None:
        """Begin with what was saved, whatever was drawn or set since (not collective).

        That is random numbers, and the numbers of optimizers.
        """
        self._handled = sys.exc_info()[1]
        if self._random is not None:
            load_random_state(trainer, self._random)
            self._random = None
        self._restore()

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
        try:
            if not failed and self._folder is not None:
                self.flush()
                if not self._folder.is_begun:
                    self._folder.begin()
                self._folder.clear()
        finally:
            self._futures = []
            self._written = self._folder = None
            self._saved_target = None
            self._copies = {}
            self._threads.shutdown()
            self._threads = _one_thread()

    def _check_iterators(self, target: Any) -> None:
        if not self._iterators_checked and self.comm.rank == 0:
            self._iterators_checked = True
            warn_of_lost_order(target)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "a MultiNodeCheckpointer can't be copied or pickled: it holds a communicator, and a "
            "copy would write the same files; make another one, with another name or folder"
        )

    def _view(self, target: Any, iteration: int | None) -> _View:
        number = iteration
        if number is None:
            number = getattr(updater_of(target), "iteration", self._last + 1)
        number = operator.index(number)
        if number < 0:
            raise ValueError(f"an iteration is not negative, as {number} is")
        is_begun = self._folder_for(target).is_begun
        is_same = self._saved_target is target and self._last == number
        is_saved = is_begun and is_same and iteration is None
        return _View(number, is_saved, is_begun, secrets.token_hex(8))

    def _folder_for(self, target: Any, path: Any = None) -> CheckpointFolder:
        """Return where it is saved: a new object, unless that is where it was saved last."""
        out = getattr(target, "out", None)
        if path is None:
            path = self.path
        if path is None:
            path = out if isinstance(out, str | os.PathLike) else _DEFAULT_FOLDER
        files = RunFiles(Path(path).resolve(), self.run_name)
        if self._folder is not None and self._folder.files == files:
            return self._folder
        return CheckpointFolder(self.comm, files, lambda rank, size: rank % size)

    def _require_equal_settings(self) -> None:
        settings = {
            "name": self.run_name,
            "cp_interval": self.cp_interval,
            "gc_interval": self.gc_interval,
            "background": self.background,
        }
        self.comm.handshake("create_multi_node_checkpointer", settings.items())


def _one_thread() -> ThreadPoolExecutor:
    """Return a thread that calls no MPI; the interpreter waits for it before it ends."""
    return ThreadPoolExecutor(1, thread_name_prefix="chainermn-checkpoint")
