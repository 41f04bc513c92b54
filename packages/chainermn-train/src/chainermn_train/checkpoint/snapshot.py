"""Snapshots of several ranks: ranks that have the same state share one file."""

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

# The class has no public name.
from chainer.training.extensions._snapshot import _Snapshot
from chainer.training.extensions.snapshot_writers import SimpleWriter

from chainermn_comm import CommunicatorBase
from chainermn_comm.parts import part_entries

from ..collective_errors import (
    allgather_checked,
    raise_together,
    require_communicator,
)
from .atomic_file import advised
from .checked_file import RESERVED_PREFIX, RankFile, State
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles, SaveNumber
from .checkpointer import MultiNodeCheckpointer
from .loading import load, parameters_of, restore, saved_state, whole_states
from .state_dict import StateError

# An int64 array of shape (): how many ranks took the snapshot.
_RANKS = RESERVED_PREFIX + "ranks"
# A regular expression for a number as Python writes it; negative numbers don't occur.
_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def multi_node_snapshot(
    comm: CommunicatorBase, snapshot: Any, replica_sets: Iterable[int | Iterable[int]]
) -> MultiNodeSnapshot:
    """Make a snapshot extension write one file for each set of ranks that have the same state.

    Use this function if trainers have the same state on all ranks, apart from reports on
    rank 0, say. With ``autoload`` each rank loads the file of its set, also if the number
    of ranks has changed. So no state may belong to one rank, as the state of iterators
    over different examples does. Use :func:`create_multi_node_checkpointer` to go on
    exactly as before.

        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [0])
        trainer.extend(snapshot, trigger=(1, "epoch"))  # files of rank 0, and of all others

    A file's name is the name of the snapshot, followed by ``.<number of the set>``. With
    ``autoload`` the file name is a string in which nothing but numbers differ, such as
    ``{.updater.iteration}``. The newest snapshot has the largest numbers in its name.
    Nothing is pickled or unpickled. Unlike a checkpointer, this extension doesn't notice
    if two jobs save under one name.

    Args:
        comm: the ranks that train together.
        snapshot: made by :func:`chainer.training.extensions.snapshot`.
        replica_sets: the sets, the same on all ranks. A set is one rank or several. The
            ranks that are in no set make one more set. ``[]`` means that all ranks have
            the same state.

    Returns:
        The extension, to be used on all ranks (collective when it is called and
        initialized).

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a rank doesn't exist or is named twice; or the snapshot has
            ``autoload`` and a function for its file name.

    Warns:
        RuntimeWarning: on rank 0, if ``snapshot`` is to be taken on errors, too. No snapshot
            is taken on an error, because other ranks may have no error and can't take part.
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

    ``comm`` and ``snapshot`` are the arguments of that function. ``named`` has the ranks
    of each replica set, except the set of all other ranks. A rank that is named twice
    raises ValueError, and pickling the extension raises TypeError. Making the extension
    is not collective; calling and initializing it is.
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
        # Like a checkpointer, the snapshot comes after all other extensions. So it saves
        # their state, and replaces the numbers that they set when they are initialised.
        self.priority = min(snapshot.priority, MultiNodeCheckpointer.priority)
        self._comm = comm
        self._sets = sets
        self._named = len(named)
        for number, ranks in enumerate(sets):
            if comm.rank in ranks:
                self._set = number
                self._leads = ranks[0] == comm.rank
        self._autoload = snapshot.autoload
        self._snapshot = copy.copy(snapshot)
        self._snapshot.autoload = False
        self._filename = snapshot.filename
        if not callable(self._filename):  # Chainer finds stale files by this name
            self._snapshot.filename = f"{self._filename}.{self._set}"

    def __call__(self, trainer: Any) -> None:
        """Take a snapshot of each set for whose first rank the condition holds (collective).

        All ranks serialize, because some objects need all ranks for that. ValueError is
        raised if ranks of one set hold different parts of a model.
        """
        comm = self._comm

        def own_token() -> str | None:
            if self._leads and self._snapshot.condition():
                return secrets.token_hex(8)
            return None

        tokens = allgather_checked(comm, OPERATION, own_token)
        if not any(tokens):
            return
        self._compare_parts(trainer)
        with whole_states(comm, self._target(trainer)):
            state = saved_state(self._target(trainer))
            state[_RANKS] = np.array(comm.size)
        with raise_together(comm.handshake, OPERATION):
            if tokens[comm.rank]:
                # All files of a snapshot have the first token.
                self._write(trainer, state, next(filter(None, tokens)))

    def initialize(self, trainer: Any) -> None:
        """Load the newest complete snapshot, if ``autoload`` says so (collective).

        A snapshot is incomplete if the file of a set is missing or can't be read. Rank 0
        prints which incomplete snapshots were skipped. Another number of ranks loads a
        snapshot as it would load a checkpoint.

        Raises:
            RuntimeError: on all ranks: there are snapshots, but none is complete.
            ValueError: the snapshot doesn't fit the trainer: another model, other
                replica sets, or an iterator over another number of examples on as many
                ranks; or ranks of one set hold different parts of a model.
            PeerError: another rank raised.
        """
        settings = {"replica_sets": self._sets, "autoload": self._autoload}
        self._comm.handshake(OPERATION, settings.items())
        self._compare_parts(trainer)
        if self._autoload:
            self._load(trainer)
        if self._leads:
            self._snapshot.initialize(trainer)

    def _compare_parts(self, trainer: Any) -> None:
        """Raise ValueError if ranks of one set hold different parts of a model (collective)."""
        target = self._target(trainer)
        rows = allgather_checked(
            self._comm, OPERATION, lambda: part_entries(parameters_of(target))
        )
        for ranks in self._sets:
            for rank in ranks:
                different = {*rows[rank]} ^ {*rows[ranks[0]]}
                if different:
                    _, name, _ = min(different)
                    raise ValueError(
                        f"multi_node_snapshot would write one file for ranks {ranks}, which "
                        f"hold different parts of {name}: give it replica sets of ranks that "
                        "hold the same parts, or use create_multi_node_checkpointer instead"
                    )

    def finalize(self) -> None:
        """Wait for a writer in the background, and raise the writer's error (not collective)."""
        self._snapshot.finalize()

    def _target(self, trainer: Any) -> Any:
        return trainer if self._snapshot._target is None else self._snapshot._target

    def _files(self, trainer: Any) -> _SnapshotFiles:
        return _SnapshotFiles(Path(trainer.out), f"{self._filename}")

    def _stem(self, trainer: Any) -> str:
        """Return the name of a snapshot taken now, to which files add the number of their set."""
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
        # Other writers write while training goes on.
        if not isinstance(writer, SimpleWriter):
            arrays = {key: array.copy() for key, array in arrays.items()}
        with advised(Path(trainer.out) / name):
            writer(name, trainer.out, arrays)

    def _load(self, trainer: Any) -> None:
        comm = self._comm
        files = self._files(trainer)
        wanted = comm.allgather_obj(self._set)
        found = CheckpointFolder(comm, files, wanted).newest()
        if found is None:
            return
        # The ranks that were not named may have made one more set.
        count = len(found.states)
        with raise_together(comm.handshake, OPERATION):
            if not self._set < count <= self._named + 1:
                raise StateError(
                    f"the snapshot was taken of {count} replica sets, not {len(self._sets)}"
                )
        own = found.states[found.own]
        states = [own] * int(own[_RANKS])
        restorers = load(comm, files.name, self._target(trainer), states, 0, states[0])
        restore(comm, files.name, restorers)


class _SnapshotFiles(RunFiles):
    """Files of snapshots, called by a format string of numbers and by the number of a set."""

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
