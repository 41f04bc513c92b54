"""The folder that a job saves its checkpoints in: commits them, and removes those not needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chainermn_comm import CommunicatorBase

from .agreement import call_or_raise
from .commit_record import CommitRecord
from .durable import Contents, sync_folder, write_durably
from .generations import Generations
from .resume import survey, sweep


class Store:
    """The generations in one folder (that of rank 0 has the records); methods are collective.

    Attributes:
        generations: what the files are called; each rank may have its own folder.
        committed: iterations that have a record.
        damaged: those of them that were found damaged.
    """

    def __init__(
        self, comm: CommunicatorBase, generations: Generations, damaged: Iterable[int] = ()
    ) -> None:
        """Make the folder, or find what is there and remove what a killed job left half done."""
        self._comm = comm
        self.generations = generations
        call_or_raise(comm, lambda: _make(generations.folder))
        found = survey(comm, generations)
        self.committed = set(found.records)
        self.damaged = self.committed.intersection(damaged)
        sweep(comm, generations, found, max(self.committed - self.damaged, default=None))

    def path_for(self, iteration: int) -> Path:
        """What this rank's file of a new generation is called until it is committed.

        Where there is an older file of that iteration, it stays as it is until then.

        Raises:
            ValueError: there is a newer one, on all ranks.
        """
        newest = max(self.committed - self.damaged, default=0)
        if iteration < newest:
            raise ValueError(
                f"rank {self._comm.rank}: a checkpoint at iteration {iteration} would never be "
                f"used, because {self.generations.folder} has one of iteration {newest}: call "
                "maybe_load before training to go on from there, remove the files, or give the "
                "run another name"
            )
        return self.generations.pending(self._comm.rank, iteration)

    def commit(self, iteration: int, written: Callable[[], Contents]) -> None:
        """Write the record once every rank's file is on the disk; then the files get their names.

        Args:
            iteration: of the generation.
            written: writes this rank's file, or waits for it.

        Raises:
            Exception: whatever failed; nothing of the generation is left then, and one that it
                was to replace is as it was.
        """
        rank, replaces = self._comm.rank, iteration in self.committed
        try:
            files = call_or_raise(self._comm, written)
            record = CommitRecord(self.generations.name, iteration, files)
            self._at_root(lambda: _write_record(self.generations.record(iteration), record))
        except BaseException:
            if replaces:
                self._settle(iteration)
            else:
                with contextlib.suppress(OSError):
                    self._remove_records([iteration])
                    self.generations.pending(rank, iteration).unlink(missing_ok=True)
            raise
        self.committed.add(iteration)
        self.damaged.discard(iteration)
        call_or_raise(self._comm, lambda: self.generations.name_committed(rank, iteration))

    def _settle(self, iteration: int) -> None:
        """After a failure, leave the generation that the record is about, old or new."""
        with contextlib.suppress(Exception):
            survey(self._comm, self.generations)  # the new record may be there all the same
            self.generations.pending(self._comm.rank, iteration).unlink(missing_ok=True)

    def outdated(self, cp_interval: int, gc_interval: int) -> list[int]:
        """All but the newest ``cp_interval``, once these are ``gc_interval`` (not collective)."""
        whole = sorted(self.committed - self.damaged)
        if len(whole) - cp_interval < gc_interval:
            return []
        return [each for each in self.committed if each < whole[-cp_interval]]

    def clear(self) -> None:
        """Remove all generations; the newest last, so that a job killed here can go on from it."""
        # A file that has its name and no record would look like one whose record was lost.
        rank, all_of_them = self._comm.rank, sorted(self.committed)
        call_or_raise(self._comm, lambda: self.generations.take_names_off(rank, all_of_them))
        newest = {max(self.committed - self.damaged, default=0)}
        self.remove(self.committed - newest)
        self.remove(self.committed & newest)

    def remove(self, iterations: Iterable[int]) -> None:
        """Remove generations: their records first, so that none is left without its files."""
        iterations = sorted(iterations)
        if not iterations:
            return
        self._at_root(lambda: self._remove_records(iterations))
        call_or_raise(self._comm, lambda: self._remove_files(iterations))
        self._forget(iterations)

    def removal(self, iterations: Iterable[int]) -> Callable[[], None]:
        """What removes generations on this rank, in any thread (not collective).

        Only for outdated ones: a job that is killed meanwhile may leave a record without its
        files, for which nobody asks while there is a newer generation.
        """
        iterations = sorted(iterations)
        self._forget(iterations)

        def remove() -> None:
            if iterations:
                self._remove_records(iterations)
                self._remove_files(iterations)

        return remove

    def _forget(self, iterations: Iterable[int]) -> None:
        self.committed.difference_update(iterations)
        self.damaged.difference_update(iterations)

    def _remove_records(self, iterations: Iterable[int]) -> None:
        if self._comm.rank == 0:
            _unlink(map(self.generations.record, iterations))
            sync_folder(self.generations.folder)

    def _remove_files(self, iterations: Iterable[int]) -> None:
        for name in self.generations.state, self.generations.pending:
            _unlink(name(self._comm.rank, iteration) for iteration in iterations)

    def _at_root(self, action: Callable[[], Any]) -> None:
        """Do something on rank 0 before any rank goes on."""
        call_or_raise(self._comm, action if self._comm.rank == 0 else lambda: None)


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def _write_record(path: Path, record: CommitRecord) -> None:
    write_durably(path, lambda file: file.write(record.encode()))


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
