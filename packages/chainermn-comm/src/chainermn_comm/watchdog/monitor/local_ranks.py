"""The ranks of one machine as their monitor sees them: calls, stacks, ends."""

from __future__ import annotations

import contextlib
import json
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
from ..status_region import REGION_BYTES, read_abort_time, read_calls, read_progress

# Time for a rank to write its stacks; without them (it is in the kernel) the report
# goes out, too.
STACKS_SECONDS = 1.5
# For it to end what it has begun to write.
END_SECONDS = 0.2
# Of a rank's stacks, that are read.
STACK_BYTES = 1 << 16
# Time for a process whose files are closed to be gone.
GONE_SECONDS = 1.0
# For who asks to take the answer, which is sent in pieces.
SEND_SECONDS = 2.0
PIECE_BYTES = 1 << 15
# Of a message, which names all ranks; and the most files that come with it.
MESSAGE_BYTES = 1 << 20
MOST_FILES = 2
# After a connection that could not be accepted: at once it would be so again.
REFUSED_SECONDS = 0.1


class MonitoredRank:
    """A rank of this machine."""

    def __init__(self, description: dict[str, Any], region: int, stacks: int) -> None:
        """Map the memory of the rank, which sent this description and these two files."""
        self.world: int = description["world"]
        self.pid: int = description["pid"]
        self.signal: int = description["signal"]
        self.process = (self.pid, description["start_time"])
        self.launcher: int = processes.stat(self.pid).parent
        self.region = mmap.mmap(region, REGION_BYTES, prot=mmap.PROT_READ)
        os.close(region)
        self.stacks = stacks
        self.died_at: float | None = None  # unless its program was over

    def state(self) -> str:
        return processes.state(self.process)

    def read(self, now: float, awake_since: float = 0.0) -> Rank:
        """Return what the rank does, without stacks; `read_calls` says what the times are."""
        aborted_at = read_abort_time(self.region)
        failed_at = aborted_at or self.died_at
        updates, examples = read_progress(self.region)
        return Rank(
            world=self.world,
            host=os.uname().nodename,
            pid=self.pid,
            state=self.state(),
            calls=tuple(read_calls(self.region, now, awake_since)),
            updates=updates,
            examples=examples,
            failed_for=None if failed_at is None else now - failed_at,
            has_aborted=bool(aborted_at),
        )

    def note_end(self) -> None:
        """Note that the kernel has closed the rank's files, which may mean that it has died.

        The kernel does so before the process is gone. So the monitor hears of the first
        rank that dies before the launcher does, which kills the others.
        """
        now = time.monotonic()
        is_gone = processes.wait_until(
            lambda: self.state() == GONE, GONE_SECONDS, 0.0005
        )
        # Else it has closed its files, and lives.
        if is_gone and not self.read(now).has_finished:
            self.died_at = now


class LocalSocket:
    """The socket to which ranks connect, and `chainermn top`; other users are refused."""

    def __init__(
        self,
        listener: socket.socket,
        selector: BaseSelector,
        come: Callable[[dict[str, Any], list[int]], MonitoredRank | None],
        answer: Callable[[str], object],
    ) -> None:
        """Listen.

        ``come`` is given a rank's message and files, and returns the rank that has come
        by it; ``answer`` gives what to answer a question.
        """
        self._listener = listener
        self._selector = selector
        self._come = come
        self._answer = answer
        self._ranks: dict[socket.socket, MonitoredRank] = {}
        listener.setblocking(False)
        selector.register(listener, EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or no descriptor is left
            time.sleep(REFUSED_SECONDS)
            return
        if processes.peer_of(connection).user != os.geteuid():
            connection.close()
            return
        connection.settimeout(SEND_SECONDS)
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MOST_FILES)
        if not data:
            self._end(connection)
            return
        message = json.loads(data)
        if message["kind"] == "ask":
            self._reply(connection, message["what"])
            return
        rank = self._come(message, files)
        if rank is not None:
            self._ranks[connection] = rank

    def _reply(self, connection: socket.socket, what: str) -> None:
        text = json.dumps(self._answer(what)).encode()
        with contextlib.suppress(OSError):  # who asked has been ended, or stopped
            for start in range(0, len(text), PIECE_BYTES):
                connection.sendall(text[start : start + PIECE_BYTES])
        self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            rank.note_end()


def collect_stacks(ranks: Sequence[MonitoredRank]) -> dict[int, str]:
    """Return the stacks of the ranks that give some, by their number in MPI.COMM_WORLD."""
    asked = [
        rank
        for rank in ranks
        if rank.state() == RUNNING and processes.catches(rank.pid, rank.signal)
    ]
    starts = [os.fstat(rank.stacks).st_size for rank in asked]
    for rank in asked:
        processes.send_signal(rank.process, rank.signal)

    def have_all_begun() -> bool:
        sizes = [os.fstat(rank.stacks).st_size for rank in asked]
        return all(size > start for size, start in zip(sizes, starts, strict=True))

    processes.wait_until(have_all_begun, STACKS_SECONDS)
    time.sleep(END_SECONDS)
    return {
        rank.world: normalize_stacks(os.pread(rank.stacks, STACK_BYTES, start))
        for rank, start in zip(asked, starts, strict=True)
    }
