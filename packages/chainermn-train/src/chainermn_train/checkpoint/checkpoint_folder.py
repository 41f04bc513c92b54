"""The folder, or each rank's, in which a run has its checkpoints."""

from __future__ import annotations

import gc
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_together
from ..leaving import grace_seconds
from .atomic_file import TEMPORARY, advised, sync_folder
from .checked_file import DamagedError, RankFile, State, read_rank_file
from .folder_lock import take_lock
from .same_on_all import merge

OPERATION = "checkpoint"
RETRY_SECONDS = 0.1  # a server of files hardly notices


class SaveNumber(NamedTuple):
    """The number of a save; a later one of the same iteration is another attempt."""

    iteration: Any  # an int, or the name of a snapshot
    attempt: int = 1

    def __str__(self) -> str:
        if self.attempt == 1:
            return f"{self.iteration}"
        return f"{self.iteration}-{self.attempt}"


@dataclass(frozen=True)
class RunFiles:
    """A run's files in one folder: ``<name>.<rank>.<iteration>``, or ``…-<attempt>``."""

    path: Path
    name: str

    @property
    def pattern(self) -> str:
        """A regular expression for the names of files, without what ends those unfinished."""
        return rf"{re.escape(self.name)}\.(?P<rank>\d+)\.(?P<iteration>\d+)(?:-(?P<attempt>\d+))?"

    def file(self, number: SaveNumber, rank: int | str) -> Path:
        """Return the path of a rank's file; of all ranks' with "*"."""
        return self.path / f"{self.name}.{rank}.{number}"

    def number_of(self, match: re.Match[str]) -> SaveNumber:
        """Return the number that is in the name of a file."""
        return SaveNumber(int(match["iteration"]), int(match["attempt"] or 1))

    def listing(self) -> list[tuple[SaveNumber, int]]:
        """Return saves and ranks whose files are there, whoever wrote them."""
        return [
            (self.number_of(match), int(match["rank"]))
            for match in self._matches(self.pattern)
        ]

    def remove_unfinished(self) -> None:
        """Remove files that were begun; other ranks may do so, too."""
        for match in self._matches(self.pattern + re.escape(TEMPORARY)):
            (self.path / match[0]).unlink(missing_ok=True)

    def _matches(self, pattern: str) -> list[re.Match[str]]:
        if not self.path.is_dir():
            return []
        matches = [re.fullmatch(pattern, name, re.A) for name in os.listdir(self.path)]
        return [match for match in matches if match is not None]


class _IncompleteError(DamagedError):
    """Nothing is wrong with a checkpoint but that files are missing."""


@dataclass
class Checkpoint:
    """A checkpoint that was read."""

    number: SaveNumber
    # What each rank had, as far as others may need it.
    states: list[State]
    own: int  # the number of the one that this rank loads, which is whole


@dataclass(eq=False)
class CheckpointFolder:
    """A run's checkpoints in the ranks' folders; methods are collective but where they say so.

    ``wanted`` has for each rank the number of the file whose state it loads; where there
    are fewer, they count again from 0 on.
    """

    _comm: CommunicatorBase
    files: RunFiles
    _wanted: Sequence[int]
    is_begun: bool = False  # whether this job may save
    _lock: IO[str] | None = None  # rank 0's
    # Of each save, for each file, the rank that reads and removes it.
    _readers: dict[SaveNumber, dict[int, int]] = field(default_factory=dict)
    # Saves that can't be loaded, as far as is known.
    _incomplete: set[SaveNumber] = field(default_factory=set)

    def _scan(self) -> None:
        """Look what there is; change nothing."""
        self._readers = {}
        listings = allgather_checked(self._comm, OPERATION, self.files.listing)
        for reader, listing in enumerate(listings):
            for number, rank in listing:
                readers = self._readers.setdefault(number, {})
                if rank == reader or rank not in readers:
                    readers[rank] = reader

    def _complete(self) -> list[SaveNumber]:
        """Return the saves that can be loaded, as far as is known, the newest last."""
        return sorted(self._readers.keys() - self._incomplete)

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
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
        # Ranks wait together, for a moment at a time: no call of theirs waits for long.
        until = time.monotonic() + grace_seconds()
        while allgather_checked(comm, OPERATION, lambda: self._is_locked(until))[0]:
            time.sleep(RETRY_SECONDS)
        self._scan()  # another job may have saved since a load
        has_lock = comm.bcast_obj(self._lock is not None)
        with raise_together(comm.handshake, OPERATION):
            if has_lock:  # otherwise a process that lives may be writing them
                self.files.remove_unfinished()
        self.is_begun = True

    def _is_locked(self, until: float) -> bool:
        """Return whether another job holds the lock; if not, rank 0 takes it (not collective)."""
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
            if time.monotonic() < until:
                return True
            raise ValueError(
                f"another job saves under this name: {path.read_text()}, says {path}; it has not "
                f"ended within {grace_seconds():g} s (CHAINERMN_GRACE). End it (finalize it, if "
                "it is a checkpointer of this process), or give this run another name or folder"
            ) from None
        if self._lock is not None:
            weakref.finalize(self, self._lock.close)
        return False

    def newest(self) -> Checkpoint | None:
        """Read the newest complete checkpoint; say on rank 0 which were skipped, and why.

        None where nothing was ever saved completely. RuntimeError where something was,
        but nothing is complete now.
        """
        self._scan()
        files = self.files
        found = None
        problems: list[str] = []
        iterations = set()
        is_lost = False  # whether something else than the end of a job has left files
        for number in sorted(self._readers, reverse=True):
            try:
                found = self._read(number)
                break
            except DamagedError as error:
                names = files.file(number, "*").name
                problems.append(f"{names} is incomplete: {error}")
                is_lost = is_lost or not isinstance(error, _IncompleteError)
            self._incomplete.add(number)
            iterations.add(number.iteration)
        text = "; ".join(problems)
        if found is None and (is_lost or len(iterations) > 1):
            raise RuntimeError(
                f"rank {self._comm.rank}: nothing of {files.name!r} in {files.path} is complete: "
                f"{text}; mend the files, or remove them to start at 0"
            )
        if problems:
            begin = 0 if found is None else found.number
            say(self._comm, files.name, f"{text}; training goes on from {begin}")
        return found

    def _read(self, number: SaveNumber) -> Checkpoint:
        """Read a checkpoint, each file on one rank, and give all ranks what they need of it."""
        comm = self._comm
        readers = self._readers[number]
        wanted = [rank % len(readers) for rank in self._wanted]
        with raise_together(comm.handshake, OPERATION):
            own = {
                rank: self._read_file(number, rank)
                for rank, reader in readers.items()
                if reader == comm.rank
            }
        files: dict[int, RankFile] = {}
        problems = []
        for rank, reader in readers.items():
            sent = own.get(rank)
            is_loaded_elsewhere = wanted.count(rank) > (wanted[reader] == rank)
            if isinstance(sent, RankFile) and not is_loaded_elsewhere:
                sent = sent.for_others()
            received = comm.bcast_obj(sent, root=reader)
            file = own.get(rank, received)
            if isinstance(file, str):
                problems.append(file)
            else:
                files[rank] = file
        heads = [file.head for file in files.values()]
        if len({head.id for head in heads}) > 1:
            problems.append("its files are of several saves")
        if problems:
            raise DamagedError("; ".join(problems))
        size = heads[0].size
        missing = [f"{rank}" for rank in range(size) if rank not in files]
        if missing:
            some = ", ".join(missing)
            raise _IncompleteError(f"of {size} files those of ranks {some} are missing")
        shared = merge(files.values())
        states = [{**shared, **files[rank].own} for rank in range(size)]
        return Checkpoint(number, states, wanted[comm.rank])

    def _read_file(self, number: SaveNumber, rank: int) -> RankFile | str:
        """Return a file's contents, or in words why it can't be read."""
        path = self.files.file(number, rank)
        try:
            file = read_rank_file(path)
        except (OSError, DamagedError) as error:
            return f"{error}"
        head = file.head
        found = (head.name, head.iteration, head.rank)
        if found != (self.files.name, f"{number.iteration}", rank):
            return (
                f"{path.name} is what rank {head.rank} wrote at iteration {head.iteration} of "
                f"{head.name!r} under another name"
            )
        return file

    def replace_by(
        self, number: SaveNumber, cp_interval: int, gc_interval: int
    ) -> Callable[[], None]:
        """Count a save that all ranks have written; return what removes what isn't needed now.

        Not collective. That is all before the newest ``cp_interval`` complete saves,
        once they are ``gc_interval``, what the newest one takes the place of, and what
        is incomplete before it.
        """
        self._readers[number] = {self._comm.rank: self._comm.rank}
        of_iteration = {number.iteration: number for number in self._complete()}
        kept = list(of_iteration.values())
        if len(kept) - cp_interval >= gc_interval:
            kept = kept[-cp_interval:]
        expired = [it for it in self._readers if it < number and it not in kept]
        return self._remover(expired)

    def _remover(self, numbers: Iterable[SaveNumber]) -> Callable[[], None]:
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
                self._remover(numbers)()
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()


def say(comm: CommunicatorBase, name: str, text: str) -> None:
    """Print on rank 0 what a resume of a run does (not collective)."""
    if comm.rank == 0 and text:
        print(f"chainermn: checkpoint {name!r}: {text}", file=sys.stderr, flush=True)
