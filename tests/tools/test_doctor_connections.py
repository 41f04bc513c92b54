"""What a host finds when it connects to another: a way, none, somebody else, or half a way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest

from tests.support.doctor_programs import connect, greeting, listen

TOKEN = "0123456789abcdef"
SECONDS = 0.5  # that nothing comes; what comes, comes at once
STALLED = "a short message arrives, and a long one stalls"
ANOTHER = "something else answers there"


@pytest.fixture
def server():
    """Gives the port at which a function is given each connection."""
    with contextlib.ExitStack() as stack:

        def serve(answer: Callable[[socket.socket], object]) -> int:
            listener = stack.enter_context(listen())

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
    ("answer", "seconds", "problem"),
    [
        (lambda c: None, SECONDS, "timed out"),
        (lambda c: c.close(), 60, ANOTHER),
        (lambda c: c.sendall(b"HTTP/1.1 400 Bad"), 60, ANOTHER),
        (lambda c: c.sendall(TOKEN.encode()), 2 * SECONDS, STALLED),
        (lambda c: (c.sendall(TOKEN.encode()), c.close()), 60, STALLED),
    ],
    ids=["silent", "closes", "another", "stalls", "ends"],
)
def test_what_is_wrong_with_a_connection_is_told(server, answer, seconds, problem):
    assert connect(server(answer), TOKEN, seconds) == {"problem": problem}


def test_nobody_at_the_port_is_told():
    with listen() as listener:
        port = listener.getsockname()[1]
    assert connect(port, TOKEN, 60) == {"problem": "Connection refused"}


def test_programs_of_the_doctor_find_one_another_even_beside_one_that_stalls():
    with greeting(TOKEN) as port, socket.create_connection(("127.0.0.1", port)):  # reads nothing
        assert connect(port, TOKEN, 60).keys() == {"seconds"}
