"""Monitors that are stopped, killed or cut off, beside ranks that get on."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs import runner
from tests.support.jobs.processes import soon
from tests.support.watchdog.records import is_monitor

# How long a monitor or a link is disturbed, at most, which is more than these limits.
DISTURBED_SECONDS = 5.0
LIMITS = {"CHAINERMN_TIMEOUT": "4", "CHAINERMN_HOST_SILENCE": "2"}
JOB_SECONDS = 300.0
# For so long ranks meet again and again.
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


KINDS = ("stop", "kill", "cut", "break")


class Disturbance:
    """What is done to the monitors of a job on two hosts."""

    def __init__(self, cluster: Cluster, seed: int):
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._kinds = itertools.cycle(self._draw.sample(KINDS, len(KINDS)))
        self.done: list[str] = []
        self._next = 0.0
        self._undo = ExitStack()

    def __call__(self, *_):
        """Do something now and then, until the next thing is done."""
        if time.monotonic() < self._next:
            return
        self.undo()
        monitors = monitors_on(self._cluster)
        if not monitors:
            return
        kind = next(self._kinds)
        if kind == "stop":
            for monitor in monitors[self._draw.randrange(len(monitors)) :]:
                send_signal(monitor, signal.SIGSTOP)
                self._undo.callback(send_signal, monitor, signal.SIGCONT)
        elif kind == "kill":
            if "kill" in self.done:  # the others' ranks aren't watched then
                return
            send_signal(self._draw.choice(monitors), signal.SIGKILL)
        elif (port := hubs_port(self._cluster)) == 1:
            return
        elif kind == "cut":
            self._cut(port)
        else:
            self._cluster.run("beta", "ss", "-HK", "dport", "=", f":{port}")
        self.done.append(kind)
        self._next = time.monotonic() + self._draw.uniform(0.1, DISTURBED_SECONDS)

    def undo(self):
        """Let all go on."""
        self._undo.close()

    def _cut(self, port: int):
        """Drop what goes between the monitors, and nothing else."""
        for host, side in (("alpha", "sport"), ("beta", "dport")):
            rule = ("pref", 10, "ipproto", "tcp", side, port, "blackhole")
            self._cluster.run(host, "ip", "rule", "add", *rule)
            self._undo.callback(self._cluster.run, host, "ip", "rule", "del", *rule)


def send_signal(process: psutil.Process, number: int):
    with suppress(psutil.Error):
        process.send_signal(number)


def disturbed(cluster: Cluster, folder: Path, seed: int) -> tuple[str, list[str]]:
    """Run a job beside a disturbance: what is wrong with its end, and what was done."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    disturbance = Disturbance(cluster, seed)
    try:
        job = cluster.job(
            {"alpha": 2, "beta": 1},
            path,
            LENGTH_SECONDS,
            environment=LIMITS,
            seconds=JOB_SECONDS,
            meanwhile=disturbance,
        )
    finally:
        disturbance.undo()
    if job.returncode != 0 or len(set(re.findall("DONE .*", job.out))) != 1:
        return f"it was ended: {job}", disturbance.done
    if not soon(lambda: not cluster.processes()):
        return f"it left {cluster.processes()}", disturbance.done
    return "", disturbance.done


def monitors_on(cluster: Cluster) -> list[psutil.Process]:
    """The monitors there, but for those for whose start a rank waits."""
    found = []
    for one in cluster.processes():
        with suppress(psutil.Error, ProcessLookupError):
            if is_monitor(one.cmdline()) and os.getsid(one.pid) == one.pid:
                found.append(one)
    return found


def inner_pid(pid: int) -> int:
    """A process's number in its own namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def hubs_port(cluster: Cluster) -> int:
    """Where the hub on the first host listens; 1 if nowhere."""
    # `ss` knows them by their numbers in the host's own namespace.
    pids = {inner_pid(one.pid) for one in monitors_on(cluster)}
    for line in cluster.run(cluster.hosts[0], "ss", "-Htlnp").splitlines():
        if pids & set(map(int, re.findall(r"pid=(\d+)", line))):
            return int(line.split()[3].rpartition(":")[2])
    return 1
