"""The process that watches the ranks of one machine: its start, again too, and who asks it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from selectors import EVENT_READ
from typing import Any

from .. import report
from ..processes import GONE
from .connection import SEND_SECONDS
from .local_ranks import MonitoredRank, print_for
from .monitor import Monitor

# How many monitors are started, one after another, where each fails.
ATTEMPTS = 3


def supervise(config: dict[str, Any], ranks: list[MonitoredRank]) -> None:
    """Run a monitor in a child process, and another one if it fails, at most ATTEMPTS in all."""
    us = f"{report.PREFIX}the process that watches the ranks on {os.uname().nodename}"
    for _ in range(ATTEMPTS):
        child = os.fork()
        if not child:
            status = 1
            try:
                monitor = Monitor(config, ranks)
                askers = socket.socket(
                    socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                )
                # Containers share such names, and may not share numbers.
                with suppress(OSError):
                    askers.bind(f"\0chainermn monitor {os.getpid()}")
                    askers.listen()
                    # The monitor then wakes up when somebody asks.
                    monitor.selector.register(askers, EVENT_READ, lambda: None)
                while monitor.look():
                    answer(monitor, askers)
                monitor.clean()
                status = 0
            except Exception as error:
                print_for(ranks, f"{us} failed: {type(error).__name__}: {error}\n")
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if not status or all(rank.state() == GONE for rank in ranks):
            return
    print_for(
        ranks, f"{us} has failed {ATTEMPTS} times: no call will be reported any more.\n"
    )


def answer(monitor: Monitor, askers: socket.socket) -> None:
    """Send all ranks, and who is silent, to a process of this user that asks, if one does."""
    with suppress(OSError), askers.accept()[0] as asker:
        asker.settimeout(SEND_SECONDS)
        peer = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        # Process, user and group.
        if int.from_bytes(peer[4:8], sys.byteorder) == os.geteuid():
            graph = monitor.everyone(
                asker.recv(16).decode(errors="replace"), time.monotonic()
            )
            found = {
                "ranks": [*map(asdict, graph.ranks.values())],
                "unseen": graph.unreachable,
            }
            asker.sendall(json.dumps(found).encode())


def main() -> None:
    """Watch, as configured on standard input, in a process that is nobody's child."""
    config = json.load(sys.stdin)
    ranks = [MonitoredRank(each) for each in config["ranks"]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a rank may catch it and go on
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A connection for each machine.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.fork():
        os._exit(0)
    # Launchers kill a rank's group, whose remains are this process's to remove.
    os.setsid()
    supervise(config, ranks)
