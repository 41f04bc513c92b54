"""The multi-node checkpointer: a job that was killed goes on as if it had not been."""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from chainer.training import Extension, Trainer

from chainermn_comm import CommunicatorBase, PeerError
from chainermn_comm.errors import is_raised_on_all

from ..collective_errors import allgather_checked, raise_together
from ..leaving import grace_seconds, leave_when_warned
from ..random_states import load_random_state, random_state
from ..trainer_introspection import updater_of, warn_of_lost_order
from .background_writer import BackgroundWriter
from .dealing import deal, same_on_all
from .loading import PLACES, RANDOM, load, mark_synchronized_if_equal, places
from .shards import Head, State, begin_arrays, encode
from .state_dict import state_dict
from .store import OPERATION, Folder, Save, Store, register_writer, writers

_DEFAULT_FOLDER = "result"  # the trainer's own default


class MultiNodeCheckpointer(Extension):
    """The extension that :func:`create_multi_node_checkpointer` makes.

    ``name``, ``comm``, ``cp_interval``, ``gc_interval``, ``path`` and ``background``
    are as there, where they are checked. Making one is not collective; its methods are,
    but for :meth:`initialize`, :meth:`get_stats` and :meth:`on_error`. Copying or
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
        self._writer = BackgroundWriter()
        # In the background: a save, or the removal of older ones.
        self._writing: tuple[Save | None, Future[None]] | None = None
        # Names of what was the same on all ranks at a save.
        self._same: list[str] | None = None
        self._store: Store | None = None  # once known where it saves
        self._last = 0  # the iteration saved or loaded last
        # The trainer or updater, and its iteration.
        self._saved: tuple[Any, int] = (None, 0)
        # State of the generators to begin training with.
        self._random: str | None = None
        self._iterators_checked = False
        self._failed = False
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
        with raise_together(self.comm.handshake, OPERATION) as call:
            own = getattr(updater_of(target), "iteration", self._last + 1)
            number = operator.index(own if iteration is None else iteration)
            if number < 0:
                raise ValueError(f"an iteration is not negative, as {number} is")
            call.signature = (("iteration", number),)
        views = allgather_checked(
            self.comm,
            OPERATION,
            lambda: (*self._is_saved(target, iteration, number), secrets.token_hex(8)),
        )
        if all(saved for saved, *_ in views):
            return
        began, failure = time.perf_counter(), list[Exception]()
        try:
            self.flush()
        except (
            OSError,
            PeerError,
        ) as error:  # of the save before: raised once this one is begun
            failure.append(error)
        with raise_together(self.comm.handshake, OPERATION):
            register_writer(self, self._folder_for(target))
            state = state_dict(target)
            state[RANDOM], state[PLACES] = (
                np.array(random_state(target)),
                places(target),
            )
        if any(elsewhere for _, elsewhere, _ in views):
            self._require_equal_settings()
            self._store = self._store_for(self._folder_for(target))
            self._store.begin(grace_seconds())
        store = self._store
        assert store is not None
        save = store.next_save(number)
        head = Head(self.run_name, number, views[0][2], self.comm.rank, self.comm.size)
        self._last = number
        if self.background:
            remove = store.remover(store.expired(self.cp_interval, self.gc_interval))
            arrays = encode(head, deal(self.comm, state, same_on_all(self.comm, state)))

            def remove_and_write(copies: dict[str, np.ndarray]) -> None:
                remove()
                with begin_arrays(
                    store.folder.file(save, head.rank), copies
                ) as complete:
                    complete()

            self._writing = save, self._writer.start(remove_and_write, arrays)
        else:
            self._write(store, save, head, state)
            remove = store.remover(store.expired(self.cp_interval, self.gc_interval))
            self._writing = None, self._writer.start(lambda _: remove(), {})
        self._saved = (target if updater_of(target) is not None else None), number
        self._seconds.append(time.perf_counter() - began)
        if failure:
            raise failure.pop()

    def _write(self, store: Store, save: Save, head: Head, state: State) -> None:
        """Write a save. Ranks compare their states while what they wrote goes to the disk."""
        comm, path = self.comm, store.folder.file(save, head.rank)
        found = same_on_all(comm, state) if self._same is None else None
        while True:
            # What was the same at the last save is so again, or all is written anew.
            same = self._same if found is None else found
            with contextlib.ExitStack() as stack:
                with raise_together(comm.handshake, OPERATION):
                    arrays = encode(head, deal(comm, state, same or ()))
                    complete = stack.enter_context(begin_arrays(path, arrays))
                found = same_on_all(comm, state) if found is None else found
                if found == same:
                    self._same = same
                    self._end_save(save, complete)
                    return

    def _end_save(self, save: Save, write: Callable[[], None]) -> None:
        """Count a save once all ranks have written it; where one couldn't, nothing of it stays."""
        store = self._store
        assert store is not None
        try:
            allgather_checked(self.comm, OPERATION, write)
        except BaseException as error:
            if is_raised_on_all(self.comm.handshake, error):  # else others may count it
                with contextlib.suppress(OSError):
                    store.folder.file(save, self.comm.rank).unlink(missing_ok=True)
            raise
        store.note_written(save)

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
        if self._writing is not None:
            (save, future), self._writing = self._writing, None
            if save is None:
                allgather_checked(self.comm, OPERATION, future.result)
                return
            saved, self._saved = self._saved, (None, 0)  # unless it could be written
            self._end_save(save, future.result)
            self._saved = saved

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
            if not callable(getattr(trainer, "serialize", None)):
                raise TypeError(
                    "a checkpoint is loaded into what Chainer can serialize, not "
                    f"{type(trainer).__name__}: give what was saved, made in the same way"
                )
            folder = self._folder_for(trainer, path)
            here = path is None and writers.get(folder, self) is self
        writable = allgather_checked(self.comm, OPERATION, lambda: here)
        store = self._store_for(folder)
        save, states, skipped = store.newest()
        iteration: int | None = None if save is None else save.iteration
        if skipped:
            self._say(f"{skipped}; training goes on from iteration {iteration or 0}")
        if all(writable):  # otherwise it only reads
            self._store = store
        if iteration is None:
            return None
        comm, size = self.comm, len(states)
        own = states[comm.rank % size]
        with raise_together(comm.handshake, OPERATION):
            anew = load(trainer, states, size, comm.rank % size, comm)
            if RANDOM in own and size == comm.size:
                self._random = str(own[RANDOM])
                load_random_state(trainer, self._random)
        if size != comm.size:
            rest = f"; begun anew: {', '.join(anew)}" if anew else ""
            self._say(f"saved by {size} ranks, goes on with {comm.size}{rest}")
        mark_synchronized_if_equal(comm, trainer, optimizer)
        self._last = iteration
        return iteration

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
                ones are kept.
            ValueError: another job saves by the same name there.
            PeerError: that happened on another rank.
        """
        failed = self._failed or sys.exc_info()[1] is not self._handled
        try:
            if not failed and self._store is not None:
                self.flush()
                if not self._store.is_begun:
                    self._store.begin(grace_seconds())
                self._store.clear()
        finally:
            self._writing = self._store = None
            self._saved = None, 0
            for folder in [each for each, writer in writers.items() if writer is self]:
                del writers[folder]
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

    def _is_saved(
        self, target: Any, iteration: int | None, number: int
    ) -> tuple[bool, bool]:
        """Return whether that is saved already, and whether it has to be saved elsewhere."""
        store = self._store_for(self._folder_for(target))
        elsewhere = not store.is_begun
        of, last = self._saved
        saved = iteration is None and of is not None and of is target and last == number
        return saved and not elsewhere, elsewhere

    def _folder_for(self, target: Any, path: Any = None) -> Folder:
        out = getattr(target, "out", None)
        folders = (
            path,
            self.path,
            out if isinstance(out, str | os.PathLike) else _DEFAULT_FOLDER,
        )
        folder = next(each for each in folders if each is not None)
        return Folder(Path(folder).resolve(), self.run_name)

    def _store_for(self, folder: Folder) -> Store:
        """Return the folder's store, which is a new one unless it is that of the last save."""
        if self._store is None or self._store.folder != folder:
            return Store(self.comm, folder)
        return self._store

    def _require_equal_settings(self) -> None:
        settings = {
            "name": self.run_name,
            "cp_interval": self.cp_interval,
            "gc_interval": self.gc_interval,
            "background": self.background,
        }
        self.comm.handshake("create_multi_node_checkpointer", settings.items())
