"""The agreement of ranks on gradients that lie in a file of each machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase, Reducer

from ..agreement import OPERATION


class ShardReducer(Reducer):
    """Lets ranks agree, and tell each other of their gradients.

    Attributes:
        entries: facts about gradients that must be equal on all ranks.
    """

    def __init__(self, communicator: CommunicatorBase, reducer: Reducer) -> None:
        """Agree on ``communicator`` by a ``reducer`` without gradients."""
        self._communicator = communicator
        self._reducer = reducer
        self.entries: list[tuple[str, str]] = []
        self._own = b""  # what this rank tells, if it has gradients
        self._rows: list[bytes] = []  # what each rank tells

    def tell(self, are_in_file: bool, missing: Sequence[int]) -> None:
        """Tell whether parameters and gradients are in the file, and which gradients are missing.

        Parameters that have values are numbered.
        """
        self._own = bytes([are_in_file]) + np.array(missing, np.uint32).tobytes()

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        rows = self._reducer.agree(signature, payload + self._own)
        length = len(payload)
        self._rows = [row[length:] for row in rows]
        if self.entries and all(self._rows) and len(set(self._rows)) > 1:
            self._communicator.handshake(OPERATION, self.entries)
        return [row[:length] for row in rows]

    def are_all_in_file(self) -> bool:
        """Return whether all ranks have told that they have everything in the file."""
        return all([row.startswith(b"\1") for row in self._rows])

    def missing(self) -> list[set[int]]:
        """Return the numbers of the parameters of which each rank has no gradient."""
        return [set(np.frombuffer(row[1:], np.uint32).tolist()) for row in self._rows]
