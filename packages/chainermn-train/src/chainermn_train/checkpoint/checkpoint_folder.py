"""The folder, or each rank's, in which a run has its checkpoints."""

from __future__ import annotations

import gc
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_together
from ..leaving import grace_seconds
from .atomic_file import TEMPORARY, advised, sync_folder
from .checked_file import DamagedError, Head, RankFile, State, read_rank_file
from .folder_lock import take_lock
from .same_on_all import merge

OPERATION = "checkpoint"
RETRY_SECONDS = 0.1  # a server of files hardly notices


class SaveNumber(NamedTuple):
    """The number of a save; a later one of the same iteration is another attempt."""

    iteration: Any  # an int, or the numbers in the name of a snapshot
    attempt: int = 1

    def __str__(self) -> str:
        if self.attempt == 1:
            return f"{self.iteration}"
        return f"{self.iteration}-{self.attempt}"


FileKey: TypeAlias = tuple[SaveNumber, int]  # and the rank whose file it is


@dataclass(frozen=True)
class RunFiles:
    """A run's files in one folder: ``<name>.<rank>.<iteration>``, or ``…-<attempt>``."""

    path: Path
    name: str

    @property
    def pattern(self) -> str:
        """A regular expression for the names of files, without what ends those unfinished."""
        return rf"{re.escape(self.name)}\.(?P<rank>\d+)\.(?P<iteration>\d+)(?:-(?P<attempt>\d+))?"

    def file(self, number: SaveNumber, rank: int) -> Path:
        """Return the path of a rank's file."""
        return self.path / f"{self.name}.{rank}.{number}"

    def iteration_of(self, match: re.Match[str]) -> Any:
        """Return the iteration that is in the name of a file."""
        return int(match["iteration"])

    def names(self) -> dict[FileKey, str]:
        """Return the names of the files that are there, whoever wrote them."""
        found = {}
        for match in self._matches(self.pattern):
            attempt = int(match.groupdict().get("attempt") or 1)
            number = SaveNumber(self.iteration_of(match), attempt)
            found[number, int(match["rank"])] = match[0]
        return found

    def remove_unfinished(self) -> None:
        """Remove files that were begun; other ranks may do so, too."""
        for match in self._matches(self.pattern + re.escape(TEMPORARY)):
            (self.path / match[0]).unlink(missing_ok=True)

    def _matches(self, pattern: str) -> list[re.Match[str]]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        matches = [re.fullmatch(pattern, name, re.A) for name in names]
        return [match for match in matches if match is not None]


@dataclass
class Found:
    """A checkpoint that was read."""

    iteration: Any
    state: State  # what this rank loads
    # What each rank had, as far as others may need it.
    states: list[State]


@dataclass
class Incomplete:
    """Why a checkpoint can't be loaded."""

    problem: str
    is_half_written: bool  # nothing is wrong but that files are missing


class CheckpointFolder:
    """A run's checkpoints in the ranks' folders; methods are collective but where they say so.

    ``file_of`` returns the number of the file whose state a rank loads, given the rank
    and the number of files.
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        files: RunFiles,
        file_of: Callable[[int, int], int],
    ) -> None:
        """Look at nothing yet; not collective."""
        self._comm = comm
        self._file_of = file_of
        self.files = files
        self.is_begun = False  # whether this job may save
        self._lock: IO[str] | None = None  # rank 0's
        # Names that each rank sees.
        self._listings: list[dict[FileKey, str]] = []
        # Of each save, for each file, the rank that reads and removes it.
        self._readers: dict[SaveNumber, dict[int, int]] = {}
        # Why those can't be loaded that can't, as far as is known.
        self._problems: dict[SaveNumber, str] = {}

    def _scan(self) -> None:
        """Look what there is; change nothing."""
        self._listings = allgather_checked(self._comm, OPERATION, self.files.names)
        self._readers = {}
        for reader, names in enumerate(self._listings):
            for number, rank in names:
                readers = self._readers.setdefault(number, {})
                if rank == reader or rank not in readers:
                    readers[rank] = reader

    def _complete(self) -> list[SaveNumber]:
        """Return the saves that can be loaded, as far as is known, the newest last."""
        return sorted(self._readers.keys() - self._problems.keys())

    def next_number(self, iteration: int) -> SaveNumber:
        """Return the number of a new save, the same on all ranks (not collective)."""
        complete = self._complete()
        if complete and iteration < complete[-1].iteration:
            raise ValueError(
                f"rank {self._comm.rank}: a checkpoint at iteration {iteration} would never be "
                f"used, because {self.files.path} has one of iteration "
                f"{complete[-1].iteration}: call maybe_load before training to go on from there, "
                "remove the files, or give the run another name"
            )
        attempts = [it.attempt for it in self._readers if it.iteration == iteration]
        return SaveNumber(iteration, max(attempts, default=0) + 1)

    def begin(self) -> None:
        """Let this job alone save here, and remove what a killed one was writing.

        ValueError on rank 0, if another job has not ended within CHAINERMN_GRACE.
        """
        comm, path = self._comm, self.files.path
        with raise_together(comm.handshake, OPERATION), advised(path):
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                sync_folder(path.parent)
        began = time.monotonic()
        # Ranks wait together, for a moment at a time: no call of theirs waits for long.
        while allgather_checked(comm, OPERATION, lambda: self._is_locked(began))[0]:
            time.sleep(RETRY_SECONDS)
        self._scan()  # another job may have saved since a load
        has_lock = comm.bcast_obj(self._lock is not None)
        with raise_together(comm.handshake, OPERATION):
            if has_lock:  # otherwise a process that lives may be writing them
                self.files.remove_unfinished()
        self.is_begun = True

    def _is_locked(self, began: float) -> bool:
        """Return whether another job holds the lock; if not, rank 0 takes it (not collective).

        Ranks wait since the time ``began``.
        """
        # There is one already if another rank failed when it was taken.
        if self._comm.rank != 0 or self._lock is not None:
            return False
        path = self.files.path / f"{self.files.name}.lock"
        try:
            with advised(path):
                self._lock = take_lock(path)
        except BlockingIOError:
            # Nothing may refer to its checkpointer but an exception that was handled.
            gc.collect()
            grace = grace_seconds()
            if time.monotonic() - began < grace:
                return True
            raise ValueError(
                f"another job saves under this name: {path.read_text()}, says {path}; it has not "
                f"ended within {grace:g} s (CHAINERMN_GRACE). End it (finalize it, if it is a "
                "checkpointer of this process), or give this run another name or folder"
            ) from None
        if self._lock is not None:
            weakref.finalize(self, self._lock.close)
        return False

    def newest(self) -> tuple[Found | None, str]:
        """Read the newest complete checkpoint; return, in words, which were skipped, too.

        None where nothing was ever saved completely. RuntimeError where something was,
        but nothing is complete now.
        """
        self._scan()
        skipped: list[str] = []
        iterations = set()
        is_lost = False  # whether something else than the end of a job has left files
        for number in sorted(self._readers, reverse=True):
            found = self._read(number)
            if isinstance(found, Found):
                return found, "; ".join(skipped)
            self._problems[number] = found.problem
            iterations.add(number.iteration)
            skipped.append(
                f"iteration {number.iteration} is incomplete: {found.problem}"
            )
            is_lost = is_lost or not found.is_half_written
        if is_lost or len(iterations) > 1:
            raise RuntimeError(
                f"rank {self._comm.rank}: nothing of {self.files.name!r} in {self.files.path} "
                f"is complete: {'; '.join(skipped)}; mend the files, or remove them to start at 0"
            )
        return None, "; ".join(skipped)

    def _read(self, number: SaveNumber) -> Found | Incomplete:
        """Return what this rank needs of a checkpoint, or why it can't be read."""
        comm = self._comm
        readers = self._readers[number]
        wanted = [self._file_of(rank, len(readers)) for rank in range(comm.size)]
        all_read_their_own = all(
            readers.get(file) == rank for rank, file in enumerate(wanted)
        )
        own = wanted[comm.rank]
        mine = [rank for rank, reader in readers.items() if reader == comm.rank]
        files: dict[int, RankFile] = {}

        def read_files() -> dict[int, Head | str]:
            found: dict[int, Head | str] = {}
            for rank in mine:
                try:
                    files[rank] = self._read_file(number, rank)
                    found[rank] = files[rank].head
                except (OSError, DamagedError) as error:
                    found[rank] = f"{error}"
            return found

        rows: dict[int, Head | str] = {}
        for found in allgather_checked(comm, OPERATION, read_files):
            rows.update(found)
        heads = [row for row in rows.values() if isinstance(row, Head)]
        problems = [row for row in rows.values() if isinstance(row, str)]
        size = max((head.size for head in heads), default=0)
        missing = [f"{rank}" for rank in range(size) if rank not in readers]
        is_half_written = bool(missing) and not problems
        if missing:
            some = ", ".join(missing)
            problems.append(f"of {size} files those of ranks {some} are missing")
        if len({head.id for head in heads}) > 1:
            problems.append("its files are of several saves")
        if problems:
            return Incomplete("; ".join(problems), is_half_written)
        for rank in range(size):
            given = files.get(rank)
            if given is not None and all_read_their_own:
                given = given.for_others()
            received = comm.bcast_obj(given, root=readers[rank])
            files.setdefault(rank, received)
        shared = merge(files.values())
        states = [{**shared, **files[rank].own} for rank in range(size)]
        return Found(number.iteration, states[own], states)

    def _read_file(self, number: SaveNumber, rank: int) -> RankFile:
        name = self._listings[self._comm.rank][number, rank]
        file = read_rank_file(self.files.path / name)
        head = file.head
        found = (head.name, head.iteration, head.rank)
        if found != (self.files.name, f"{number.iteration}", rank):
            raise DamagedError(
                f"{name} is what rank {head.rank} wrote at iteration {head.iteration} of "
                f"{head.name!r} under another name"
            )
        return file

    def note_written(self, number: SaveNumber) -> None:
        """Count a save that all ranks have written (not collective)."""
        self._readers[number] = {self._comm.rank: self._comm.rank}

    def expired(self, cp_interval: int, gc_interval: int) -> list[SaveNumber]:
        """Return what isn't needed any more (not collective).

        That is all before the newest ``cp_interval`` complete saves, once they are
        ``gc_interval``, what the newest one takes the place of, and what is incomplete
        before it.
        """
        of_iteration = {number.iteration: number for number in self._complete()}
        kept = list(of_iteration.values())
        if len(kept) - cp_interval >= gc_interval:
            kept = kept[-cp_interval:]
        if not kept:
            return []
        return [it for it in self._readers if it < kept[-1] and it not in kept]

    def remover(self, numbers: Iterable[SaveNumber]) -> Callable[[], None]:
        """Return what removes saves on this rank, in any thread; they count no more, from now on.

        Not collective. A job that is killed meanwhile leaves one that is incomplete.
        """
        files = [
            self.files.file(number, rank)
            for number in sorted(numbers)
            for rank, reader in self._readers.pop(number).items()
            if reader == self._comm.rank
        ]

        def remove() -> None:
            for file in files:
                file.unlink(missing_ok=True)

        return remove

    def clear(self) -> None:
        """Remove all saves; the newest last, so that a job killed here can go on from it.

        Other jobs may save here then.
        """
        newest = set(self._complete()[-1:])
        for numbers in self._readers.keys() - newest, newest:
            with raise_together(self._comm.handshake, OPERATION):
                self.remover(numbers)()
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()
