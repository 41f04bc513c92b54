"""Finds the checkpoint that a job goes on from: the newest committed one that is whole on all."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from chainermn_comm import CommunicatorBase

from .agreement import call_or_raise
from .commit_record import CommitRecord
from .generations import Generations
from .npz_state import is_ours

# A job that is killed leaves one generation without a record: also one that writes in the
# background commits each before it writes the next.
_UNCOMMITTED_BY_A_KILL = 1


@dataclass(frozen=True)
class Survey:
    """What lies in the ranks' folders; the same on every rank."""

    records: Mapping[int, CommitRecord | str]  # or why it is none
    uncommitted: Set[int]  # iterations for which a rank has a file, and rank 0 no record
    foreign: Set[str]  # files without a record that only have the name of ours


@dataclass(frozen=True)
class Choice:
    """Which generation to go on from; the same on every rank."""

    record: CommitRecord | None
    skipped: Mapping[int, str]  # why newer ones don't serve


def survey(comm: CommunicatorBase, generations: Generations) -> Survey:
    """Look for checkpoints (collective); each rank in its own folder, which may be the same."""

    def look() -> tuple[dict[int, list[Path]], dict[int, CommitRecord | str]]:
        listing = generations.listing()
        mine = listing.records if comm.rank == 0 else ()
        return listing.states, {each: generations.read_record(each) for each in mine}

    views = call_or_raise(comm, look)
    records = views[0][1]
    whole = [each for each in records.values() if isinstance(each, CommitRecord)]
    call_or_raise(comm, lambda: _finish_replacing(comm.rank, generations, whole))
    without = {
        iteration: paths
        for iteration, paths in views[comm.rank][0].items()
        if iteration not in records
    }
    marks = call_or_raise(
        comm, lambda: {path: is_ours(path) for path in itertools.chain(*without.values())}
    )
    foreign = {path.name for view in marks for path, ours in view.items() if not ours}
    uncommitted = {
        iteration
        for states, _ in views
        for iteration, paths in states.items()
        if iteration not in records and any(path.name not in foreign for path in paths)
    }
    return Survey(records, uncommitted, foreign)


def _finish_replacing(rank: int, generations: Generations, records: Iterable[CommitRecord]) -> None:
    for record in records:
        generations.finish_replacing(rank, record)


def choose(comm: CommunicatorBase, generations: Generations, found: Survey) -> Choice:
    """The newest committed generation of which every rank's file is whole (collective).

    Raises:
        RuntimeError: on every rank: there are checkpoints, but none is whole, or they were
            written by another number of ranks.
    """
    skipped: dict[int, str] = {}
    for iteration in sorted(found.records.keys() | found.uncommitted, reverse=True):
        record = found.records.get(iteration)
        if isinstance(record, CommitRecord):
            damages = _damages(comm, generations, record)
            if not damages:
                return Choice(record, skipped)
            skipped[iteration] = damages
        else:
            skipped[iteration] = record or "it was never committed: there is no commit record"
    if found.records or len(found.uncommitted) > _UNCOMMITTED_BY_A_KILL:
        raise RuntimeError(
            f"rank {comm.rank}: no checkpoint of {generations.name!r} in {generations.folder} can "
            f"be used: {explain(skipped)}; mend the files, or remove them to start at 0"
        )
    return Choice(None, skipped)


def _damages(comm: CommunicatorBase, generations: Generations, record: CommitRecord) -> str:
    """What is wrong with the ranks' files, "" if nothing is (collective)."""
    if len(record.files) != comm.size:
        raise RuntimeError(
            f"rank {comm.rank}: the checkpoint of {generations.name!r} at iteration "
            f"{record.iteration} was written by {len(record.files)} ranks, this job has "
            f"{comm.size}: a checkpoint holds what belongs to each rank, so go on with as many, "
            "or use multi_node_snapshot for state that is the same on all"
        )
    views = call_or_raise(comm, lambda: generations.damage(comm.rank, record))
    return ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(views) if each)


def explain(skipped: Mapping[int, str]) -> str:
    return "; ".join(f"iteration {iteration} skipped: {why}" for iteration, why in skipped.items())


def sweep(comm: CommunicatorBase, generations: Generations, found: Survey) -> None:
    """Remove what a killed job left half done (collective: nobody writes before all have swept).

    Files of others stay, and rank 0 says so.
    """
    if found.foreign and comm.rank == 0:
        print(
            f"chainermn: checkpoint {generations.name!r}: {', '.join(sorted(found.foreign))} in "
            f"{generations.folder} not touched, since no checkpointer of this version wrote "
            "them; a save at the same iteration would replace them",
            file=sys.stderr,
            flush=True,
        )

    def remove() -> None:
        listing = generations.listing()
        abandoned = (listing.states.get(iteration, []) for iteration in found.uncommitted)
        for path in itertools.chain(listing.leftovers, *abandoned):
            if path.name in found.foreign:
                continue
            path.unlink(missing_ok=True)  # ranks may share the folder

    call_or_raise(comm, remove)
