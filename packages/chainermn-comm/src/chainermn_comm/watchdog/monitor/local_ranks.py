"""The ranks of one machine as their monitor sees them: calls, stacks, ends."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from selectors import EVENT_READ, BaseSelector
from typing import Any

from .. import processes
from ..diagnosis import Rank
from ..processes import GONE, RUNNING
from ..report import normalize_stacks
from ..status_region import HEADER, REGION_BYTES, STACKS_SIGNAL, read_calls
from ..timeout import Timeout

# Time for a rank to write its stacks. The report goes out without them if the rank is
# in the kernel.
STACKS_SECONDS = 1.5
# How long a rank may take to finish the stacks that it has begun to write.
END_SECONDS = 0.2
# The most bytes of a rank's stacks that are read.
STACK_BYTES = 1 << 16
# Time for a process whose files are closed to be gone.
GONE_SECONDS = 1.0
# Time for the process that asked to take the answer, which is sent in pieces.
SEND_SECONDS = 2.0
PIECE_BYTES = 1 << 15
# The most bytes of a message, which names all ranks, and the most files with it.
MESSAGE_BYTES = 1 << 20
MOST_FILES = 2

Message = dict[str, Any]


class MonitoredRank:
    """A rank of this machine."""

    def __init__(self, description: Message, region: int, stacks: int) -> None:
        """Map the memory of the rank, which sent this description and these two files."""
        self.world: int = description["world"]
        self.pid: int = description["pid"]
        self.launcher: int = processes.stat(self.pid).parent
        self.region = mmap.mmap(region, REGION_BYTES, prot=mmap.PROT_READ)
        os.close(region)
        self._stacks = stacks  # the file of the rank's stacks
        self._stacks_begin = 0  # where the stacks of the last request begin in it
        self.has_ended = False
        # Infinity for a living rank, or if it died after the end of its program.
        self.died_at = math.inf

    def state(self) -> str:
        if self.has_ended:  # another process may have the rank's number by now
            return GONE
        return processes.state(self.pid)

    def read(self, now: float, awake_since: float = 0.0, stacks: str = "") -> Rank:
        """Return the rank's record; `read_calls` explains the times."""
        aborted_at, updates, examples = HEADER.unpack_from(self.region)
        return Rank(
            world=self.world,
            host=os.uname().nodename,
            pid=self.pid,
            state=self.state(),
            calls=tuple(read_calls(self.region, now, awake_since)),
            stacks=stacks,
            updates=updates,
            examples=examples,
            failed_at=aborted_at or self.died_at,
            has_aborted=bool(aborted_at),
        )

    def ask_for_stacks(self) -> bool:
        """Ask the rank to write its stacks, if it can; return whether it could be asked."""
        can_answer = processes.catches(self.pid, STACKS_SIGNAL)
        if not can_answer or self.state() != RUNNING:
            return False
        self._stacks_begin = os.fstat(self._stacks).st_size
        with contextlib.suppress(OSError):  # the rank has just gone
            os.kill(self.pid, STACKS_SIGNAL)
        return True

    def has_begun_stacks(self) -> bool:
        return os.fstat(self._stacks).st_size > self._stacks_begin

    def read_stacks(self) -> str:
        return normalize_stacks(os.pread(self._stacks, STACK_BYTES, self._stacks_begin))

    def note_end(self) -> None:
        """Note that the kernel has closed the rank's files, which may mean that it has died.

        The kernel does so before the process is gone. So the monitor notices the first dead
        rank before the launcher does, which kills the others.
        """
        now = time.monotonic()
        self.has_ended = processes.wait_until(
            lambda: self.state() == GONE, GONE_SECONDS, 0.0005
        )
        # Otherwise the rank has closed its files, and lives.
        if self.has_ended and not self.read(now).has_finished:
            self.died_at = now


class LocalRanks:
    """The ranks that have connected to this machine's socket; other users are refused.

    `chainermn top`, which asks for the ranks' records, connects there, too.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: BaseSelector,
        handle: Callable[[Message, list[int]], object],
    ) -> None:
        """Listen; ``handle`` is given messages with files, and returns an answer, if any."""
        self.ranks: list[MonitoredRank] = []
        # Facts from the ranks: the launch, if `chainermn launch` started it; the time-out; the
        # ranks that make the first communicator, on any machine.
        self.launch: str | None = None
        self.timeout = Timeout(0.0)
        self.members: set[int] = set()
        # When this process began, or went on after it had been stopped together with
        # the ranks.
        self.awake_since = time.monotonic()
        self._listener = listener
        self._selector = selector
        self._handle = handle
        self._connected: dict[socket.socket, MonitoredRank] = {}
        listener.setblocking(False)
        selector.register(listener, EVENT_READ, self._accept)

    def read(self, now: float, with_stacks: bool = False) -> list[Rank]:
        """Return the ranks' records."""
        stacks = {}
        if with_stacks:
            stacks = collect_stacks(self.ranks)
        return [
            rank.read(now, self.awake_since, stacks.get(rank.world, ""))
            for rank in self.ranks
        ]

    def _accept(self) -> None:
        # The process is gone, or no descriptor is left.
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if processes.peer_of(connection).user != os.geteuid():
                connection.close()
                return
            connection.settimeout(SEND_SECONDS)
            read = partial(self._read, connection)
            self._selector.register(connection, EVENT_READ, read)

    def _read(self, connection: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MOST_FILES)
        if not data:
            self._end(connection)
            return
        message = json.loads(data)
        if message["kind"] == "come":
            self._add(connection, message, files)
            return
        answer = self._handle(message, files)
        if answer is not None:
            self._reply(connection, json.dumps(answer).encode())

    def _add(
        self, connection: socket.socket, message: Message, files: list[int]
    ) -> None:
        rank = MonitoredRank(message, *files)
        self._connected[connection] = rank
        self.ranks.append(rank)
        self.ranks.sort(key=lambda each: each.world)
        self.launch = message["launch"]
        self.timeout = Timeout(**message["timeout"])
        self.members.update(message["members"])

    def _reply(self, connection: socket.socket, text: bytes) -> None:
        # The process that asked has ended, or is stopped.
        with contextlib.suppress(OSError):
            for start in range(0, len(text), PIECE_BYTES):
                connection.sendall(text[start : start + PIECE_BYTES])
        self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        rank = self._connected.pop(connection, None)
        if rank is not None:
            rank.note_end()


def collect_stacks(ranks: Sequence[MonitoredRank]) -> dict[int, str]:
    """Return the stacks of the ranks that wrote any, by their number in MPI.COMM_WORLD."""
    asked = [rank for rank in ranks if rank.ask_for_stacks()]
    processes.wait_until(
        lambda: all(rank.has_begun_stacks() for rank in asked), STACKS_SECONDS
    )
    time.sleep(END_SECONDS)
    return {rank.world: rank.read_stacks() for rank in asked}
