"""Finds the checkpoint that a job goes on from: the newest committed one that is whole on all."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from chainermn_comm import CommunicatorBase

from .agreement import call_or_raise
from .commit_record import CommitRecord
from .generations import Generations, Listing
from .npz_state import is_ours


@dataclass(frozen=True)
class Survey:
    """What lies in the ranks' folders; the same on every rank."""

    records: Mapping[int, CommitRecord | str]  # or why it is none
    # Iterations without a record on rank 0, for which a rank has
    lost: Set[int]  # a file that was committed once
    pending: Set[int]  # one that was not
    foreign: Set[str]  # files without a record that only have the name of ours


@dataclass(frozen=True)
class Choice:
    """Which generation to go on from; the same on every rank."""

    record: CommitRecord | None
    skipped: Mapping[int, str]  # why newer ones don't serve


def survey(comm: CommunicatorBase, generations: Generations) -> Survey:
    """Look for checkpoints (collective); each rank in its own folder, which may be the same."""

    def look() -> tuple[Listing, dict[int, CommitRecord | str]]:
        listing = generations.listing()
        mine = listing.records if comm.rank == 0 else ()
        return listing, {each: generations.read_record(each) for each in mine}

    views = call_or_raise(comm, look)
    records = views[0][1]
    whole = [each for each in records.values() if isinstance(each, CommitRecord)]
    call_or_raise(comm, lambda: _finish_naming(comm.rank, generations, whole))
    mine = views[comm.rank][0].states
    without = {iteration: paths for iteration, paths in mine.items() if iteration not in records}
    marks = call_or_raise(
        comm, lambda: {path: is_ours(path) for path in itertools.chain(*without.values())}
    )
    foreign = {path.name for view in marks for path, ours in view.items() if not ours}
    lost = {
        iteration
        for listing, _ in views
        for iteration, paths in listing.states.items()
        if iteration not in records and any(path.name not in foreign for path in paths)
    }
    pending = {iteration for listing, _ in views for iteration in listing.pending}
    return Survey(records, lost, pending - records.keys() - lost, foreign)


def _finish_naming(rank: int, generations: Generations, records: Iterable[CommitRecord]) -> None:
    for record in records:
        generations.finish_naming(rank, record)


def choose(comm: CommunicatorBase, generations: Generations, found: Survey) -> Choice:
    """The newest committed generation of which every rank's file is whole (collective).

    Raises:
        RuntimeError: on every rank: there are checkpoints, but none is whole, or they were
            written by another number of ranks.
    """
    skipped: dict[int, str] = {}
    for iteration in sorted(found.records.keys() | found.lost | found.pending, reverse=True):
        record = found.records.get(iteration)
        if isinstance(record, CommitRecord):
            damages = _damages(comm, generations, record)
            if not damages:
                return Choice(record, skipped)
            skipped[iteration] = damages
        elif iteration in found.pending:
            skipped[iteration] = "it was never committed: the job ended while it was saved"
        else:
            missing = f"the commit record {generations.record(iteration).name} is missing"
            skipped[iteration] = record or missing
    if found.records or found.lost:
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
    """In words why generations, by their iterations, were not taken."""
    return "; ".join(f"iteration {iteration} skipped: {why}" for iteration, why in skipped.items())


def sweep(
    comm: CommunicatorBase, generations: Generations, found: Survey, newest: int | None
) -> None:
    """Remove what a killed job left half done (collective: nobody writes before all have swept).

    Files of others stay, and rank 0 says so. So do files whose record is lost, unless it was
    removed because there was a newer generation.

    Args:
        comm: the ranks.
        generations: the folder, and the run.
        found: what lies there.
        newest: iteration of the newest generation that is not known to be damaged; None if none.
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
        collected = (
            listing.states.get(iteration, [])
            for iteration in found.lost
            if newest is not None and iteration < newest
        )
        pending = (paths for each, paths in listing.pending.items() if each not in found.records)
        # Those that a record is about have got their names, if this job has as many ranks.
        whole = (each for each in found.records.values() if isinstance(each, CommitRecord))
        stale = [generations.pending(comm.rank, each.iteration) for each in whole]
        for path in itertools.chain(listing.unfinished, stale, *pending, *collected):
            if path.name not in found.foreign:
                path.unlink(missing_ok=True)  # ranks may share the folder

    call_or_raise(comm, remove)
