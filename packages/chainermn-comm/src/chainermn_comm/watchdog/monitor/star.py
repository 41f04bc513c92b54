"""The star of a job's monitors: each keeps one connection to the first machine's, the hub.

Nothing is sent before a call waits for long or a rank has failed: the kernel sees
whether the other machine is there. The monitor's selector calls what is ready; only
connecting to the hub waits.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from functools import partial
from selectors import EVENT_READ, BaseSelector
from typing import Any

from .connection import DIGITS, Connection, Message, is_cut

# Connections that have proved nothing yet: the most, where the oldest goes, and their
# time.
MOST_STRANGERS, GREETING_SECONDS = 256, 5.0
# That are taken before those that have come are read again.
MOST_ACCEPTED = 64
# After a connection that could not be taken: at once it would be so again, until
# strangers go.
REFUSED_SECONDS = 0.1
# To reach the hub, for which all else waits, and before it is tried again.
CONNECT_SECONDS, RETRY_SECONDS = 1.0, 2.0

# Is given messages, and the number of their machine.
Take = Callable[[int, Message], None]


class Star:
    """One machine's side. The first one's, number 0, is the hub; the others are spokes."""

    def __init__(
        self,
        selector: BaseSelector,
        listener: socket.socket | None,
        place: dict[str, Any],
        silence: float,
        take: Take,
    ) -> None:
        """Listen, or connect; ``take`` is given what isn't a reply."""
        self.number: int = place["number"]
        self.is_hub = self.number == 0
        # Of all machines, by their numbers; a spoke knows the hub's alone.
        self.names: list[str] = place["names"]
        # To machines that have proved what they are.
        self.links: dict[int, Connection] = {}
        self._selector, self._secret, self._silence = selector, place["secret"], silence
        self._take = take
        self._strangers: dict[Connection, float] = {}  # when each came, the first first
        # Of machines that can't be reached any more.
        self._cut_since: dict[int, float] = {}
        self._query = 0
        self._replies: dict[int, Message] = {}
        self._endpoints = list(place["endpoints"])  # of the hub
        self._tried_at, self._was_linked = -math.inf, False
        if listener is not None:
            listener.setblocking(False)
            selector.register(listener, EVENT_READ, partial(self._accept, listener))
        self.keep()

    def keep(self) -> None:
        """Drop those that take too long to prove what they are; connect a spoke if it isn't."""
        now = time.monotonic()
        # The kernel takes a connection in, also for a process that is stopped.
        for one in [
            one
            for one, came in self._strangers.items()
            if now - came > GREETING_SECONDS
        ]:
            self._lose(one)
        is_done = self.links or self._strangers or not self._endpoints
        if not is_done and now - self._tried_at > RETRY_SECONDS:
            self._tried_at = now
            self._connect()

    def lost(self) -> list[str]:
        """Return the names of the machines that can't be reached any more."""
        late = time.monotonic() - self._silence
        return [
            self.names[number]
            for number, at in sorted(self._cut_since.items())
            if at <= late
        ]

    def tell(self, kind: str, only: int | None = None, **fields: Any) -> None:
        """Send a message to all that this one has a connection to, or to one of them."""
        for number, connection in list(self.links.items()):
            if only in (None, number):
                try:
                    connection.send(kind, **fields)
                except OSError as error:
                    self._lose(connection, error)

    def ask(
        self, what: str, seconds: float, poll: Callable[[float], None]
    ) -> Callable[[], dict[int, Message]]:
        """Ask all spokes; return a function that waits for what they say, by their numbers."""
        deadline = time.monotonic() + seconds
        self._query, self._replies = self._query + 1, {}
        if self.is_hub:
            self.tell("ask", what=what, query=self._query)
        asked = set(self.links) if self.is_hub else set()

        def wait() -> dict[int, Message]:
            while asked & self.links.keys() - self._replies.keys():
                if (left := deadline - time.monotonic()) <= 0:
                    break
                poll(left)
            return self._replies

        return wait

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MOST_ACCEPTED):
            if len(self._strangers) >= MOST_STRANGERS:
                self._lose(next(iter(self._strangers)))
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # such as that no descriptor is left
                time.sleep(REFUSED_SECONDS)
                return
            self._greet(accepted)

    def _connect(self) -> None:
        # The next one, if this is not the hub's: a bridge's may be the same elsewhere.
        self._endpoints.append(self._endpoints.pop(0))
        try:
            made = socket.create_connection(self._endpoints[-1], CONNECT_SECONDS)
        except OSError as error:
            self._note(0, is_cut(error) or isinstance(error, TimeoutError))
        else:
            self._greet(made)

    def _greet(self, made: socket.socket) -> None:
        try:
            connection = Connection(made, self._secret, self._silence)
        except OSError:  # it has gone already
            made.close()
            return
        self._strangers[connection] = time.monotonic()
        self._selector.register(made, EVENT_READ, partial(self._read, connection))

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                kind = message["kind"]
                if kind == DIGITS:
                    if not self.is_hub:
                        connection.send("hello", number=self.number)
                elif kind == "hello":
                    self._link(connection, message["number"])
                    connection.send("welcome")
                elif kind == "welcome":
                    self._link(connection, 0)
                    self._endpoints = self._endpoints[-1:]
                elif kind != "reply":
                    self._take(connection.number, message)
                elif message["query"] == self._query:
                    self._replies[connection.number] = message
        except Exception as error:  # whatever a stranger sends
            self._lose(connection, error)

    def _link(self, connection: Connection, number: int) -> None:
        if number in self.links:  # it was started again
            self._lose(self.links[number])
        del self._strangers[connection]
        connection.number = number
        self.links[number] = connection
        self._cut_since.pop(number, None)
        self._was_linked = True

    def _lose(self, connection: Connection, error: Exception | None = None) -> None:
        was_stranger = self._strangers.pop(connection, None) is not None
        number = connection.number
        if was_stranger or self.links.get(number) is connection:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            if not was_stranger or not self.is_hub:
                self._note(number, is_cut(error))
            if not was_stranger:
                del self.links[number]

    def _note(self, number: int, cut: bool) -> None:
        """Note that a connection has ended: its link was cut, or the other machine is there."""
        if not cut:
            self._cut_since.pop(number, None)
        elif self._was_linked:
            # The kernel has waited for a connection already.
            waited = self._silence if number in self.links else 0.0
            self._cut_since.setdefault(number, time.monotonic() - waited)
