"""The folder that a job saves checkpoints in: commits new generations and removes old ones."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import is_raised_on_all, now

from ..collective_errors import allgather_checked, raise_on_all_ranks
from .atomic_file import FileDigest, atomic_write, sync_folder
from .files import CheckpointPaths, Manifest
from .recovery import OPERATION, remove_stale, scan


class CheckpointDirectory:
    """The generations in the ranks' folders; methods are collective unless they say otherwise."""

    def __init__(
        self, comm: CommunicatorBase, paths: CheckpointPaths, damaged: Iterable[int] = ()
    ) -> None:
        """Make the folder, or find what is there and remove what a killed job left unfinished."""
        self._comm = comm
        self.paths = paths
        with raise_on_all_ranks(comm, OPERATION):
            if not paths.folder.is_dir():
                paths.folder.mkdir(parents=True, exist_ok=True)
                sync_folder(paths.folder.parent)
        found = scan(comm, paths)
        self._committed = set(found.manifests)  # iterations that have a manifest
        self._whole = self._committed.difference(damaged)
        remove_stale(comm, paths, found, max(self._whole, default=None))

    def path_for(self, iteration: int) -> Path:
        """Return this rank's file of a new generation until it is committed (not collective)."""
        newest = max(self._whole, default=0)
        if iteration < newest:
            raise ValueError(
                f"rank {self._comm.rank}: a checkpoint at iteration {iteration} would never be "
                f"used, because {self.paths.folder} has one of iteration {newest}: call "
                "maybe_load before training to go on from there, remove the files, or give the "
                "run another name"
            )
        return self.paths.staging(self._comm.rank, iteration)

    def commit(self, iteration: int, written: Callable[[], FileDigest]) -> None:
        """Write the manifest once every rank has ``written`` its file, and rename the files.

        Where that fails on all ranks, nothing of the generation is left; one that it was to replace
        stays.
        """
        rank, replaces, since = self._comm.rank, iteration in self._committed, now()
        try:
            files = allgather_checked(self._comm, OPERATION, written)
            manifest = Manifest(self.paths.name, iteration, files)
            with raise_on_all_ranks(self._comm, OPERATION):
                if rank == 0:
                    path = self.paths.manifest(iteration)
                    atomic_write(path, lambda file: file.write(manifest.encode()))
        except BaseException as error:
            if not is_raised_on_all(error, since):  # others may have committed it
                raise
            with contextlib.suppress(Exception):
                if replaces:
                    scan(self._comm, self.paths)  # the new manifest may be there all the same
                else:
                    self._remove_manifests([iteration])
                self.paths.staging(rank, iteration).unlink(missing_ok=True)
            raise
        self._committed.add(iteration)
        self._whole.add(iteration)
        with raise_on_all_ranks(self._comm, OPERATION):
            self.paths.publish(rank, iteration)

    def expired(self, cp_interval: int, gc_interval: int) -> list[int]:
        """All but the newest ``cp_interval``, once they are ``gc_interval`` (not collective)."""
        whole = sorted(self._whole)
        if len(whole) - cp_interval < gc_interval:
            return []
        return [each for each in self._committed if each < whole[-cp_interval]]

    def clear(self) -> None:
        """Remove all generations; the newest last, so that a job killed here can go on from it."""
        # A published file without a manifest would look like one whose manifest was lost.
        with raise_on_all_ranks(self._comm, OPERATION):
            self.paths.unpublish(self._comm.rank, sorted(self._committed))
        newest = {max(self._whole, default=0)}
        self.remove(self._committed - newest)
        self.remove(self._committed & newest)

    def remove(self, iterations: Iterable[int]) -> None:
        """Remove generations: their manifests first, so that none is left without its files."""
        if iterations := sorted(iterations):
            for remove in self._remove_manifests, self._remove_files:
                with raise_on_all_ranks(self._comm, OPERATION):
                    remove(iterations)
            self._discard(iterations)

    def deferred_delete(self, iterations: Iterable[int]) -> Callable[[], None]:
        """Return what removes expired generations on this rank, in any thread (not collective)."""
        # A job that is killed meanwhile may leave a manifest without its files, which nothing reads
        # while there is a newer generation.
        iterations = sorted(iterations)
        self._discard(iterations)

        def delete() -> None:
            self._remove_manifests(iterations)
            self._remove_files(iterations)

        return delete if iterations else lambda: None

    def _discard(self, iterations: Iterable[int]) -> None:
        self._committed.difference_update(iterations)
        self._whole.difference_update(iterations)

    def _remove_manifests(self, iterations: Iterable[int]) -> None:
        if self._comm.rank == 0:
            for iteration in iterations:
                self.paths.manifest(iteration).unlink(missing_ok=True)
            sync_folder(self.paths.folder)

    def _remove_files(self, iterations: Iterable[int]) -> None:
        for name in self.paths.state, self.paths.staging:
            for iteration in iterations:
                name(self._comm.rank, iteration).unlink(missing_ok=True)


# Which object of this process writes to a folder under a name: two would lose one another's files.
_writers: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()


def register_writer(writer: Any, paths: CheckpointPaths) -> None:
    """Let ``writer`` alone write a run's files in a folder, until it is released or collected."""
    if has_other_writer(writer, paths):
        gc.collect()  # it may be referred to by nothing but an exception that was handled
    if has_other_writer(writer, paths):
        raise ValueError(
            f"another checkpointer of this process saves as {paths.name!r} in "
            f"{paths.folder}: use that one, or give this one another name or folder"
        )
    _writers[os.path.realpath(paths.folder), paths.name] = writer


def has_other_writer(writer: Any, paths: CheckpointPaths) -> bool:
    """Return whether another object of this process writes there."""
    return _writers.get((os.path.realpath(paths.folder), paths.name), writer) is not writer


def release_writer(writer: Any) -> None:
    """Let others write what ``writer`` wrote."""
    for key in [key for key, each in _writers.items() if each is writer]:
        del _writers[key]
