"""Monitors of running jobs are asked, and asked again."""

from __future__ import annotations

import os
import socket
import threading

import click
import pytest

from chainermn_tools.live.running_jobs import MONITOR_NAME, LiveJob, ask


def test_a_monitor_that_gave_up_waiting_is_asked_again_once():
    """It did for a `top` that was stopped in the middle; one that has ended says nothing twice."""
    answers = [b"", b'{"ranks": [], "unseen": ["beta"]}', b"", b""]

    def serve() -> None:
        for answer in answers:
            with server.accept()[0] as link:
                link.recv(100)
                link.sendall(answer)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"\0{MONITOR_NAME}test {os.getpid()}")
        server.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        job = LiveJob(1, "train.py", "", [f"test {os.getpid()}"], set())
        assert list(ask(job, "calls").unreachable) == ["beta"]
        with pytest.raises(click.ClickException, match="job 1 has ended"):
            ask(job, "calls")
        thread.join(10)
        assert not thread.is_alive()
