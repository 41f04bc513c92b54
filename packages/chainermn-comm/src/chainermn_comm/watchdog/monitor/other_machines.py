"""The other machines as the first machine's monitor knows them: their monitors connect to it."""

from __future__ import annotations

import hmac
import math
import socket
import time
from functools import partial
from selectors import EVENT_READ, BaseSelector
from typing import Any

from ..diagnosis import Rank, rank_from_json
from ..report import rank_list
from .link import Link, Message, is_cut

# Connections that have proved nothing yet: the most, where the oldest goes, and their
# time.
MOST_STRANGERS = 256
GREETING_SECONDS = 5.0
# The most that are accepted before those that have come are read again.
MOST_ACCEPTED = 64
# After a connection that could not be accepted: at once it would be so again, until
# strangers go.
REFUSED_SECONDS = 0.1


class MachineLink(Link):
    """A connection of another machine's monitor, or of a stranger, and the ranks pushed by it."""

    machine = ""  # a name that it has given itself
    pushed_at = -math.inf
    has_stacks = False  # whether the ranks came with their stacks
    cut_at: float | None = None  # when it was found to be cut; None if it wasn't

    def __init__(self, connected: socket.socket, silence: float) -> None:
        super().__init__(connected, silence)
        self.came_at = time.monotonic()
        self.ranks: list[Rank] = []

    @property
    def name(self) -> str:
        if not self.ranks:  # they are about to come
            return "a machine"
        numbers = rank_list([rank.world for rank in self.ranks])
        return f"{numbers} on {self.ranks[0].host}"

    def take(self, message: Message) -> None:
        self.ranks = [rank_from_json(rank) for rank in message["ranks"]]
        self.has_stacks = message["has_stacks"]
        self.pushed_at = time.monotonic()


class OtherMachines:
    """The machines that are connected, and those that were."""

    def __init__(self, selector: BaseSelector) -> None:
        """Have none, as long as this machine isn't the first of several."""
        # By their machines, those that are no more and were proven.
        self.lost: dict[str, MachineLink] = {}
        self._links: list[MachineLink] = []  # in the order in which they came
        self._selector = selector

    def listen(
        self, listener: int, first_machine: dict[str, Any], silence: float
    ) -> None:
        """Listen; ``first_machine`` is what the ranks have agreed on, the secret among it."""
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._selector.register(self._listener, EVENT_READ, self._accept)
        self._secret = first_machine
        self._silence = silence

    @property
    def linked(self) -> list[MachineLink]:
        return [link for link in self._links if link.is_proven]

    @property
    def strangers(self) -> list[MachineLink]:
        return [link for link in self._links if not link.is_proven]

    def silent(self, since: float, with_stacks: bool) -> list[MachineLink]:
        """Return the connections by which no records, or none with stacks, have come since."""
        return [
            link
            for link in self.linked
            if link.pushed_at < since or (with_stacks and not link.has_stacks)
        ]

    def pushed_since(self, since: float) -> list[Rank]:
        """Return the ranks of the machines whose records have come since."""
        return [
            rank
            for link in self.linked
            if link.pushed_at > since
            for rank in link.ranks
        ]

    def cut_at(self) -> float | None:
        """Return when the first of the links was cut that still are; None if none is."""
        times = [link.cut_at for link in self.lost.values() if link.cut_at is not None]
        return min(times, default=None)

    def keep(self, now: float) -> None:
        """Drop the connections that take too long to prove what they are."""
        # The kernel accepts connections also for a process that is stopped.
        for link in self.strangers:
            if now - link.came_at > GREETING_SECONDS:
                self.lose(link)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the monitors of all machines that are connected."""
        for link in self.linked:
            try:
                link.send(kind, **fields)
            except OSError as error:
                self.lose(link, error)

    def lose(self, link: MachineLink, error: Exception | None = None) -> None:
        """Close a connection that is of no use any more, because of this error if of one."""
        if link not in self._links:
            return
        self._links.remove(link)
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.is_proven:
            self.lost[link.machine] = link
            if is_cut(error):
                link.cut_at = time.monotonic()

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTED):
            strangers = self.strangers
            if len(strangers) >= MOST_STRANGERS:
                self.lose(strangers[0])
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # such as that no descriptor is left
                time.sleep(REFUSED_SECONDS)
                return
            link = MachineLink(accepted, self._silence)
            self._links.append(link)
            self._selector.register(accepted, EVENT_READ, partial(self._read, link))

    def _read(self, link: MachineLink) -> None:
        try:
            for message in link.receive():
                if link.is_proven:
                    link.take(message)
                else:
                    self._greet(link, message)
        except Exception as error:  # whatever a stranger sends
            self.lose(link, error)

    def _greet(self, link: MachineLink, hello: Message) -> None:
        """Take a connection for another machine's if its first message has the secret."""
        if not hmac.compare_digest(hello["question"], self._secret["question"]):
            raise ValueError("a greeting without the secret")
        for other in self.linked:
            if other.machine == hello["machine"]:  # whose end isn't known here yet
                self.lose(other)
        link.machine = hello["machine"]
        link.is_proven = True
        self.lost.pop(link.machine, None)
        link.send("welcome", answer=self._secret["answer"])
        link.send("push", with_stacks=False)
