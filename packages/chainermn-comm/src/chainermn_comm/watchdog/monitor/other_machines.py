"""The other machines as the first machine's monitor knows them: their monitors connect to it."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from selectors import EVENT_READ, BaseSelector
from typing import Any

from ...errors import rank_list
from ..diagnosis import Rank, rank_from_json
from .link import Link, Message


class Machine:
    """A machine whose monitor has connected, or a stranger, and the ranks that it has pushed."""

    def __init__(self, connected: socket.socket, others: OtherMachines) -> None:
        """Accept a connection; add it to the other machines once it has brought the secret."""
        self._others = others
        self.link = Link(
            others.selector,
            connected,
            others.description["question"],
            others.silence,
            self._handle,
        )
        self.ranks: list[Rank] = []  # as last pushed
        # The number of the last question that the machine has answered.
        self.answered = 0

    @property
    def name(self) -> str:
        numbers = rank_list([rank.world for rank in self.ranks])
        return f"{numbers} on {self.ranks[0].host}"

    def _handle(self, message: Message) -> None:
        if message["kind"] == "hello":
            self._others.machines.append(self)
            answer = self._others.description["answer"]
            self.link.send("hello", secret=answer, number=0, with_stacks=False)
            return
        later = time.monotonic() - message["sent_at"]
        self.ranks = [rank_from_json(rank, later) for rank in message["ranks"]]
        self.answered = max(self.answered, message["number"])


class OtherMachines:
    """The machines that have connected."""

    def __init__(self, selector: BaseSelector) -> None:
        """Begin without machines. Only the first machine's monitor gets any."""
        self.machines: list[Machine] = []  # without strangers
        self.selector = selector

    def listen(self, listener: int, description: Message, silence: float) -> None:
        """Listen; ``description`` is this machine's, as all ranks have it, with the secrets."""
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self.selector.register(self._listener, EVENT_READ, self._accept)
        self.description = description
        self.silence = silence

    @property
    def linked(self) -> list[Machine]:
        """The machines whose links are open."""
        return [machine for machine in self.machines if machine.link.is_open]

    @property
    def known(self) -> list[Machine]:
        """The machines whose ranks are known, even if their links are lost."""
        return [machine for machine in self.machines if machine.ranks]

    def ranks(self) -> list[Rank]:
        """Return ranks as last pushed; of a machine whose link is lost only the failed ranks."""
        return [
            rank
            for machine in self.machines
            for rank in machine.ranks
            if machine.link.is_open or rank.has_failed
        ]

    def cut_at(self) -> float:
        """Return when a link was cut last; minus infinity if none was."""
        times = [machine.link.cut_at for machine in self.known]
        return max(times, default=-math.inf)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the monitors of all machines that are linked."""
        for machine in self.linked:
            machine.link.send(kind, **fields)

    def _accept(self) -> None:
        # Accept until nobody waits, or no descriptor is left.
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                Machine(accepted, self)
