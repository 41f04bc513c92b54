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
from typing import Any

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
from .checked_file import RESERVED_PREFIX, RankFile, State
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles, SaveNumber
from .checkpointer import MultiNodeCheckpointer
from .loading import load, restore, saved_state
from .state_dict import StateError

# An int64 array of shape (): how many ranks took the snapshot.
_RANKS = RESERVED_PREFIX + "ranks"
# As Python writes what isn't negative.
_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def multi_node_snapshot(
    comm: CommunicatorBase, snapshot: Any, replica_sets: Iterable[int | Iterable[int]]
) -> MultiNodeSnapshot:
    """Make a snapshot extension write one file for each set of ranks that have the same state.

    For trainers that are the same on all ranks but, say, for reports on rank 0. With
    ``autoload`` all ranks load their set's file, also if the number of ranks has changed
    since. So the state must belong to no rank, unlike that of iterators over different
    examples. Use :func:`create_multi_node_checkpointer` to go on exactly as before.

        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [0])
        trainer.extend(snapshot, trigger=(1, "epoch"))  # files of rank 0, and of all others

    A file's name is that of the snapshot, followed by ``.<number of the set>``. With
    ``autoload`` the file name is a string in which nothing but numbers differ, such as
    ``{.updater.iteration}``. The largest numbers are those of the newest snapshot.
    Nothing is pickled, nor unpickled. Unlike with a checkpointer, nothing notices if two
    jobs save under one name.

    Args:
        comm: the ranks that train together.
        snapshot: made by :func:`chainer.training.extensions.snapshot`.
        replica_sets: each a rank or several ranks; all ranks that are not named are one
            more set. The same on all ranks. ``[]`` means that all have the same state.

    Returns:
        The extension, to be used on all ranks (collective when it is called and
        initialized).

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a rank doesn't exist or is named twice; or the snapshot has
            ``autoload`` and a function for its file name.

    Warns:
        RuntimeWarning: on rank 0, if ``snapshot`` is to be taken on errors, too. None is taken
            then, because other ranks, which may have no error, can't take part.
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

    ``comm`` and ``snapshot`` are those of that function; ``named`` are the ranks of
    each replica set but that of all others (ValueError if a rank is named twice).
    Making the extension is not collective; calling and initializing it is. Pickling it
    raises TypeError.
    """

    default_name = "multi_node_snapshot"

    def __init__(
        self, comm: CommunicatorBase, snapshot: Any, named: Sequence[Sequence[int]]
    ) -> None:
        sets = [*named]
        rest = sorted(set(range(comm.size)).difference(*named))
        if rest:
            sets.append(rest)
        if not all(sets) or sorted(chain(*sets)) != list(range(comm.size)):
            raise ValueError(
                f"the replica sets {named} must name ranks from 0 to {comm.size - 1}, each in one "
                "set at most"
            )
        self.trigger = snapshot.trigger
        # After all other extensions, like a checkpointer: their state is saved, and the
        # numbers that they set when they are initialised are replaced.
        self.priority = min(snapshot.priority, MultiNodeCheckpointer.priority)
        self._comm = comm
        self._sets = sets
        self._named = len(named)
        self._set_of = [
            number
            for rank in range(comm.size)
            for number, ranks in enumerate(sets)
            if rank in ranks
        ]
        self._set = self._set_of[comm.rank]
        self._leads = sets[self._set][0] == comm.rank
        self._autoload = bool(snapshot.autoload)
        self._snapshot = copy.copy(snapshot)
        self._snapshot.autoload = False
        self._filename = snapshot.filename
        if not callable(self._filename):  # stale files are found by this name
            self._snapshot.filename = f"{self._filename}.{self._set}"

    def __call__(self, trainer: Any) -> None:
        """Take a snapshot of each set for whose first rank the condition holds (collective).

        All ranks serialize, since some objects can only do so together.
        """
        comm = self._comm

        def own_token() -> str | None:
            if self._leads and self._snapshot.condition():
                return secrets.token_hex(8)
            return None

        tokens = allgather_checked(comm, OPERATION, own_token)
        if not any(tokens):
            return
        with raise_together(comm.handshake, OPERATION):
            state = saved_state(self._target(trainer))
            state[_RANKS] = np.array(comm.size)
        with raise_together(comm.handshake, OPERATION):
            if tokens[comm.rank]:
                # All files of a snapshot have the first token.
                self._write(trainer, state, next(filter(None, tokens)))

    def initialize(self, trainer: Any) -> None:
        """Load the newest snapshot, if ``autoload`` says so (collective).

        A snapshot is incomplete if a set's file is missing or can't be read. Incomplete
        ones are passed over, and rank 0 says so. Another number of ranks loads a
        snapshot as it loads a checkpoint.

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
        """Wait for a writer in the background, and raise its error (not collective)."""
        self._snapshot.finalize()

    def _target(self, trainer: Any) -> Any:
        return trainer if self._snapshot._target is None else self._snapshot._target

    def _files(self, trainer: Any) -> _SnapshotFiles:
        return _SnapshotFiles(Path(trainer.out), f"{self._filename}")

    def _stem(self, trainer: Any) -> str:
        """Return the name of files now, without the numbers of their sets."""
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
        file = RankFile(
            run=f"{self._filename}",
            save=stem,
            id=token,
            rank=self._set,
            size=len(self._sets),
            shared={},
            own=state,
        )
        arrays = file.arrays()
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
        # All ranks but those that are named are one more set, if there are any.
        count = len(found.states)
        with raise_together(comm.handshake, OPERATION):
            if not self._set < count <= self._named + 1:
                raise StateError(
                    f"the snapshot was taken of {count} replica sets, not {len(self._sets)}"
                )
        own = found.states[found.own]
        states = [own] * int(own[_RANKS])
        restorers = load(comm, files.name, self._target(trainer), states, 0)
        restore(comm, files.name, restorers)


class _SnapshotFiles(RunFiles):
    """Snapshots, called by a format string whose fields are numbers, and by their set's number."""

    @property
    def pattern(self) -> str:
        pattern = ""
        for literal, field, *_ in Formatter().parse(self.name):
            pattern += re.escape(literal)
            if field is not None:
                pattern += f" *({_NUMBER})"
        return rf"(?P<text>{pattern})\.(?P<rank>\d+)"

    def file(self, number: SaveNumber, rank: int | str) -> Path:
        return self.path / f"{number.text}.{rank}"

    def number_of(self, match: re.Match[str]) -> SaveNumber:
        text, *numbers, _ = match.groups()
        return SaveNumber(tuple(map(float, numbers)), 1, text)
