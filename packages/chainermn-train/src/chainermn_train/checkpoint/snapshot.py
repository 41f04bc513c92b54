"""Snapshots of several ranks: those that have the same state share one file."""

from __future__ import annotations

import copy
import operator
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chainer.training import Extension
from chainer.training.extensions._snapshot import _Snapshot  # it has no public name
from chainer.training.extensions.snapshot_writers import SimpleWriter

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_on_all_ranks, require_communicator
from ..trainer_introspection import iterators_of
from ..wrappers import UnpicklableMixin
from .mark_synchronized import mark_synchronized_if_equal
from .other_size import PLACES, adapt, places, recall_places
from .shards import RESERVED_PREFIX, DamagedError, Head, Shard, State, encode, read_head, read_shard
from .state_dict import StateError, load_state_dict, state_dict

_OPERATION = "multi_node_snapshot"
_EXAMPLES = RESERVED_PREFIX + "examples/"  # and an iterator's name: how many its dataset has
_TAKEN_BY = RESERVED_PREFIX + "taken_by"  # int64 of shape (2,): the sets that were named, and ranks


def multi_node_snapshot(
    comm: CommunicatorBase, snapshot: Any, replica_sets: Iterable[int | Iterable[int]]
) -> MultiNodeSnapshot:
    """Make a snapshot extension write one file for each set of ranks that have the same state.

    For trainers that are the same on all ranks but, say, for reports on rank 0. With
    ``autoload``, each set's first rank reads its file and gives it to the others, also where
    the number of ranks has changed since. That only works for state that belongs to no rank:
    where ranks hold different examples, iterators belong to theirs. Use
    :func:`create_multi_node_checkpointer` to go on exactly as before.

        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [0])
        trainer.extend(snapshot, trigger=(1, "epoch"))  # files of rank 0, and of all others

    Files are called as the snapshot says, and ``.<number of the set>``. Nothing is pickled, nor
    unpickled.

    Args:
        comm: the ranks that train together.
        snapshot: what :func:`chainer.training.extensions.snapshot` returned.
        replica_sets: each a rank or several ranks; those not named are one more set. The same
            on all ranks. So ``[]`` means that all have the same state.

    Returns:
        The extension, to be used on all ranks (collective when it is called and initialized).

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a rank doesn't exist or is named twice.

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
    named = [_ranks(each, comm.size) for each in replica_sets]
    return MultiNodeSnapshot(comm, snapshot, named)


def _ranks(replica_set: Any, size: int) -> list[int]:
    try:
        several = replica_set if isinstance(replica_set, Iterable) else [replica_set]
        ranks = sorted(operator.index(rank) for rank in several)
    except TypeError:
        raise TypeError(f"a replica set is a rank or several ranks, not {replica_set!r}") from None
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"the replica set {ranks} must name some of the ranks 0 to {size - 1}")
    return ranks


class MultiNodeSnapshot(UnpicklableMixin, Extension):
    """The extension that :func:`multi_node_snapshot` makes; a copy has the same communicator.

    Making one is not collective; calling and initializing it is. Pickling it raises TypeError.

    Args:
        comm: the ranks that train together.
        snapshot: what :func:`chainer.training.extensions.snapshot` returned.
        named: the ranks of each replica set but the one of all others, the same on all ranks.

    Raises:
        ValueError: a rank is named twice.
    """

    default_name = "multi_node_snapshot"

    def __init__(
        self, comm: CommunicatorBase, snapshot: Any, named: Sequence[Sequence[int]]
    ) -> None:
        rest = sorted(set(range(comm.size)).difference(*named))
        sets = [*named, rest] if rest else [*named]
        if sum(map(len, sets)) != comm.size:
            raise ValueError(f"a rank is named twice in the replica sets {list(named)}")
        self.trigger = snapshot.trigger
        self.priority = snapshot.priority
        self._comm = comm
        self._set_index = next(index for index, ranks in enumerate(sets) if comm.rank in ranks)
        self._named = len(named)
        self._set_leaders = [ranks[0] for ranks in sets]
        self._is_leader = comm.rank in self._set_leaders
        self._autoload = snapshot.autoload
        self._settings = {
            "replica_sets": tuple(map(tuple, sets)),
            "how many sets are named": self._named,
            "autoload": bool(snapshot.autoload),
        }
        self._snapshot = copy.copy(snapshot)
        self._snapshot.autoload = False
        self._suffix = f".{self._set_index}"
        name = snapshot.filename
        if callable(name):
            self._snapshot.filename = lambda trainer: name(trainer) + self._suffix
        else:
            self._snapshot.filename = name + self._suffix

    def __call__(self, trainer: Any) -> None:
        """Take a snapshot, where the condition of each set's first rank holds (collective).

        All ranks serialize, since some objects can only do so together.
        """
        views = self._run(lambda: (self._snapshot.condition(), secrets.token_hex(8)))
        if not any(views[leader][0] for leader in self._set_leaders):
            return
        target = self._target(trainer)
        with raise_on_all_ranks(self._comm, _OPERATION):
            state = state_dict(target)
            state[PLACES] = places(target)
            state[_TAKEN_BY] = np.array([self._named, self._comm.size])
            for name, count in _examples(target).items():
                state[_EXAMPLES + name] = np.array(count)
        with raise_on_all_ranks(self._comm, _OPERATION):
            if self._is_leader and views[self._comm.rank][0]:
                self._write(trainer, state, views[0][1])

    def initialize(self, trainer: Any) -> None:
        """Load the newest snapshot, if ``autoload`` says so (collective).

        One that not all sets have, or that can't be read, is passed over; rank 0 says so.

        Raises:
            RuntimeError: on all ranks: only some sets have a snapshot, or all are damaged.
            ValueError: the snapshot doesn't fit the trainer: another model, a state that
                belongs to a rank while their number has changed, or an iterator over another
                number of examples.
            PeerError: another rank raised.
        """
        self._comm.handshake(_OPERATION, self._settings.items())
        if self._autoload and not callable(self._snapshot.filename):
            self._load(trainer)
        if self._is_leader:
            self._snapshot.initialize(trainer)

    def finalize(self) -> None:
        """Wait for a writer in the background, and raise what it raises (not collective)."""
        self._snapshot.finalize()

    def _run(self, action: Callable[[], Any]) -> list[Any]:
        return allgather_checked(self._comm, _OPERATION, action)

    def _target(self, trainer: Any) -> Any:
        return trainer if self._snapshot._target is None else self._snapshot._target

    def _write(self, trainer: Any, state: State, token: str) -> None:
        name, writer = self._snapshot.filename, self._snapshot.writer
        name = name(trainer) if callable(name) else name.format(trainer)
        shard, iteration = Shard(state), int(getattr(trainer.updater, "iteration", 0))
        if not isinstance(writer, SimpleWriter):  # it writes while training goes on
            shard = shard.copy(into=Shard())
        head = Head(name, iteration, token, self._set_index, len(self._set_leaders))
        writer(name, trainer.out, encode(head, shard))

    def _load(self, trainer: Any) -> None:
        folder = Path(trainer.out)
        pattern, suffix = self._snapshot.filename.removesuffix(self._suffix), self._suffix
        views = self._run(lambda: _find(folder, pattern, suffix) if self._is_leader else [])
        found = [views[leader] for leader in self._set_leaders]
        if not any(found):
            return
        shared = set(found[0]).intersection(*found)
        if not shared:
            raise RuntimeError(
                f"rank {self._comm.rank}: there is no snapshot that all replica sets have in "
                f"{trainer.out}: "
                + "; ".join(
                    f"set {index} (read by rank {leader}) has {names or 'none'}"
                    for index, (leader, names) in enumerate(
                        zip(self._set_leaders, found, strict=True)
                    )
                )
            )
        newest = [name for name in found[0] if name in shared][-1]
        ahead = sorted({names[-1] for names in found} - {newest})
        skipped = dict.fromkeys(ahead, "not all replica sets have it")
        name, state = self._newest_whole(folder, [n for n in found[0] if n in shared], skipped)
        if skipped and self._comm.rank == 0:
            text = f"{_explained(skipped)}; loading {name}"
            print(f"chainermn: snapshot {text}", file=sys.stderr, flush=True)
        with self._comm.split(self._set_index, self._comm.rank) as members:
            state = members.bcast_obj(state)
        with raise_on_all_ranks(self._comm, _OPERATION):
            anew = self._restore(self._target(trainer), state, name)
        if anew and self._comm.rank == 0:
            text = f"{name} is of another number of ranks; begun anew: {', '.join(anew)}"
            print(f"chainermn: snapshot {text}", file=sys.stderr, flush=True)
        mark_synchronized_if_equal(self._comm, self._target(trainer))

    def _newest_whole(
        self, folder: Path, names: list[str], skipped: dict[str, str]
    ) -> tuple[str, State]:
        """Return the last of ``names`` that all sets can read, and its state here (collective)."""
        for name in reversed(names):
            state: State = {}
            path = folder / (name + self._suffix)

            def verify(path: Path = path, state: State = state) -> str | Head | None:
                if not self._is_leader:
                    return None
                try:
                    state.update(read_shard(path).shared)
                    return read_head(path)
                except (OSError, DamagedError) as error:
                    return str(error)

            found = [each for each in self._run(verify) if each is not None]
            problems = [each for each in found if isinstance(each, str)]
            if len({each.id for each in found if isinstance(each, Head)}) > 1:
                problems.append("the files of its replica sets are of several snapshots")
            if not problems:
                return name, state
            skipped[name] = ", ".join(problems)
        raise RuntimeError(
            f"rank {self._comm.rank}: no snapshot in {folder} is complete: {_explained(skipped)}; "
            "mend the files, or remove them to start without"
        )

    def _restore(self, target: Any, state: State, name: str) -> list[str]:
        """Load a state; return what begins anew, since other ranks have saved it."""
        named, size = np.asarray(state[_TAKEN_BY]).tolist()
        if named != self._named:
            raise StateError(
                f"the snapshot {name} was taken with {named} replica sets named, not {self._named}"
            )
        anew = list[str]()
        if size != self._comm.size:
            state, anew = adapt(target, [state] * size, self._comm.rank, self._comm.size)
        else:
            _require_as_many_examples(target, state)
        load_state_dict(target, state)
        recall_places(target, state)
        return anew


def _explained(skipped: dict[str, str]) -> str:
    return "; ".join(f"{name} skipped: {why}" for name, why in skipped.items())


def _find(folder: Path, name: str, suffix: str) -> list[str]:
    """Return a set's snapshots without their suffix, oldest first; remove what killed jobs left."""
    if not folder.is_dir():
        return []
    # The place of the iteration is in braces.
    before, after = name.split("{")[0], name.split("}")[-1] if "{" in name else ""
    for path in folder.glob("tmp*"):  # in which Chainer's writers left half a snapshot
        if before and path.name.startswith("tmp" + before) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    pattern = re.compile(re.escape(before) + ".*" + re.escape(after + suffix))
    paths = [folder / each for each in os.listdir(folder) if pattern.fullmatch(each)]
    paths.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return [path.name.removesuffix(suffix) for path in paths]


def _examples(target: Any) -> dict[str, int]:
    """Return how many examples the iterators of a trainer or updater have, where known."""
    datasets: dict[str, Any] = {
        name: getattr(each, "dataset", None) for name, each in iterators_of(target).items()
    }
    return {name: len(each) for name, each in datasets.items() if hasattr(each, "__len__")}


def _require_as_many_examples(target: Any, state: State) -> None:
    """Refuse an iterator's position in other examples, which would seem to fit."""
    for name, here in _examples(target).items():
        taken = state.get(_EXAMPLES + name)
        if taken is not None and int(taken) != here:
            raise StateError(
                f"iterator {name!r} has {here} examples here and had {int(taken)} there: its "
                "place in them belongs to a rank, and the data are divided differently now. Go "
                "on with as many ranks and the same data, or take snapshots of the model and "
                "the optimizer alone (target=...)"
            )
