"""The commit record of a checkpoint: what each rank's file must hold for the whole to be one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .durable import Contents

_FORMAT = 1


@dataclass(frozen=True)
class CommitRecord:
    """What rank 0 writes once all ranks' files of an iteration are on the disk."""

    name: str
    iteration: int
    files: Sequence[Contents]  # of each rank

    def encode(self) -> bytes:
        """The record as JSON, with a checksum of its own."""
        body = {
            "format": _FORMAT,
            "name": self.name,
            "iteration": self.iteration,
            "files": [asdict(each) for each in self.files],
        }
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps({"record": body, "sha256": digest}, indent=1).encode() + b"\n"


def decode(data: bytes) -> CommitRecord:
    """The record that :meth:`CommitRecord.encode` made.

    Raises:
        ValueError: any byte differs from what it made.
    """
    try:
        body = json.loads(data)["record"]
        files = [Contents(each["size"], each["sha256"]) for each in body["files"]]
        record = CommitRecord(body["name"], body["iteration"], files)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is no commit record ({type(error).__name__}: {error})") from error
    if record.encode() != data:
        raise ValueError("its checksum differs")
    return record
