"""What the files of checkpoints are called, and which of them lie in a folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .commit_record import CommitRecord, decode
from .durable import TEMPORARY, contents_of, sync_folder

# What a file is called that waits to take the place of one of the same iteration.
_REPLACEMENT = ".new"


@dataclass(frozen=True)
class Listing:
    """Which files of a run lie in a folder."""

    states: dict[int, list[Path]]  # files of any rank, by iteration
    records: set[int]  # iterations
    leftovers: list[Path]  # files that were being written, or were to replace others


@dataclass(frozen=True)
class Generations:
    """The checkpoints of a run in one folder: for each iteration, a file a rank and a record."""

    folder: Path
    name: str

    def state(self, rank: int, iteration: int) -> Path:
        """A rank's file: ``<name>.<rank>.<iteration>``."""
        return self.folder / f"{self.name}.{rank}.{iteration}"

    def record(self, iteration: int) -> Path:
        """The commit record, which only rank 0's folder needs to have."""
        return self.folder / f"{self.name}.commit.{iteration}"

    def replacement(self, rank: int, iteration: int) -> Path:
        """A rank's file that takes the place of :meth:`state` once its record is written.

        The record is what decides: before it is replaced, the old files are the generation,
        and from then on the new ones, whatever they are called yet.
        """
        path = self.state(rank, iteration)
        return path.with_name(path.name + _REPLACEMENT)

    def finish_replacing(self, rank: int, record: CommitRecord) -> None:
        """Give a rank's file its name if the record is about it; a job may have been killed."""
        path = self.replacement(rank, record.iteration)
        if rank >= len(record.files) or not path.exists():
            return
        with path.open("rb") as file:
            meant = contents_of(file) == record.files[rank]
        if meant:
            os.replace(path, self.state(rank, record.iteration))
            sync_folder(self.folder)

    def listing(self) -> Listing:
        """The files of this run; none where there is no folder."""
        listing = Listing({}, set(), [])
        unfinished = f"(?:{re.escape(_REPLACEMENT)})?(?:{re.escape(TEMPORARY)})?"
        pattern = re.compile(rf"{re.escape(self.name)}\.(\d+|commit)\.(\d+)({unfinished})", re.A)
        for path in self._entries():
            if found := pattern.fullmatch(path.name):
                of, iteration, temporary = found.groups()
                if temporary:
                    listing.leftovers.append(path)
                elif of == "commit":
                    listing.records.add(int(iteration))
                else:
                    listing.states.setdefault(int(iteration), []).append(path)
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
