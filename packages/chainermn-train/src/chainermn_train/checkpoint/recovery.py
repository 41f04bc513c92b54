"""The checkpoint that a job goes on from: the newest committed one, complete on all ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_on_all_ranks
from .files import CheckpointPaths, Listing, Manifest
from .state_dict import is_checkpoint

OPERATION = "checkpoint"


@dataclass(frozen=True)
class Scan:
    """What the ranks' folders hold; the same on every rank."""

    manifests: Mapping[int, Manifest | str]  # by iteration; or why a manifest can't be used
    # Iterations without a manifest, for which a rank has
    orphaned: Set[int]  # a file that was committed once
    staged: Set[int]  # one that was not
    unrecognized: Set[str]  # files without a manifest that only have the name of ours


def scan(comm: CommunicatorBase, paths: CheckpointPaths) -> Scan:
    """Find the checkpoints in each rank's folder; rename what was committed (collective)."""

    def read() -> tuple[Listing, dict[int, Manifest | str]]:
        listing = paths.listing()
        mine = listing.manifests if comm.rank == 0 else ()
        return listing, {each: paths.read_manifest(each) for each in mine}

    views = allgather_checked(comm, OPERATION, read)
    manifests = views[0][1]
    mine = views[comm.rank][0].states

    def recover() -> set[str]:
        for manifest in manifests.values():
            if isinstance(manifest, Manifest):
                paths.recover_publish(comm.rank, manifest)
        files = itertools.chain(*(mine[each] for each in mine.keys() - manifests.keys()))
        return {path.name for path in files if not is_checkpoint(path)}

    unrecognized = set().union(*allgather_checked(comm, OPERATION, recover))
    orphaned = {
        iteration
        for listing, _ in views
        for iteration, files in listing.states.items()
        if iteration not in manifests and any(path.name not in unrecognized for path in files)
    }
    staged = {iteration for listing, _ in views for iteration in listing.staged}
    return Scan(manifests, orphaned, staged - manifests.keys() - orphaned, unrecognized)


def select_latest(
    comm: CommunicatorBase, paths: CheckpointPaths, found: Scan
) -> tuple[int | None, dict[int, str]]:
    """Return the newest generation that is whole on all ranks, and why newer ones can't be used.

    Collective. RuntimeError if there are checkpoints, but none is whole and of as many ranks.
    """
    skipped: dict[int, str] = {}
    for iteration in sorted(found.manifests.keys() | found.orphaned | found.staged, reverse=True):
        manifest = found.manifests.get(iteration)
        if isinstance(manifest, Manifest):
            errors = _verify(comm, paths, manifest)
            if not errors:
                return iteration, skipped
            skipped[iteration] = errors
        elif iteration in found.staged:
            skipped[iteration] = "it was never committed: the job ended while it was saved"
        else:
            missing = f"the manifest {paths.manifest(iteration).name} is missing"
            skipped[iteration] = manifest or missing
    if found.manifests or found.orphaned:
        raise RuntimeError(
            f"rank {comm.rank}: no checkpoint of {paths.name!r} in {paths.folder} can "
            f"be used: {explain(skipped, 'iteration ')}; mend the files, or remove them to start "
            "at 0"
        )
    return None, skipped


def _verify(comm: CommunicatorBase, paths: CheckpointPaths, manifest: Manifest) -> str:
    """Return what is wrong with the ranks' files, "" if nothing is (collective)."""
    if len(manifest.files) != comm.size:
        raise RuntimeError(
            f"rank {comm.rank}: the checkpoint of {paths.name!r} at iteration "
            f"{manifest.iteration} was written by {len(manifest.files)} ranks, this job has "
            f"{comm.size}: a checkpoint holds what belongs to each rank, so go on with as many, "
            "or use multi_node_snapshot for state that is the same on all"
        )
    views = allgather_checked(comm, OPERATION, lambda: paths.verify(comm.rank, manifest))
    return ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(views) if each)


def explain(skipped: Mapping[Any, str], what: str = "") -> str:
    """Say why generations or snapshots, by what distinguishes them, were not taken."""
    return "; ".join(f"{what}{each} skipped: {why}" for each, why in skipped.items())


def remove_stale(
    comm: CommunicatorBase, paths: CheckpointPaths, found: Scan, newest: int | None
) -> None:
    """Remove what a killed job left unfinished (collective: no rank writes before all are done).

    Files of others stay, and rank 0 says so. So do files whose manifest is missing, unless
    it was removed because there was a newer generation: ``newest`` is the newest that is not known
    to be damaged.
    """
    if found.unrecognized and comm.rank == 0:
        print(
            f"chainermn: checkpoint {paths.name!r}: {', '.join(sorted(found.unrecognized))} in "
            f"{paths.folder} not touched, since no checkpointer of this version wrote "
            "them; a save at the same iteration would replace them",
            file=sys.stderr,
            flush=True,
        )
    with raise_on_all_ranks(comm, OPERATION):
        listing = paths.listing()
        expired = (
            listing.states.get(iteration, [])
            for iteration in found.orphaned
            if newest is not None and iteration < newest
        )
        staged = (files for each, files in listing.staged.items() if each not in found.manifests)
        # Committed files have been renamed, if this job has as many ranks.
        leftover = [
            paths.staging(comm.rank, iteration)
            for iteration, manifest in found.manifests.items()
            if isinstance(manifest, Manifest)
        ]
        for path in itertools.chain(listing.unfinished, leftover, *staged, *expired):
            if path.name not in found.unrecognized:
                path.unlink(missing_ok=True)  # ranks may share the folder
