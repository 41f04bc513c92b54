"""Snapshots of several ranks: those that have the same state share one file."""

from __future__ import annotations

import copy
import operator
import re
import secrets
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
from chainer.training import Extension
from chainer.training.extensions._snapshot import _Snapshot  # it has no public name
from chainer.training.extensions.snapshot_writers import SimpleWriter

from chainermn_comm import CommunicatorBase

from ..collective_errors import (
    allgather_checked,
    raise_together,
    require_communicator,
)
from .atomic_file import advised
from .checked_file import RESERVED_PREFIX, Head, RankFile, State
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles, SaveNumber, say
from .checkpointer import MultiNodeCheckpointer
from .loading import load, mark_synchronized_if_equal, restore, saved_state
from .state_dict import StateError

# An int64 array of shape (2,): the sets that were named, and ranks.
_TAKEN_BY = RESERVED_PREFIX + "taken_by"
# As Python writes what isn't negative.
_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def multi_node_snapshot(
    comm: CommunicatorBase, snapshot: Any, replica_sets: Iterable[int | Iterable[int]]
) -> MultiNodeSnapshot:
    """Make a snapshot extension write one file for each set of ranks that have the same state.

    For trainers that are the same on all ranks but, say, for reports on rank 0. With
    ``autoload`` all load their set's file, also where the number of ranks has changed
    since. That only works for state that belongs to no rank, unlike iterators of
    different examples. Use :func:`create_multi_node_checkpointer` to go on exactly as
    before.

        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [0])
        trainer.extend(snapshot, trigger=(1, "epoch"))  # files of rank 0, and of all others

    Files are called as the snapshot says, and ``.<number of the set>``. With
    ``autoload`` the file name is a string, and what differs in it are numbers, such as
    ``{.updater.iteration}``, by which the newest is found. Nothing is pickled, nor
    unpickled. Unlike a checkpointer, nothing notices if two jobs save under one name.

    Args:
        comm: the ranks that train together.
        snapshot: what :func:`chainer.training.extensions.snapshot` returned.
        replica_sets: each a rank or several ranks; those not named are one more set.
            The same on all ranks. So ``[]`` means that all have the same state.

    Returns:
        The extension, to be used on all ranks (collective when it is called and
        initialized).

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a rank doesn't exist or is named twice; or the snapshot has
            ``autoload`` and a function for its file name.

    Warns:
        RuntimeWarning: on rank 0, if ``snapshot`` is to be taken on errors, too: none is then, as
            the other ranks, which may have no error, can't take part.
    """
    comm = require_communicator(comm, "multi_node_snapshot")
    if not isinstance(snapshot, _Snapshot):
        raise TypeError(
            "multi_node_snapshot needs what chainer.training.extensions.snapshot returns, not "
            f"{type(snapshot).__name__}"
        )
    if snapshot._snapshot_on_error and comm.rank == 0:
        warnings.warn(
            "a snapshot of several ranks can't be taken on an error, as snapshot_on_error=True "
            "asks for, because the others may not have one; those taken before are kept",
            RuntimeWarning,
            stacklevel=2,
        )
    if snapshot.autoload and callable(snapshot.filename):
        raise ValueError(
            "autoload doesn't find snapshots whose file name is a function: give it a string, "
            "such as 'snapshot_{.updater.iteration}'"
        )
    named = [
        sorted(map(operator.index, each if isinstance(each, Iterable) else [each]))
        for each in replica_sets
    ]
    return MultiNodeSnapshot(comm, snapshot, named)


class MultiNodeSnapshot(Extension):
    """The extension that :func:`multi_node_snapshot` makes; a copy has the same communicator.

    ``comm`` and ``snapshot`` are as there; ``named`` are the ranks of each replica set
    but that of all others (ValueError if one is named twice). Making one is not
    collective; calling and initializing it is. Pickling it raises TypeError.
    """

    default_name = "multi_node_snapshot"

    def __init__(
        self, comm: CommunicatorBase, snapshot: Any, named: Sequence[Sequence[int]]
    ) -> None:
        rest = set(range(comm.size)).difference(*named)
        sets = [*named, sorted(rest)] if rest else [*named]
        if not all(sets) or sorted(chain(*sets)) != list(range(comm.size)):
            raise ValueError(
                f"the replica sets {named} must name ranks from 0 to {comm.size - 1}, each in one "
                "set at most"
            )
        self.trigger = snapshot.trigger
        # After all other extensions, as a checkpointer, so that their state is saved, and
        # what they set when they are initialised is replaced.
        self.priority = min(snapshot.priority, MultiNodeCheckpointer.priority)
        self._comm = comm
        self._sets = sets
        set_of = {rank: number for number, ranks in enumerate(sets) for rank in ranks}
        self._set_of = [set_of[rank] for rank in range(comm.size)]
        self._set = set_of[comm.rank]
        self._leads = sets[self._set][0] == comm.rank
        self._named = len(named)
        self._autoload = bool(snapshot.autoload)
        self._snapshot = copy.copy(snapshot)
        self._snapshot.autoload = False
        self._filename = snapshot.filename
        if not callable(self._filename):  # it removes stale ones by that
            self._snapshot.filename = f"{self._filename}.{self._set}"

    def __call__(self, trainer: Any) -> None:
        """Take a snapshot, where the condition of each set's first rank holds (collective).

        All ranks serialize, since some objects can only do so together.
        """
        views = allgather_checked(
            self._comm,
            OPERATION,
            lambda: (self._leads and self._snapshot.condition(), secrets.token_hex(8)),
        )
        if not any(writes for writes, _ in views):
            return
        with raise_together(self._comm.handshake, OPERATION):
            state = saved_state(self._target(trainer))
            state[_TAKEN_BY] = np.array([self._named, self._comm.size])
        writes, _ = views[self._comm.rank]
        _, token = views[0]
        with raise_together(self._comm.handshake, OPERATION):
            if writes:
                self._write(trainer, state, token)

    def initialize(self, trainer: Any) -> None:
        """Load the newest snapshot, if ``autoload`` says so (collective).

        One that is incomplete, as not all sets have it or it can't be read, is passed
        over; rank 0 says so. Where another number of ranks took it, it is as with a
        checkpointer.

        Raises:
            RuntimeError: on all ranks: there are snapshots, but none is complete.
            ValueError: the snapshot doesn't fit the trainer: another model, other
                replica sets, or an iterator over another number of examples on as many
                ranks.
            PeerError: another rank raised.
        """
        settings = {"replica_sets": self._sets, "autoload": self._autoload}
        self._comm.handshake(OPERATION, settings.items())
        if self._autoload:
            self._load(trainer)
        if self._leads:
            self._snapshot.initialize(trainer)

    def finalize(self) -> None:
        """Wait for a writer in the background, and raise what it raises (not collective)."""
        self._snapshot.finalize()

    def _target(self, trainer: Any) -> Any:
        return trainer if self._snapshot._target is None else self._snapshot._target

    def _files(self, trainer: Any) -> _SnapshotFiles:
        return _SnapshotFiles(Path(trainer.out), f"{self._filename}")

    def _stem(self, trainer: Any) -> str:
        """Return what files are called now, but for the numbers of their sets."""
        if callable(self._filename):
            return f"{self._filename(trainer)}"
        stem: str = self._filename.format(trainer)
        if self._autoload and not re.fullmatch(
            self._files(trainer).pattern, f"{stem}.0", re.A
        ):
            raise ValueError(
                f"autoload wouldn't find the snapshot {stem!r}, which is called by "
                f"{self._filename!r}: let nothing but numbers differ in names, as with "
                "'snapshot_{.updater.iteration}'"
            )
        return stem

    def _write(self, trainer: Any, state: State, token: str) -> None:
        writer = self._snapshot.writer
        stem = self._stem(trainer)
        name = f"{stem}.{self._set}"
        head = Head(f"{self._filename}", stem, token, self._set, len(self._sets))
        arrays = RankFile(head, {}, state).arrays()
        if not isinstance(writer, SimpleWriter):  # it writes while training goes on
            arrays = {key: array.copy() for key, array in arrays.items()}
        with advised(Path(trainer.out) / name):
            writer(name, trainer.out, arrays)

    def _load(self, trainer: Any) -> None:
        comm = self._comm
        files = self._files(trainer)
        found = CheckpointFolder(comm, files, self._set_of).newest()
        if found is None:
            return
        target = self._target(trainer)
        with raise_together(comm.handshake, OPERATION):
            own = found.states[found.own]
            named, size = own[_TAKEN_BY].tolist()
            # All but those that are named are one more set, if there are any.
            if named != self._named or self._set >= len(found.states):
                raise StateError(
                    f"the snapshot was taken of {len(found.states)} replica sets with {named} "
                    f"named, not {len(self._sets)} with {self._named}"
                )
            change, restorers = load(target, [own] * size, 0, comm)
            replaced = restore(restorers)
        for text in change, replaced:
            say(comm, files.name, text)
        mark_synchronized_if_equal(comm, target)


class _Stem(NamedTuple):
    """The name of snapshots but for the number of a set; the newest is that of the most."""

    numbers: tuple[float, ...]
    text: str

    def __str__(self) -> str:
        return self.text


class _SnapshotFiles(RunFiles):
    """Snapshots, called by a format string whose fields are numbers, and by their set's number."""

    @property
    def pattern(self) -> str:
        pattern = ""
        for literal, field, *_ in Formatter().parse(self.name):
            pattern += re.escape(literal)
            if field is not None:
                pattern += f" *({_NUMBER})"
        return rf"{pattern}\.(?P<rank>\d+)"

    def file(self, number: SaveNumber, rank: int | str) -> Path:
        return self.path / f"{number}.{rank}"

    def number_of(self, match: re.Match[str]) -> SaveNumber:
        *numbers, _ = match.groups()
        stem, _, _ = match[0].rpartition(".")
        return SaveNumber(_Stem(tuple(map(float, numbers)), stem))
