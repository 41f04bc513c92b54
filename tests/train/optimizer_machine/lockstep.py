"""Rank 0 draws what all ranks do, command by command, and judges what came of it."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Longer than any command takes, shorter by far than a world's tests may take.
STUCK_SECONDS = 30.0
# Hypothesis makes a failing sequence smaller for so long. The first one was printed by
# then.
SHRINKING_SECONDS = 20.0
END = None


class Enough(BaseException):
    """Ends Hypothesis, which catches exceptions: a failure has been made small enough."""


def chosen_seed(default: int | None = None) -> int:
    """Return CHAINERMN_TEST_SEED, if it is set, or the default, or another one each time."""
    given = os.environ.get("CHAINERMN_TEST_SEED")
    return (
        int(given) if given else time.time_ns() % 2**32 if default is None else default
    )


class Lockstep:
    """Commands that rank 0 gives and all ranks execute: methods of an object that each one has."""

    def __init__(self, world: Any, actor: Any, stderr: int = 2) -> None:
        """Use a communicator of its own (collective); ``stderr`` is where a hang is reported."""
        self._channel, self._actor, self._stderr = world.Dup(), actor, stderr
        self.size = world.size
        self.sequence: list[str] = []  # commands since the last `begin`
        self.commands = 0  # of all sequences
        self.failure = ""  # of the shortest sequence that has failed
        self._shortest, self._first_failure = 0, 0.0

    def play(self, run: Callable[[], None]) -> str:
        """Let rank 0 run what calls :meth:`command`, and the others follow (collective).

        Return on all ranks how the shortest failing sequence failed; empty if none has.
        """
        with self._report_if_stuck():
            if self._channel.rank == 0:
                try:
                    run()
                except Enough:
                    pass
                except Exception:
                    self.failure = self.failure or traceback.format_exc()
                finally:
                    self._channel.bcast(END)
            else:
                while (command := self._channel.bcast(END)) is not END:
                    self._channel.gather(self._execute(*command))
            self.failure = self._channel.bcast(self.failure)
        self._channel.Free()
        return self.failure

    def begin(self, *args: Any) -> list[Any]:
        """Begin a sequence: call the actors' method of this name (rank 0)."""
        late = (
            self.failure and time.monotonic() - self._first_failure > SHRINKING_SECONDS
        )
        if late:
            raise Enough
        self.sequence = []
        return self.command("begin", *args)

    def command(self, name: str, *args: Any, **kwds: Any) -> list[Any]:
        """Let all ranks call a method of their actors; return what each returned (rank 0)."""
        given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwds.items())]
        self.sequence.append(f"{name}({', '.join(given)})")
        self.commands += 1
        self._channel.bcast((name, args, kwds))
        outcomes: list[Any] = self._channel.gather(self._execute(name, args, kwds))
        return outcomes

    def fail(self, reason: str) -> None:
        """Raise AssertionError with the sequence; the shortest one is kept (rank 0)."""
        text = "\n".join(["after", *(f"    {each}" for each in self.sequence), reason])
        if not self.failure:
            self._first_failure = time.monotonic()
            self._say("the first sequence that failed:\n" + text)
        if not self.failure or len(self.sequence) < self._shortest:
            self.failure, self._shortest = text, len(self.sequence)
        raise AssertionError(text)

    def _execute(self, name: str, args: Any, kwds: Any) -> Any:
        return getattr(self._actor, name)(*args, **kwds)

    def _say(self, text: str) -> None:
        os.write(self._stderr, f"\n--- rank {self._channel.rank}: {text}\n".encode())

    @contextmanager
    def _report_if_stuck(self) -> Iterator[None]:
        done = threading.Event()

        def report() -> None:
            count = -1
            while count != self.commands:
                count = self.commands
                if done.wait(STUCK_SECONDS):
                    return
            self._say("stuck in the last of\n" + "\n".join(self.sequence))

        if self._channel.rank == 0:
            threading.Thread(target=report, daemon=True).start()
        try:
            yield
        finally:
            done.set()
