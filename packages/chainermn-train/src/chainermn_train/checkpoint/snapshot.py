"""Snapshots of several ranks: those that have the same state share one file."""

from __future__ import annotations

import contextlib
import copy
import operator
import re
import secrets
import sys
import warnings
from collections.abc import Iterable, Sequence
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
from ..wrappers import UnpicklableMixin
from .atomic_file import advised
from .checked_file import RESERVED_PREFIX, Head, RankFile, State
from .checkpoint_folder import OPERATION, CheckpointFolder, RunFiles
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
    named = [_ranks(each, comm.size) for each in replica_sets]
    return MultiNodeSnapshot(comm, snapshot, named)


def _ranks(replica_set: Any, size: int) -> list[int]:
    several = replica_set if isinstance(replica_set, Iterable) else [replica_set]
    ranks = sorted(operator.index(rank) for rank in several)
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"the replica set {ranks} must name some of the ranks 0 to {size - 1}"
        )
    return ranks


class MultiNodeSnapshot(UnpicklableMixin, Extension):
    """The extension that :func:`multi_node_snapshot` makes; a copy has the same communicator.

    ``comm`` and ``snapshot`` are as there; ``named`` are the ranks of each replica set
    but that of all others (ValueError if one is named twice). Making one is not
    collective; calling and initializing it is. Pickling it raises TypeError.
    """

    default_name = "multi_node_snapshot"

    def __init__(
        self, comm: CommunicatorBase, snapshot: Any, named: Sequence[Sequence[int]]
    ) -> None:
        rest = sorted(set(range(comm.size)).difference(*named))
        sets = [*named, rest] if rest else [*named]
        if sum(map(len, sets)) != comm.size:
            raise ValueError(f"a rank is named twice in the replica sets {list(named)}")
        set_of = {rank: number for number, ranks in enumerate(sets) for rank in ranks}
        self.trigger = snapshot.trigger
        # After all other extensions, as a checkpointer, so that their state is saved, and
        # what they set when they are initialised is replaced.
        self.priority = min(snapshot.priority, MultiNodeCheckpointer.priority)
        self._comm = comm
        self._set_of = set_of  # ranks
        self._set = set_of[comm.rank]
        self._leaders = [ranks[0] for ranks in sets]
        self._named = len(named)
        self._autoload = snapshot.autoload
        self._settings = {
            "replica_sets": tuple(map(tuple, sets)),
            "how many sets are named": self._named,
            "autoload": bool(snapshot.autoload),
        }
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
            lambda: (self._snapshot.condition(), secrets.token_hex(8)),
        )
        if not any(views[leader][0] for leader in self._leaders):
            return
        with raise_together(self._comm.handshake, OPERATION):
            state = saved_state(self._target(trainer))
            state[_TAKEN_BY] = np.array([self._named, self._comm.size])
        rank = self._comm.rank
        with raise_together(self._comm.handshake, OPERATION):
            if rank in self._leaders and views[rank][0]:
                self._write(trainer, state, views[0][1])

    def initialize(self, trainer: Any) -> None:
        """Load the newest snapshot, if ``autoload`` says so (collective).

        One that is incomplete, as not all sets have it or it can't be read, is passed
        over; rank 0 says so. Where another number of ranks took it, it is as with a
        checkpointer.

        Raises:
            RuntimeError: on all ranks: there are snapshots, but none is complete.
            ValueError: the snapshot doesn't fit the trainer: another model, other
                replica sets, or an iterator over another number of examples on as many
                ranks; or what differs in the file name is no number.
            PeerError: another rank raised.
        """
        self._comm.handshake(OPERATION, self._settings.items())
        if self._autoload:
            # A name may tell of an observation, which there is only later.
            unknown_yet = contextlib.suppress(AttributeError, LookupError)
            with raise_together(self._comm.handshake, OPERATION), unknown_yet:
                self._iteration_of(self._name(trainer), trainer)
            self._load(trainer)
        if self._comm.rank in self._leaders:
            self._snapshot.initialize(trainer)

    def finalize(self) -> None:
        """Wait for a writer in the background, and raise what it raises (not collective)."""
        self._snapshot.finalize()

    def _target(self, trainer: Any) -> Any:
        return trainer if self._snapshot._target is None else self._snapshot._target

    def _name(self, trainer: Any) -> str:
        """Return what this set's file is called now."""
        name = self._filename
        name = name(trainer) if callable(name) else name.format(trainer)
        return f"{name}.{self._set}"

    def _iteration_of(self, name: str, trainer: Any) -> Any:
        """Return the numbers in a file's name, by which `autoload` finds the newest."""
        if callable(self._filename):
            return 0
        files = self._files(trainer)
        match = re.fullmatch(files.pattern, name, re.A)
        if match is not None:
            return files.iteration_of(match)
        if self._autoload:
            raise ValueError(
                f"autoload wouldn't find the snapshot {name!r}, which is called by "
                f"{self._filename!r}: let nothing but numbers differ in names, as with "
                "'snapshot_{.updater.iteration}'"
            )
        return 0

    def _files(self, trainer: Any) -> _SnapshotFiles:
        return _SnapshotFiles(Path(trainer.out), f"{self._filename}")

    def _write(self, trainer: Any, state: State, token: str) -> None:
        writer = self._snapshot.writer
        name = self._name(trainer)
        head = Head(
            name=f"{self._filename}",
            iteration=f"{self._iteration_of(name, trainer)}",
            id=token,
            rank=self._set,
            size=len(self._leaders),
        )
        arrays = RankFile(head, {}, state).arrays()
        if not isinstance(writer, SimpleWriter):  # it writes while training goes on
            arrays = {key: array.copy() for key, array in arrays.items()}
        with advised(Path(trainer.out) / name):
            writer(name, trainer.out, arrays)

    def _load(self, trainer: Any) -> None:
        comm = self._comm
        folder = CheckpointFolder(
            comm, self._files(trainer), lambda rank, size: self._set_of[rank] % size
        )
        found, skipped = folder.newest()
        if skipped:
            loads = "none" if found is None else f"iteration {found.iteration}"
            self._say(f"{skipped}; loading {loads}")
        if found is None:
            return
        with raise_together(comm.handshake, OPERATION):
            named, size = np.asarray(found.state[_TAKEN_BY]).tolist()
            # All but those that are named are one more set, if there are any.
            if named != self._named or self._set >= len(found.states):
                raise StateError(
                    f"the snapshot was taken of {len(found.states)} replica sets with {named} "
                    f"named, not {len(self._leaders)} with {self._named}"
                )
            states = [found.state] * size
            loaded = load(self._target(trainer), found.state, states, 0, comm)
            replaced = restore(loaded.restorers)
        if replaced:
            self._say(replaced)
        if loaded.anew:
            anew = ", ".join(loaded.anew)
            self._say(f"of another number of ranks; begun anew: {anew}")
        mark_synchronized_if_equal(comm, self._target(trainer))

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(
                f"chainermn: snapshot {self._filename!r}: {text}",
                file=sys.stderr,
                flush=True,
            )


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

    def iteration_of(self, match: re.Match[str]) -> Any:
        before_rank = match.re.groupindex["rank"] - 1
        numbers = [
            int(text) if text.isdigit() else float(text)
            for text in match.groups()[:before_rank]
        ]
        return numbers[0] if len(numbers) == 1 else tuple(numbers) or 0
