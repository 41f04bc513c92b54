"""What ranks tell `chainermn launch`: short records in a rank's standard error.

Nothing else reaches from any host to the launcher without a shared folder or an open port.
A record is JSON between two marks, cut into frames that a pipe carries in one piece.
"""

from __future__ import annotations

import json
import re
from typing import Any

MARK = "\x1e"
# A frame must stay below 4096 bytes, with marks and heading: so much a pipe carries whole, and
# Open MPI's launcher reads at a time.
PART_CHARACTERS = 2000
# What begins like a frame and is longer is none.
LONGEST_FRAME = 4096
# What mpiexec puts before a line when it is asked for ranks: MPICH's `[0] `, Open MPI's
# `[1,0]<stderr>: ` with the job's name or number before the comma.
TAG = rb"\[(?:[^\[\],\s]{0,200},)?(\d{1,9})\](?:<std(?:out|err)>:)? ?"
OMPI_TAG = re.compile(rb"\[[^\[\],\s]{0,200},(\d{1,9})\]<std(?:out|err)>: ?")


def frames(launch: str, rank: int, serial: int, record: dict[str, Any]) -> list[bytes]:
    """A record as a rank writes it: frames that are each to be written in one piece.

    Args:
        launch: tells this launch's records from any other text.
        rank: whose record it is.
        serial: number of the record among the rank's.
        record: what JSON can hold.
    """
    text = json.dumps(record)  # all ASCII, without control characters
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    return [
        f"{MARK}{launch} {rank} {serial} {number} {len(parts)} {part}{MARK}\n".encode()
        for number, part in enumerate(parts)
    ]


class Reader:
    """Takes the records out of a stream of mpiexec's output."""

    def __init__(self, launch: str) -> None:
        mark = MARK.encode()
        self._frame = re.compile(
            rb"(?:%s)?%s%s (\d+) (\d+) (\d+) (\d+) ([ -~]*)%s\r?\n?"
            % (TAG, mark, re.escape(launch.encode()), mark)
        )
        self._begun = re.compile(rb"(?:%s)?%s[^%s]*\Z" % (TAG, mark, mark))
        self._held = b""
        self._parts: dict[tuple[int, int], dict[int, str]] = {}
        self.records: list[tuple[int, dict[str, Any]]] = []

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream.

        Returns:
            What is to be shown of them. Records are added to ``records`` as (rank, record).
        """
        shown = self._frame.sub(self._take, self._held + data)
        begun = self._begun.search(shown)
        if begun is None or len(shown) - begun.start() > LONGEST_FRAME:
            self._held = b""
            return shown
        self._held = shown[begun.start() :]
        return shown[: begun.start()]

    def close(self) -> bytes:
        """What is left to be shown at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _take(self, frame: re.Match[bytes]) -> bytes:
        rank, serial, number, count = (int(one) for one in frame.groups()[-5:-1])
        parts = self._parts.setdefault((rank, serial), {})
        parts[number] = frame.groups()[-1].decode()
        if len(parts) == count:
            del self._parts[rank, serial]
            self.records.append((rank, json.loads("".join(parts[n] for n in range(count)))))
        return b""


def with_plain_ranks(shown: bytes) -> bytes:
    """Open MPI's tags as MPICH writes them, `[0] `."""
    return OMPI_TAG.sub(rb"[\1] ", shown)
