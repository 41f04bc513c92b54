"""What the files of checkpoints are called, and which of them lie in a folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .commit_record import CommitRecord, decode
from .durable import TEMPORARY, contents_of, sync_folder

# What a rank's file is called until its generation has a commit record.
_PENDING = ".new"


@dataclass(frozen=True)
class Listing:
    """Which files of a run lie in a folder."""

    states: dict[int, list[Path]]  # files of any rank, by iteration
    pending: dict[int, list[Path]]  # the same, not committed when they were written
    records: set[int]  # iterations
    unfinished: list[Path]  # files that were being written


@dataclass(frozen=True)
class Generations:
    """The checkpoints of a run in one folder: for each iteration, a file a rank and a record."""

    folder: Path
    name: str

    def state(self, rank: int, iteration: int) -> Path:
        """A rank's file: ``<name>.<rank>.<iteration>``. That it is there shows it was committed."""
        return self.folder / f"{self.name}.{rank}.{iteration}"

    def record(self, iteration: int) -> Path:
        """The commit record, which only rank 0's folder needs to have."""
        return self.folder / f"{self.name}.commit.{iteration}"

    def pending(self, rank: int, iteration: int) -> Path:
        """A rank's file until its record is written; then it is called :meth:`state`.

        The record is what decides: before it is written, the generation isn't there (or is that
        of older files), and from then on it is that of these, whatever they are called yet.
        """
        path = self.state(rank, iteration)
        return path.with_name(path.name + _PENDING)

    def name_committed(self, rank: int, iteration: int) -> None:
        """Give a rank's file its name. Nothing is lost if that doesn't reach the disk."""
        os.replace(self.pending(rank, iteration), self.state(rank, iteration))

    def take_names_off(self, rank: int, iterations: Iterable[int]) -> None:
        """Let those files that a rank has be called as before they were committed."""
        for iteration in iterations:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.state(rank, iteration), self.pending(rank, iteration))
        sync_folder(self.folder)

    def finish_naming(self, rank: int, record: CommitRecord) -> None:
        """Give a rank's file its name if the record is about it; a job may have been killed."""
        path = self.pending(rank, record.iteration)
        if rank >= len(record.files) or not path.exists():
            return
        with path.open("rb") as file:
            meant = contents_of(file) == record.files[rank]
        if meant:
            self.name_committed(rank, record.iteration)
            sync_folder(self.folder)

    def listing(self) -> Listing:
        """The files of this run; none where there is no folder."""
        listing = Listing({}, {}, set(), [])
        suffix = f"((?:{re.escape(_PENDING)})?)((?:{re.escape(TEMPORARY)})?)"
        pattern = re.compile(rf"{re.escape(self.name)}\.(\d+|commit)\.(\d+){suffix}", re.A)
        for path in self._entries():
            if found := pattern.fullmatch(path.name):
                of, iteration, pending, temporary = found.groups()
                if temporary:
                    listing.unfinished.append(path)
                elif of != "commit":
                    files = listing.pending if pending else listing.states
                    files.setdefault(int(iteration), []).append(path)
                elif not pending:
                    listing.records.add(int(iteration))
        return listing

    def _entries(self) -> list[Path]:
        try:
            return [self.folder / name for name in os.listdir(self.folder)]
        except FileNotFoundError:
            return []

    def read_record(self, iteration: int) -> CommitRecord | str:
        """The commit record, or why it is none."""
        path = self.record(iteration)
        try:
            record = decode(path.read_bytes())
            if (record.name, record.iteration) != (self.name, iteration):
                raise ValueError(f"it is that of {record.name!r}, iteration {record.iteration}")
        except (OSError, ValueError) as error:
            return f"the commit record {path.name} is damaged: {_reason(error)}"
        return record

    def damage(self, rank: int, record: CommitRecord) -> str | None:
        """Why a rank's file isn't what the record says; None when it is."""
        path = self.state(rank, record.iteration)
        expected = record.files[rank]
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.size:
                    return f"{path.name} is damaged: {size} bytes instead of {expected.size}"
                if contents_of(file) != expected:
                    return f"{path.name} is damaged: its checksum differs"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} can't be read: {_reason(error)}"
        return None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
