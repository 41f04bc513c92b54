"""Monitors that ask one another."""

from __future__ import annotations

import socket
import threading

from chainermn_comm.watchdog.network import Asking, Peer, serve


def peer(host, rank, listener):
    where = {"host": host, "addresses": ["127.0.0.1"], "port": listener.getsockname()[1]}
    return Peer({**where, "ranks": [rank], "secret": "x"})


def test_only_machines_that_gave_no_answer_are_said_to_be_silent():
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as one, socket.create_server(here) as other:
        work = (one, "x", lambda question: {"asked": question})
        threading.Thread(target=serve, args=work, daemon=True).start()
        asking = Asking([peer("near", 0, one), peer("far", 1, other)], "calls", 5.0)
        assert asking.answers() == [{"asked": "calls"}]
        assert asking.silent() == ["rank 1 on far"]
