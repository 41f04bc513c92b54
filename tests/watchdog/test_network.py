"""Monitors that ask one another."""

from __future__ import annotations

import socket
import threading

from chainermn_comm.watchdog.network import Asking, Peer, serve


def test_only_machines_that_gave_no_answer_are_said_to_be_silent():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        peers = [
            Peer(
                {
                    "host": host,
                    "ranks": [rank],
                    "addresses": ["127.0.0.1"],
                    "port": listener.getsockname()[1],
                    "secret": "x",
                }
            )
            for rank, (host, listener) in enumerate([("near", one), ("far", other)])
        ]
        work = (one, "x", lambda question: {"asked": question})
        threading.Thread(target=serve, args=work, daemon=True).start()
        asking = Asking(peers, "calls", 1.0)
        assert asking.answers() == [{"asked": "calls"}]
        assert asking.silent() == ["rank 1 on far"]
