"""What a host finds when it connects to another: a way, none, somebody else, or half a way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest

from chainermn_tools.doctor.hosts import remote
from chainermn_tools.doctor.hosts.network import connections

from .test_doctor_hosts import look, reply

TOKEN = "0123456789abcdef"
SECONDS = 0.5  # that nothing comes; what comes, comes at once
LARGE = bytes(remote.LARGE_BYTES)


@pytest.fixture
def server():
    """Gives the port at which a function is given each connection."""
    with contextlib.ExitStack() as stack:

        def serve(answer: Callable[[socket.socket], object]) -> int:
            listener = stack.enter_context(remote.listen())

            def work() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        stack.enter_context(connection)
                        answer(connection)

            threading.Thread(target=work, daemon=True).start()
            return listener.getsockname()[1]

        yield serve


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda c: None, "timed out"),
        (lambda c: c.close(), "something else answers there"),
        (lambda c: c.sendall(b"HTTP/1.1 400 Bad"), "something else answers there"),
        (lambda c: c.sendall(TOKEN.encode()), remote.STALLED),
        (lambda c: (c.sendall(TOKEN.encode()), c.close()), remote.STALLED),
    ],
    ids=["silent", "closes", "another", "stalls", "ends"],
)
def test_what_is_wrong_with_a_connection_is_told(server, answer, problem):
    port = server(answer)
    assert remote.connect("127.0.0.1", port, TOKEN, SECONDS) == {"problem": problem}


def test_nobody_at_the_port_is_told(server):
    with remote.listen() as listener:
        port = listener.getsockname()[1]
    assert remote.connect("127.0.0.1", port, TOKEN, SECONDS) == {"problem": "Connection refused"}


def test_programs_of_the_doctor_find_one_another_even_beside_one_that_stalls():
    with remote.listen() as listener:

        def greet():
            with contextlib.suppress(OSError):  # the listener is closed in the end
                remote.greet(listener, TOKEN)

        threading.Thread(target=greet, daemon=True).start()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # which reads nothing
            found = remote.connect("127.0.0.1", port, TOKEN, 30.0)
    assert 0 < found["seconds"] < 30


def test_what_stalls_is_laid_to_the_size_of_packets_and_not_to_a_firewall():
    good, stalls = {"seconds": 0.001}, {"problem": remote.STALLED}
    answer = look(connections, a=reply("a", {"b": stalls}), b=reply("b", {"a": good}))
    assert "mtu 1500   # on a and b" in answer.fix
    no = {"problem": "timed out"}
    answer = look(connections, a=reply("a", {"b": stalls}), b=reply("b", {"a": no}))
    assert "ufw" in answer.fix, "a firewall may be all of it"
