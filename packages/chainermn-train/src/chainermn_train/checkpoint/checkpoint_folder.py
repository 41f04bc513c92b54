"""The folder of a run's checkpoints: one folder for all ranks, or one for each rank."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_together
from .atomic_file import TEMPORARY, advised, sync_folder
from .checked_file import DamagedError, RankFile, State, read_rank_file
from .folder_lock import acquire_lock

OPERATION = "checkpoint"


class SaveNumber(NamedTuple):
    """The number of a save; saves of the same iteration differ in their attempts."""

    iteration: Any  # an int, or the numbers in the name of a snapshot
    attempt: int
    text: str  # the number as it is written in the names of files


@dataclass(frozen=True)
class RunFiles:
    """A run's files in one folder, called ``<name>.<rank>.<iteration>`` or ``…-<attempt>``."""

    path: Path
    name: str

    @property
    def pattern(self) -> str:
        """A regular expression for the names of complete files."""
        number = r"(?P<text>(?P<iteration>\d+)(?:-(?P<attempt>\d+))?)"
        return rf"{re.escape(self.name)}\.(?P<rank>\d+)\.{number}"

    def file(self, number: SaveNumber, rank: int | str) -> Path:
        """Return the path of a rank's file; with "*", a pattern for the files of all ranks."""
        return self.path / f"{self.name}.{rank}.{number.text}"

    def number_of(self, match: re.Match[str]) -> SaveNumber:
        """Return the save's number that a file's name contains."""
        return SaveNumber(
            int(match["iteration"]), int(match["attempt"] or 1), match["text"]
        )

    def listing(self) -> list[tuple[SaveNumber, int]]:
        """Return the save's number and the rank that the name of each complete file contains."""
        return [
            (self.number_of(match), int(match["rank"])) for match in self.matches("")
        ]

    def matches(self, suffix: str) -> Iterator[re.Match[str]]:
        """Match the pattern, and a suffix behind it, with the names of all files."""
        if not self.path.is_dir():
            return
        pattern = self.pattern + re.escape(suffix)
        for name in os.listdir(self.path):
            if match := re.fullmatch(pattern, name, re.A):
                yield match


class _IncompleteError(DamagedError):
    """Files of a checkpoint are missing, and nothing else is wrong with it."""


@dataclass
class Checkpoint:
    """A checkpoint that was read."""

    number: SaveNumber
    # The state of each rank that saved, without arrays that no other rank needs.
    states: list[State]
    own: int  # the index of the state that this rank loads, which has all its arrays
    # The arrays that had the same bits on all ranks.
    shared: State


@dataclass(eq=False)
class CheckpointFolder:
    """A run's checkpoints in the folders of all ranks.

    A method is collective unless its docstring says that it isn't. ``_wanted`` has for
    each rank the number of the file that the rank loads, modulo the number of files.
    """

    _comm: CommunicatorBase
    files: RunFiles
    _wanted: Sequence[int]
    is_begun: bool = False  # whether this job may save
    _lock: IO[str] | None = None  # only on rank 0
    # For each save and each of its files, the rank that reads and removes the file.
    _readers: dict[SaveNumber, dict[int, int]] = field(default_factory=dict)
    # Saves that are known to be incomplete or damaged.
    _incomplete: set[SaveNumber] = field(default_factory=set)

    def _scan(self) -> None:
        """List the files, and choose the rank that reads each file."""
        self._readers = {}
        listings = allgather_checked(self._comm, OPERATION, self.files.listing)
        for reader, listing in enumerate(listings):
            for number, rank in listing:
                readers = self._readers.setdefault(number, {})
                if rank == reader or rank not in readers:
                    readers[rank] = reader

    def _complete(self) -> list[SaveNumber]:
        """Return the saves that may be complete, the newest last (not collective)."""
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
        attempt = max(attempts, default=0) + 1
        text = f"{iteration}"
        if attempt > 1:
            text += f"-{attempt}"
        return SaveNumber(iteration, attempt, text)

    def begin(self) -> None:
        """Lock the run's name for this job, and remove files that a killed job left incomplete.

        Only the first call does so.

        Raises:
            ValueError: on rank 0: another job still saves here after CHAINERMN_GRACE
                seconds.
            PeerError: another rank raised.
        """
        if self.is_begun:
            return
        comm = self._comm
        path = self.files.path
        with raise_together(comm.handshake, OPERATION), advised(path):
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
            # Rank 0 has the lock already if another rank has failed here before.
            if comm.rank == 0 and self._lock is None:
                self._lock = acquire_lock(path / f"{self.files.name}.lock")
                weakref.finalize(self, self._lock.close)
        self._scan()  # another job may have saved since a load
        with raise_together(comm.handshake, OPERATION):
            for match in self.files.matches(TEMPORARY):
                # Other ranks may remove the same files meanwhile.
                (path / match[0]).unlink(missing_ok=True)
        self.is_begun = True

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None if there never was a complete one.

        Rank 0 prints which newer saves were skipped, and why.

        Raises:
            RuntimeError: nothing is complete, although a checkpoint must have been.
        """
        self._scan()
        files = self.files
        found = None
        problems = []
        # Whether a save has other problems than a killed job leaves.
        is_lost = False
        for number in sorted(self._readers, reverse=True):
            try:
                found = self._read(number)
                break
            except DamagedError as error:
                names = files.file(number, "*").name
                problems.append(f"{names} is incomplete: {error}")
                is_lost = is_lost or not isinstance(error, _IncompleteError)
            self._incomplete.add(number)
        text = "; ".join(problems)
        iterations = {number.iteration for number in self._readers}
        if found is None and (is_lost or len(iterations) > 1):
            raise RuntimeError(
                f"rank {self._comm.rank}: nothing of {files.name!r} in {files.path} is complete: "
                f"{text}; restore the files, or remove them to start at 0"
            )
        if problems:
            begin = "0"
            if found is not None:
                begin = found.number.text
            say(self._comm, files.name, f"{text}; training goes on from {begin}")
        return found

    def _read(self, number: SaveNumber) -> Checkpoint:
        """Read a checkpoint: one rank reads each file, and gives other ranks what they need."""
        comm = self._comm
        readers = self._readers[number]
        wanted = [rank % len(readers) for rank in self._wanted]
        files = {}

        def read() -> list[str]:
            """Read the files that this rank reads; return their problems, in words."""
            problems = []
            for rank, reader in readers.items():
                try:
                    if reader == comm.rank:
                        files[rank] = self._read_file(number, rank)
                except (OSError, DamagedError) as error:
                    problems.append(f"{error}")
            return problems

        problems = list(chain(*allgather_checked(comm, OPERATION, read)))
        if problems:
            raise DamagedError("; ".join(problems))
        for rank, reader in readers.items():
            sent = files.get(rank)
            is_loaded_elsewhere = wanted.count(rank) > (wanted[reader] == rank)
            if sent is not None and not is_loaded_elsewhere:
                sent = sent.for_others()
            received = comm.bcast_obj(sent, root=reader)
            files.setdefault(rank, received)
        if len({file.id for file in files.values()}) > 1:
            raise DamagedError("its files are of several saves")
        size = received.size
        missing = set(range(size)).difference(files)
        if missing:
            raise _IncompleteError(
                f"of {size} files those of ranks {sorted(missing)} are missing"
            )
        shared: State = {}
        for file in files.values():
            shared |= file.shared
        states = [{**shared, **files[rank].own} for rank in range(size)]
        return Checkpoint(number, states, wanted[comm.rank], shared)

    def _read_file(self, number: SaveNumber, rank: int) -> RankFile:
        """Return the contents of a file (not collective).

        Raises:
            DamagedError: the file isn't complete, or isn't the file that its name says.
        """
        path = self.files.file(number, rank)
        file = read_rank_file(path)
        if (file.run, file.save, file.rank) != (self.files.name, number.text, rank):
            raise DamagedError(
                f"{path.name} is what rank {file.rank} wrote at iteration {file.save} of "
                f"{file.run!r} under another name"
            )
        return file

    def replace_by(
        self, number: SaveNumber, cp_interval: int, gc_interval: int
    ) -> Callable[[], None]:
        """Count a save that all ranks have written; return a function that removes expired saves.

        The method is not collective. The newest ``cp_interval`` complete saves never
        expire. Older complete saves expire once there are ``gc_interval`` of them.
        Older attempts at an iteration, and incomplete saves before ``number``, expire at
        once.
        """
        self._readers[number] = {self._comm.rank: self._comm.rank}
        of_iteration = {number.iteration: number for number in self._complete()}
        kept = list(of_iteration.values())
        if len(kept) - cp_interval >= gc_interval:
            kept = kept[-cp_interval:]
        expired = [it for it in self._readers if it < number and it not in kept]
        return self._remover(expired)

    def _remover(self, numbers: Iterable[SaveNumber]) -> Callable[[], None]:
        """Forget saves; return a function that removes those of their files that this rank reads.

        The method is not collective. The function may run in any thread. A job that is
        killed meanwhile leaves an incomplete save.
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
        """Remove all saves, and let other jobs save here.

        The newest save is removed last, so that a job that is killed meanwhile can go on
        from it.
        """
        newest = set(self._complete()[-1:])
        for numbers in self._readers.keys() - newest, newest:
            with raise_together(self._comm.handshake, OPERATION):
                self._remover(numbers)()
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()


def say(comm: CommunicatorBase, name: str, text: str) -> None:
    """Print a text on rank 0 that says what the resume of a run does (not collective)."""
    if comm.rank == 0:
        print(f"chainermn: checkpoint {name!r}: {text}", file=sys.stderr, flush=True)
