"""Monitors that are stopped, slowed, killed or cut off, beside ranks that get on."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.hosts.strangers import hubs_port, monitors_on
from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs import runner
from tests.support.jobs.processes import soon

# How long one monitor or link is disturbed, at most; the limits that this goes beyond.
DISTURBED_SECONDS, TIMEOUT, SILENCE = 6.0, "4", "2"
JOB_SECONDS = 300.0
# For so long ranks meet, at most WAIT_SECONDS apart.
SCRIPT = f"""{runner.PRELUDE}
import random, sys, time
from chainermn_comm import create_communicator

comm = create_communicator("naive")
draw = random.Random(comm.rank)
begun, total = time.monotonic(), 0
while comm.bcast_obj(time.monotonic() - begun < float(sys.argv[1])):
    time.sleep(draw.choice((0.0, 0.01, 0.1, 0.8)))
    total += comm.allreduce_obj(comm.rank)
comm.finalize()
print("DONE", total % comm.size, flush=True)
"""
LENGTH_SECONDS = 15.0
KINDS = ("stop", "slow", "kill", "cut", "break")


class Disturbance:
    """What is done to the monitors of a job on two hosts."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._draw = cluster, random.Random(seed)
        self.done: list[str] = []
        self._next = self._until = 0.0
        self._slowed: list[psutil.Process] = []
        self._stopped: list[psutil.Process] = []
        self._rules: list[tuple[str, tuple[object, ...]]] = []
        self._killed = 0

    def __call__(self, *_: object) -> None:
        """Do something now and then, and undo it after a while."""
        now = time.monotonic()
        for one in self._slowed:
            _signal(one, self._draw.choice((signal.SIGSTOP, signal.SIGCONT)))
        if now > self._until:
            self.undo()
        if now < self._next or not (monitors := self._monitors()):
            return
        self._next = now + self._draw.uniform(0.5, 2.0)
        kind = self._draw.choice(KINDS)
        self._until = now + self._draw.uniform(1.0, DISTURBED_SECONDS)
        chosen = self._draw.choice(monitors)
        if kind == "stop":
            both = self._draw.random() < 0.5
            self._stopped += [one for one in monitors if both or one == chosen]
            for one in self._stopped:
                _signal(one, signal.SIGSTOP)
        elif kind == "slow":
            self._slowed.append(chosen)
        elif (
            kind == "kill" and not self._killed
        ):  # the others' ranks aren't watched then
            self._killed += 1
            _signal(chosen, signal.SIGKILL)
        elif not (self._cut() if kind == "cut" else kind == "break" and self._break()):
            return
        self.done.append(kind)

    def undo(self) -> None:
        """Let all go on."""
        for one in (*self._stopped, *self._slowed):
            _signal(one, signal.SIGCONT)
        self._stopped, self._slowed = [], []
        for host, rule in self._rules:
            self._cluster.run(host, "ip", "rule", "del", *rule)
        self._rules = []

    def _monitors(self) -> list[psutil.Process]:
        return monitors_on(self._cluster)

    def _port(self) -> int:
        return hubs_port(self._cluster)

    def _break(self) -> bool:
        """Close the connection between the monitors; whether there was one."""
        return bool(
            self._cluster.run(
                "beta", "ss", "-HK", "dport", "=", f":{self._port()}"
            ).strip()
        )

    def _cut(self) -> bool:
        """Drop what goes between the monitors, and nothing else; whether there is something."""
        port = self._port()
        if self._rules or port == 1:
            return False
        for host, side in (("alpha", "sport"), ("beta", "dport")):
            rule = ("pref", 10, "ipproto", "tcp", side, port, "blackhole")
            self._cluster.run(host, "ip", "rule", "add", *rule)
            self._rules.append((host, rule))
        return True


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def disturbed(cluster: Cluster, folder: Path, seed: int) -> tuple[str, Disturbance]:
    """Run a job beside such a disturbance; what is wrong with its end, "" for nothing."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    disturbance = Disturbance(cluster, seed)
    environment = {"CHAINERMN_TIMEOUT": TIMEOUT, "CHAINERMN_HOST_SILENCE": SILENCE}
    ranks = {"alpha": 2, "beta": 1}
    try:
        job = cluster.job(
            *(ranks, path, LENGTH_SECONDS),
            environment=environment,
            seconds=JOB_SECONDS,
            meanwhile=disturbance,
        )
    finally:
        disturbance.undo()
    if job.returncode != 0 or len(set(re.findall("DONE .*", job.out))) != 1:
        return f"it was ended: {job}", disturbance
    if not soon(lambda: not cluster.processes()):
        return f"it left {cluster.processes()}", disturbance
    return "", disturbance
