"""The folder, or each rank's, in which a run has its checkpoints."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_together
from .atomic_file import TEMPORARY, advised, sync_folder
from .dealing import put_together
from .folder_lock import take_lock
from .shards import DamagedError, Head, Shard, State, is_ours, read_head, read_shard

OPERATION = "checkpoint"
RETRY_SECONDS = 0.1  # a server of files hardly notices


class Save(NamedTuple):
    """A save of a run at an iteration; a later one of the same iteration is another attempt."""

    iteration: Any  # an int, or the numbers in the name of a snapshot
    attempt: int = 1

    def __str__(self) -> str:
        return (
            f"{self.iteration}"
            if self.attempt == 1
            else f"{self.iteration}-{self.attempt}"
        )


@dataclass(frozen=True)
class Folder:
    """A run's files in one folder: ``<name>.<rank>.<iteration>``, or ``…-<attempt>``."""

    path: Path
    name: str

    @property
    def pattern(self) -> str:
        """A regular expression for the names of files, without what ends those unfinished."""
        return rf"{re.escape(self.name)}\.(?P<rank>\d+)\.(?P<iteration>\d+)(?:-(?P<attempt>\d+))?"

    def file(self, save: Save, rank: int) -> Path:
        """Return the place of a rank's shard."""
        return self.path / f"{self.name}.{rank}.{save}"

    def iteration_of(self, match: re.Match[str]) -> Any:
        """Return the iteration that is in the name of a file."""
        return int(match["iteration"])

    def listing(self) -> tuple[dict[tuple[Save, int], str], list[Path]]:
        """Return the files of saves and ranks, whoever wrote them, and the unfinished files."""
        pattern = re.compile(
            rf"{self.pattern}(?P<tmp>(?:{re.escape(TEMPORARY)})?)", re.A
        )
        found, unfinished, names = {}, [], list[str]()
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.path)
        for name in names:
            if match := pattern.fullmatch(name):
                parts = match.groupdict()
                if parts["tmp"]:
                    unfinished.append(self.path / name)
                else:
                    attempt = int(parts.get("attempt") or 1)
                    save = Save(self.iteration_of(match), attempt)
                    found[save, int(parts["rank"])] = name
        return found, unfinished


class Generation(NamedTuple):
    """What ranks have of one save."""

    save: Save
    readers: list[int]  # for each shard, the rank that reads it
    problem: str  # why it is incomplete; "" where all shards seem to be there
    is_half_written: bool  # whether nothing else is wrong than that some are missing


class _Renamed(str):
    """Why a file can't be read that isn't this run's to remove: whose it is."""


class Store:
    """A run's checkpoints in the ranks' folders; methods are collective but where they say so."""

    def __init__(self, comm: CommunicatorBase, folder: Folder) -> None:
        """Look at nothing yet; not collective."""
        self._comm, self.folder = comm, folder
        self.is_begun = False  # whether this job may save
        self._lock: IO[str] | None = None  # rank 0's
        self._unreadable: set[Save] = set()

    def _scan(self) -> None:
        """Look what there is; change nothing."""
        comm, folder = self._comm, self.folder
        listings = allgather_checked(comm, OPERATION, folder.listing)
        self._names, self._unfinished = listings[comm.rank]
        readers: dict[tuple[Save, int], int] = {}
        for rank, (files, _) in enumerate(listings):
            for key in files:
                if rank == key[1] or key not in readers:
                    readers[key] = rank

        def read_heads() -> dict[tuple[Save, int], Head | str | None]:
            return {
                key: self._head(*key)
                for key, rank in readers.items()
                if rank == comm.rank
            }

        heads: dict[tuple[Save, int], Head | str | None] = {}
        for each in allgather_checked(comm, OPERATION, read_heads):
            heads.update(each)
        self._last_attempts = {
            save.iteration: save.attempt for save, _ in sorted(heads)
        }
        names = {key: name for files, _ in listings for key, name in files.items()}
        self.foreign = sorted(names[key] for key, head in heads.items() if head is None)
        ours = [key for key, head in heads.items() if head is not None]
        self.generations = [
            self._generation(
                save,
                readers,
                {rank: heads[save, rank] for of, rank in ours if of == save},
            )
            for save in sorted({save for save, _ in ours}, reverse=True)
        ]
        # Those that can be loaded, as far as is known.
        complete = {each.save for each in self.generations if not each.problem}
        self.complete = complete - self._unreadable
        # By save: the shards that it is for this rank to remove.
        self._to_remove: dict[Save, list[int]] = {}
        for save, rank in ours:
            if isinstance(heads[save, rank], _Renamed):
                continue
            self._to_remove.setdefault(save, []).extend(
                [rank] * (readers[save, rank] == comm.rank)
            )

    def _head(self, save: Save, rank: int) -> Head | str | None:
        """Return which shard a file is; why it can't be read; None if it is somebody else's."""
        path = self.folder.path / self._names[save, rank]
        try:
            head = read_head(path)
        except OSError as error:
            return f"{path.name} can't be read: {error.strerror or error}"
        except DamagedError as error:
            return str(error) if is_ours(path) else None
        expected = (self.folder.name, f"{save.iteration}", rank)
        if (head.name, f"{head.iteration}", head.rank) == expected:
            return head
        return _Renamed(
            f"{path.name} is what rank {head.rank} wrote at iteration {head.iteration} of "
            f"{head.name!r} under another name"
        )

    def _generation(
        self,
        save: Save,
        readers: Mapping[tuple[Save, int], int],
        heads: Mapping[int, Any],
    ) -> Generation:
        problems = [each for each in heads.values() if isinstance(each, str)]
        whole = [each for each in heads.values() if isinstance(each, Head)]
        size = max((each.size for each in whole), default=0)
        missing = [f"{rank}" for rank in range(size) if rank not in heads]
        is_half_written = bool(missing) and not problems
        if missing:
            some = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
            problems.append(f"of {size} files those of ranks {some} are missing")
        if len({(each.id, each.size) for each in whole}) > 1:
            problems.append("its files are of several saves")
        by_rank = [readers.get((save, rank), 0) for rank in range(size)]
        return Generation(save, by_rank, "; ".join(problems), is_half_written)

    def next_save(self, iteration: int) -> Save:
        """Return the name of a new save, the same on all ranks (not collective)."""
        newest = max(self.complete, default=Save(0)).iteration
        if iteration < newest:
            raise ValueError(
                f"rank {self._comm.rank}: a checkpoint at iteration {iteration} would never be "
                f"used, because {self.folder.path} has one of iteration {newest}: call "
                "maybe_load before training to go on from there, remove the files, or give the "
                "run another name"
            )
        return Save(iteration, self._last_attempts.get(iteration, 0) + 1)

    def begin(self, grace: float) -> None:
        """Let this job alone save here, and remove what a killed one was writing.

        ValueError on rank 0, if another job has not ended within ``grace`` seconds.
        """
        path = self.folder.path
        lock = path / f"{self.folder.name}.lock"
        end = time.monotonic() + grace

        def take() -> bool | None:
            """Return whether this rank has a lock; None if another job still has it."""
            with advised(path):
                if not path.is_dir():
                    path.mkdir(parents=True, exist_ok=True)
                    sync_folder(path.parent)
                if self._comm.rank != 0:
                    return False
                try:
                    # There is one already if another rank failed when it was taken.
                    self._lock = self._lock or take_lock(lock)
                except BlockingIOError:
                    if time.monotonic() < end:
                        return None
                    raise ValueError(
                        f"another job saves under this name: {lock.read_text()}, says {lock}; it "
                        f"has not ended within {grace:g} s (CHAINERMN_GRACE). End it, or give "
                        "this run another name or folder"
                    ) from None
            if self._lock is not None:
                weakref.finalize(self, self._lock.close)
            return self._lock is not None

        # Ranks wait together, for a moment at a time: no call of theirs waits for long.
        while True:
            is_locked = allgather_checked(self._comm, OPERATION, take)[0]
            if is_locked is not None:
                break
            time.sleep(RETRY_SECONDS)
        self._scan()  # another job may have saved since a load
        with raise_together(self._comm.handshake, OPERATION):
            # Without a lock, a process that lives may be writing them.
            for file in self._unfinished if is_locked else ():
                file.unlink(missing_ok=True)  # ranks may share the folder
        self.is_begun = True

    def newest(self) -> tuple[Save | None, list[State], str]:
        """Return the newest complete save, the ranks' states, and which were skipped, in words.

        None and no states where nothing was ever saved completely. RuntimeError where
        something was, but nothing is complete now.
        """
        self._scan()
        skipped: dict[Save, str] = {}
        lost = False  # whether something else than the end of a job has left files
        for generation in self.generations:
            found = generation.problem or self._read(generation)
            try:
                shared = put_together(found) if not isinstance(found, str) else {}
            except DamagedError as error:  # on all ranks
                found = str(error)
            if not isinstance(found, str):
                # Snapshots have all that a set has in one shard.
                states = [{**shared, **each.shared, **each.own} for each in found]
                return generation.save, states, self._explained(skipped)
            skipped[generation.save] = found
            self.complete.discard(generation.save)
            self._unreadable.add(generation.save)
            lost = lost or not generation.is_half_written
        if lost or len({save.iteration for save in skipped}) > 1:
            raise RuntimeError(
                f"rank {self._comm.rank}: nothing of {self.folder.name!r} in {self.folder.path} "
                f"is complete: {self._explained(skipped)}; mend the files, or remove them to start "
                "at 0"
            )
        return None, [], self._explained(skipped)

    def _explained(self, skipped: Mapping[Save, str]) -> str:
        words = [
            f"iteration {it.iteration} is incomplete: {skipped[it]}" for it in skipped
        ]
        if self.foreign:
            names = ", ".join(self.foreign)
            words.append(
                f"{names} not touched: {self.folder.path} has them from another program"
            )
        return "; ".join(words)

    def _read(self, generation: Generation) -> list[Shard] | str:
        """Return all shards, or why they aren't whole."""
        comm, save = self._comm, generation.save
        shards: dict[int, Shard] = {}

        def read() -> str:
            for rank, reader in enumerate(generation.readers):
                if reader == comm.rank:
                    try:
                        shards[rank] = read_shard(
                            self.folder.path / self._names[save, rank]
                        )
                    except (OSError, DamagedError) as error:
                        return str(error)
            return ""

        problems = [each for each in allgather_checked(comm, OPERATION, read) if each]
        if problems:
            return "; ".join(problems)
        found = []
        for rank, root in enumerate(generation.readers):
            shard = shards.get(rank)
            given = shard
            if shard is not None and generation.readers == [*range(comm.size)]:
                given = shard.without_private()  # each rank has read its own
            received = comm.bcast_obj(given, root=root)
            found.append(shard or received)
        return found

    def note_written(self, save: Save) -> None:
        """Count a save that all ranks have written (not collective)."""
        self.complete.add(save)
        self._last_attempts[save.iteration] = save.attempt
        self._to_remove[save] = [self._comm.rank]

    def expired(self, cp_interval: int, gc_interval: int) -> list[Save]:
        """Return what isn't needed any more (not collective).

        That is all before the newest ``cp_interval`` complete saves, once they are
        ``gc_interval``, what the newest one takes the place of, and what is incomplete
        before it.
        """
        by_iteration = {save.iteration: save for save in sorted(self.complete)}
        complete = [*by_iteration.values()]
        first = (
            complete[-cp_interval]
            if len(complete) - cp_interval >= gc_interval
            else Save(0)
        )
        older = [each for each in self._to_remove if complete and each < complete[-1]]
        return [each for each in older if each < first or each not in complete]

    def remover(self, saves: Iterable[Save]) -> Callable[[], None]:
        """Return what removes saves on this rank, in any thread; they count no more, from now on.

        Not collective. A job that is killed meanwhile leaves one that is incomplete.
        """
        ranks = {save: self._to_remove.pop(save) for save in sorted(saves)}
        self.complete.difference_update(ranks)

        def remove() -> None:
            for save, those in ranks.items():
                for rank in those:
                    self.folder.file(save, rank).unlink(missing_ok=True)

        return remove

    def clear(self) -> None:
        """Remove all saves; the newest last, so that a job killed here can go on from it.

        Other jobs may save here then.
        """
        newest = {max(self.complete, default=Save(0))}
        for saves in self._to_remove.keys() - newest, self._to_remove.keys() & newest:
            with raise_together(self._comm.handshake, OPERATION):
                self.remover(saves)()
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()


# Which object of this process writes a run's files: two would lose one another's.
writers: weakref.WeakValueDictionary[Folder, Any] = weakref.WeakValueDictionary()


def register_writer(writer: Any, folder: Folder) -> None:
    """Let ``writer`` alone write in a folder, while it is among `writers`."""
    if folder in writers and writers[folder] is not writer:
        # It may be referred to by nothing but an exception that was handled.
        gc.collect()
    if writers.setdefault(folder, writer) is not writer:
        raise ValueError(
            f"another checkpointer of this process saves as {folder.name!r} in "
            f"{folder.path}: use that one, or give this one another name or folder"
        )
