"""Rank 0 gives commands that all ranks execute, and judges what came of each."""

from __future__ import annotations

import os
import threading
import traceback
from unittest import mock

from chainermn_train.optimizers.exchanges import buckets
from tests.train.optimizer_machine.oracle import Oracle
from tests.train.optimizer_machine.trainee import Trainee

# Longer than a sequence takes, shorter by far than a world's tests may take.
STUCK_SECONDS = 60.0
BUCKET_BYTES = 8  # of overlap: each parameter goes by itself


class Play:
    """A training of all ranks, led by rank 0.

    Attributes:
        size: number of ranks.
        config: of the present sequence.
        oracles: of each optimizer, those of its groups of ranks.
    """

    def __init__(self, world, stderr):
        """A sequence that hangs is told on ``stderr``."""
        self._world = world
        self.size = world.size
        self._stderr = stderr
        self._trainees = []
        self._alarm = None
        self._number = 0  # of updates so far
        self._sequence = []  # of commands, in words

    def run(self, lead):
        """Let rank 0 call ``lead``, whose commands all ranks execute (collective).

        Return on all ranks what was wrong; empty if nothing was.
        """
        failure = ""
        with mock.patch.object(buckets, "BUCKET_BYTES", BUCKET_BYTES):
            if self._world.rank == 0:
                failure = self._failure_of(lead)
                self._world.bcast(None)
            else:
                while (command := self._world.bcast(None)) is not None:
                    self._world.gather(self._execute(*command))
        return self._world.bcast(failure)

    def _failure_of(self, lead):
        try:
            lead(self)
        except Exception:
            return f"{self._told}\n{traceback.format_exc()}"
        finally:
            self._alarm.cancel()
        return ""

    # Of rank 0.

    def begin(self, config):
        """Begin a sequence."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = threading.Timer(STUCK_SECONDS, self._tell)
        self._alarm.daemon = True
        self._alarm.start()
        self.config = config
        self.oracles = []
        self._sequence = []
        for which in range(config.optimizers):
            outcomes = self._command(which, "begin", {"config": config})
            ranks = range(self.size)
            groups = [ranks[first :: config.groups] for first in range(config.groups)]
            self.oracles.append([Oracle(config, each, outcomes) for each in groups])

    def do(self, name, /, which=0, **kwds):
        """Let all ranks execute a command; raise AssertionError if they do it wrongly."""
        if name in ("update", "join", "replace"):
            kwds = {**kwds, "number": self._number}
            self._number += max(kwds.get("counts", [1]))
        outcomes = self._command(which, name, kwds)
        for oracle in self.oracles[which]:
            if wrong := oracle.judge(name, kwds, outcomes):
                raise AssertionError(wrong)

    def update(self, count=1, **kwds):
        for _ in range(count):
            self.do("update", **kwds)

    def replace(self, ranks, name="second", which=0):
        """Let these ranks have another part of this name, or one that they had not."""
        self.do("replace", which, ranks=ranks, name=name)

    def end(self):
        """Whatever has happened, all goes on as ever."""
        for which in range(self.config.optimizers):
            self.do("flush", which)
            self.update(2 * self.config.steps, which=which)
            self.do("flush", which)
            self.do("end", which)

    @property
    def _told(self):
        return "\n    ".join([f"after {self.config}:", *self._sequence])

    def _tell(self):
        os.write(self._stderr, f"\n--- slow or stuck {self._told}\n".encode())

    def _command(self, which, name, kwds):
        given = ", ".join(f"{key}={value!r}" for key, value in kwds.items())
        self._sequence.append(f"{name}({given}) of optimizer {which}")
        self._world.bcast((which, name, kwds))
        return self._world.gather(self._execute(which, name, kwds))

    def _execute(self, which, name, kwds):
        if name == "begin":
            self._trainees[which:] = [Trainee(self._world.rank, **kwds)]
            kwds = {}
        return self._trainees[which].execute(name, **kwds)
