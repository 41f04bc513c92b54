"""The files of checkpoints: their names, the manifest, and which of them are in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .atomic_file import TEMPORARY, FileDigest, digest_of, sync_folder

_FORMAT = 1
# Suffix of a rank's file until its generation has a manifest.
_STAGING = ".new"


@dataclass(frozen=True)
class Manifest:
    """The manifest: which files, on all ranks' disks when it is written, are a generation."""

    name: str
    iteration: int
    files: Sequence[FileDigest]  # of each rank

    def encode(self) -> bytes:
        """Return the manifest as JSON, with a checksum of its own."""
        body = {"format": _FORMAT, **asdict(self)}
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps({"record": body, "sha256": digest}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest that :meth:`encode` made; ValueError if any byte differs."""
        try:
            body = json.loads(data)["record"]
            files = [FileDigest(each["size"], each["sha256"]) for each in body["files"]]
            manifest = cls(body["name"], body["iteration"], files)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"it is no manifest ({type(error).__name__}: {error})") from error
        if manifest.encode() != data:
            raise ValueError("its checksum differs")
        return manifest


@dataclass(frozen=True)
class Listing:
    """Which files of a run are in a folder."""

    states: dict[int, list[Path]]  # files of any rank, by iteration
    staged: dict[int, list[Path]]  # the same, not committed when they were written
    manifests: set[int]  # iterations
    unfinished: list[Path]  # files that were being written


@dataclass(frozen=True)
class CheckpointPaths:
    """The files of a run in one folder: for each iteration, one a rank and a manifest."""

    folder: Path
    name: str

    def state(self, rank: int, iteration: int) -> Path:
        """Return a rank's file, ``<name>.<rank>.<iteration>``, which exists once committed."""
        return self.folder / f"{self.name}.{rank}.{iteration}"

    def manifest(self, iteration: int) -> Path:
        """Return the manifest, which only rank 0's folder needs to have."""
        return self.folder / f"{self.name}.commit.{iteration}"

    def staging(self, rank: int, iteration: int) -> Path:
        """Return a rank's file until the manifest is written; then it is :meth:`state`."""
        # The manifest decides: before it is written, the generation doesn't exist (or is that of
        # older files), and from then on it is that of these files, whatever their names.
        path = self.state(rank, iteration)
        return path.with_name(path.name + _STAGING)

    def publish(self, rank: int, iteration: int) -> None:
        """Rename a rank's staged file. Nothing is lost if that doesn't reach the disk."""
        os.replace(self.staging(rank, iteration), self.state(rank, iteration))

    def unpublish(self, rank: int, iterations: Iterable[int]) -> None:
        """Rename those files that a rank has as before they were committed."""
        for iteration in iterations:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.state(rank, iteration), self.staging(rank, iteration))
        sync_folder(self.folder)

    def recover_publish(self, rank: int, manifest: Manifest) -> None:
        """Publish a rank's staged file if the manifest is about it; a job may have been killed."""
        path = self.staging(rank, manifest.iteration)
        if rank >= len(manifest.files) or not path.exists():
            return
        with path.open("rb") as file:
            is_committed = digest_of(file) == manifest.files[rank]
        if is_committed:
            self.publish(rank, manifest.iteration)
            sync_folder(self.folder)

    def listing(self) -> Listing:
        """Return the files of this run; none where there is no folder."""
        listing = Listing({}, {}, set(), [])
        suffix = f"((?:{re.escape(_STAGING)})?)((?:{re.escape(TEMPORARY)})?)"
        pattern = re.compile(rf"{re.escape(self.name)}\.(\d+|commit)\.(\d+){suffix}", re.A)
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.folder)
        for path in map(self.folder.joinpath, names):
            if found := pattern.fullmatch(path.name):
                of, iteration, staging, temporary = found.groups()
                if temporary:
                    listing.unfinished.append(path)
                elif of != "commit":
                    files = listing.staged if staging else listing.states
                    files.setdefault(int(iteration), []).append(path)
                elif not staging:
                    listing.manifests.add(int(iteration))
        return listing

    def read_manifest(self, iteration: int) -> Manifest | str:
        """Return the manifest, or why it can't be used."""
        path = self.manifest(iteration)
        try:
            manifest = Manifest.decode(path.read_bytes())
            if (manifest.name, manifest.iteration) != (self.name, iteration):
                raise ValueError(f"it is that of {manifest.name!r}, iteration {manifest.iteration}")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            return f"the manifest {path.name} is damaged: {reason}"
        return manifest

    def verify(self, rank: int, manifest: Manifest) -> str | None:
        """Return why a rank's file isn't what the manifest says; None when it is."""
        path = self.state(rank, manifest.iteration)
        expected = manifest.files[rank]
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.size:
                    return f"{path.name} is damaged: {size} bytes instead of {expected.size}"
                if digest_of(file) != expected:
                    return f"{path.name} is damaged: its checksum differs"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} can't be read: {error.strerror or error}"
        return None
