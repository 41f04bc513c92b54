"""What others on a machine do beside a job's monitors, and what these take meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.watchdog.records import is_monitor

SECONDS, CONNECTIONS = 20.0, 2000
# Connects so often to a port, and says nothing.
CONNECT = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
address, port, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
held, end = [], time.monotonic() + seconds
print("begins", flush=True)
for _ in range(count):
    held.append(socket.create_connection((address, port), 5))
time.sleep(max(0.0, end - time.monotonic()))
"""
MAKE_FILES = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    path = f"/dev/shm/somebody-elses-{os.getpid()}"
    open(path, "w").close()
    os.unlink(path)
    time.sleep(0.005)
"""


def monitors_on(cluster: Cluster) -> list[psutil.Process]:
    """The monitors there, but for those for whose start a rank waits."""
    found = []
    for one in cluster.processes():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
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


def share_of_a_core(cluster: Cluster) -> float:
    """What the busiest monitor takes beside such strangers, as a part of one core's time."""
    first, second = cluster.hosts
    address = cluster.run(first, "hostname", "-I").split()[0]
    words = address, f"{hubs_port(cluster)}", f"{CONNECTIONS}", f"{SECONDS}"
    connecting = subprocess.Popen(
        [*cluster.on(second), sys.executable, "-c", CONNECT, *words],
        stdout=subprocess.PIPE,
    )
    making = [
        subprocess.Popen(
            [*cluster.on(host), sys.executable, "-c", MAKE_FILES, f"{SECONDS}"]
        )
        for host in cluster.hosts
    ]
    assert connecting.stdout is not None
    connecting.stdout.readline()
    monitors = monitors_on(cluster)
    before, begun = [sum(one.cpu_times()[:2]) for one in monitors], time.monotonic()
    for process in (connecting, *making):
        process.wait()
    seconds = time.monotonic() - begun
    connecting.stdout.close()
    after = [sum(one.cpu_times()[:2]) for one in monitors]
    return max(b - a for a, b in zip(before, after, strict=True)) / seconds
