"""The star of a job's monitors: each keeps one connection to the first machine's, the hub.

Nothing is sent before a call waits for long or a rank has failed: the kernel sees whether the other
machine is there. Nothing here has a thread: the monitor's selector calls what is ready, and only
what connects to another machine waits for it.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from selectors import EVENT_READ, BaseSelector
from typing import Any

from .connection import DIGITS, Connection, Message, is_cut

# Connections that have proved nothing yet: the most, where the oldest goes, and their time.
MOST_STRANGERS, GREETING_SECONDS = 256, 5.0
# That are taken before those that have come are read again.
MOST_ACCEPTED = 64
# After a connection that could not be taken: at once it would be so again.
REFUSED_SECONDS = 0.1
DISCARD_PORT = 9
# To reach the hub, for which all else waits, and before it is tried again.
CONNECT_SECONDS, RETRY_SECONDS = 1.0, 2.0

Take = Callable[[int, Message], None]  # is given messages, and the number of their machine


def _answers(addresses: list[str]) -> bool:
    """Return whether a machine answers at one of its addresses, be it that nobody listens there."""
    for address in addresses:
        try:
            socket.create_connection((address, DISCARD_PORT), CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            continue
        return True
    return False


class Hub:
    """The first machine's side; of a job of one machine, too."""

    def __init__(
        self,
        selector: BaseSelector,
        listeners: Iterable[socket.socket],
        star: dict[str, Any],
        silence: float,
        take: Take,
    ) -> None:
        """Listen; ``take`` is given what isn't a reply."""
        self.names: list[str] = star["names"]  # of all machines, by their numbers
        self._addresses: list[list[str]] = star["addresses"]
        self.connected: dict[int, Connection] = {}
        self._cut: set[int] = set()  # numbers of the machines whose links were cut
        self._selector, self._secret, self._silence = selector, star["secret"], silence
        self._take = take
        self._strangers: dict[Connection, float] = {}  # when each came, the first first
        self._query = 0
        self._replies: dict[int, Message] = {}
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, EVENT_READ, partial(self._accept, listener))

    def keep(self) -> None:
        """Drop those that take too long to prove what they are."""
        late = time.monotonic() - GREETING_SECONDS
        for connection in [one for one, came in self._strangers.items() if came < late]:
            self._lose(connection)

    @property
    def is_connected(self) -> bool:
        """Whether there are other monitors."""
        return bool(self.connected)

    def lost(self) -> list[str]:
        """Return the names of the machines that can't be reached any more."""
        return [self.names[number] for number in sorted(self._cut)]

    def answers_elsewhere(self) -> bool:
        """Return whether all of these machines answer somehow, which takes some seconds."""
        return all(_answers(self._addresses[number]) for number in self._cut)

    def tell(self, kind: str, only: int | None = None, **fields: Any) -> None:
        """Send a message to all other monitors, or to one."""
        for number, connection in list(self.connected.items()):
            if only in (None, number):
                try:
                    connection.send(kind, **fields)
                except OSError as error:
                    self._lose(connection, number, error)

    def ask(
        self, what: str, seconds: float, poll: Callable[[float], None]
    ) -> Callable[[], dict[int, Message]]:
        """Ask all monitors; return a function that waits for what they say, by their numbers."""
        deadline = time.monotonic() + seconds
        self._query, self._replies = self._query + 1, {}
        self.tell("ask", what=what, query=self._query)
        asked = set(self.connected)

        def wait() -> dict[int, Message]:
            while asked & self.connected.keys() - self._replies.keys():
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
                if self._strangers:
                    self._lose(next(iter(self._strangers)))
                else:
                    time.sleep(REFUSED_SECONDS)
                return
            try:
                one = Connection(accepted, self._secret, self._silence)
            except OSError:  # it has gone already
                accepted.close()
                continue
            self._strangers[one] = time.monotonic()
            self._selector.register(accepted, EVENT_READ, partial(self._read, one, 0))

    def _read(self, connection: Connection, number: int) -> None:
        """Read what a machine's monitor sent; 0 stands for one that hasn't said which it is."""
        try:
            for message in connection.receive():
                if message["kind"] == "hello":
                    number = message["from"]
                    self._welcome(connection, number)
                elif message["kind"] == "reply":
                    if message["query"] == self._query:
                        self._replies[number] = message
                elif message["kind"] != DIGITS:
                    self._take(number, message)
        except Exception as error:  # whatever a stranger sends
            self._lose(connection, number, error)

    def _welcome(self, connection: Connection, number: int) -> None:
        del self._strangers[connection]
        if number in self.connected:  # it was started again
            self._lose(self.connected[number], number)
        self.connected[number] = connection
        self._cut.discard(number)
        self._selector.modify(
            connection.socket, EVENT_READ, partial(self._read, connection, number)
        )
        connection.send("welcome")

    def _lose(
        self, connection: Connection, number: int = 0, error: Exception | None = None
    ) -> None:
        if self._strangers.pop(connection, None) or self.connected.get(number) is connection:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            if self.connected.get(number) is connection:
                del self.connected[number]
                self._cut |= {number} if is_cut(error) else set()


class Spoke:
    """Another machine's side."""

    def __init__(
        self, selector: BaseSelector, star: dict[str, Any], silence: float, take: Take
    ) -> None:
        """Connect, again and again where it must be; ``take`` is given the hub's messages."""
        self.is_connected = False  # and the hub has proved what it is
        self._selector, self._secret, self._silence = selector, star["secret"], silence
        self._number, self.hub_name = star["number"], star["hub"]
        self._endpoints, self._addresses = list(star["endpoints"]), star["addresses"]
        self._take = take
        self._connection: Connection | None = None
        self._was_connected = False
        self._cut_since: float | None = None
        self._tried_at = -math.inf
        self.keep()

    def keep(self) -> None:
        """Connect where there is no connection."""
        now = time.monotonic()
        if self.is_connected or not self._endpoints:
            return
        if self._connection is not None and now - self._tried_at > GREETING_SECONDS:
            self._lose(None)  # the kernel takes a connection in, also for a stopped process
        if self._connection is None and now - self._tried_at > RETRY_SECONDS:
            self._tried_at = now
            self._connect()

    def lost(self) -> list[str]:
        """Return the name of the hub's machine, if that can't be reached any more."""
        since = self._cut_since
        is_lost = since is not None and time.monotonic() - since >= self._silence
        return [self.hub_name] if is_lost else []

    def answers_elsewhere(self) -> bool:
        """Return whether the hub's machine answers somehow, which takes some seconds."""
        return _answers(self._addresses)

    def tell(self, kind: str, **fields: Any) -> bool:
        """Send a message to the hub; return whether there is a connection to it."""
        if self.is_connected and self._connection is not None:
            try:
                self._connection.send(kind, **fields)
            except OSError as error:
                self._lose(error)
        return self.is_connected

    def _connect(self) -> None:
        # The next one, if this is not the hub's: a bridge's may be the same on several machines.
        self._endpoints.append(self._endpoints.pop(0))
        try:
            made = socket.create_connection(self._endpoints[-1], CONNECT_SECONDS)
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            self._lose(OSError(errno.ETIMEDOUT, "no answer") if is_late else error)
            return
        try:
            self._connection = Connection(made, self._secret, self._silence)
            self._selector.register(made, EVENT_READ, partial(self._read, self._connection))
        except OSError:  # it has gone already
            made.close()

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                if message["kind"] == DIGITS:
                    connection.send("hello", **{"from": self._number})
                elif message["kind"] == "welcome":
                    self.is_connected = self._was_connected = True
                    self._cut_since = None
                    self._endpoints = self._endpoints[-1:]
                else:
                    self._take(0, message)
        except Exception as error:  # whatever listens there sends
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if is_cut(error):
            # The kernel has waited for a connection already.
            waited = self._silence if self.is_connected else 0.0
            if self._was_connected and self._cut_since is None:
                self._cut_since = time.monotonic() - waited
        elif self._connection is not None or isinstance(error, ConnectionRefusedError):
            self._cut_since = None  # the other kernel has answered
        if self._connection is not None:
            self._selector.unregister(self._connection.socket)
            self._connection.socket.close()
        self._connection, self.is_connected = None, False
