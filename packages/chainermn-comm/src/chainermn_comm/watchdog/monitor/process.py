"""The process that watches the ranks of one machine."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

from .. import report
from .monitor import Monitor

# Connections that wait to be accepted.
BACKLOG = 4096


def main() -> None:
    """Watch the ranks that come to the socket whose descriptor is given, as nobody's child."""
    listener = socket.socket(fileno=int(sys.argv[2]))
    # A rank may catch the signal and go on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A connection for each machine.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.fork():
        os._exit(0)
    # Launchers kill a rank's process group, and this process removes what the group
    # leaves.
    os.setsid()
    # Again, since a process that asks now sees this process's number.
    listener.listen(BACKLOG)
    monitor = Monitor(listener)
    try:
        while monitor.look():
            pass
        monitor.clean()
    except Exception as error:
        monitor.print(
            f"{report.PREFIX}the process that watches the ranks on {os.uname().nodename} "
            f"failed: {type(error).__name__}: {error}; no call will be reported any more\n",
        )
        raise
