"""The program for hosts: what connecting to another finds, and which Pythons understand it."""

from __future__ import annotations

import ast
import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chainermn_tools.doctor.cluster import agent

TOKEN = "0123456789abcdef"
STALLED = "a short message arrives, and a long one stalls"
ANOTHER = "something else answers there"


def connect(port: int, seconds: float = 60) -> dict:
    return agent.connect("127.0.0.1", port, TOKEN, seconds)


@contextlib.contextmanager
def served(work: Callable[[socket.socket], object]):
    """Gives a port of whose listener a function takes care."""

    def take_care() -> None:
        with contextlib.suppress(OSError):  # it is closed in the end
            work(listener)

    with agent.listen() as listener:
        threading.Thread(target=take_care, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "seconds", "problem"),
    [
        (lambda c: None, 0.1, "timed out"),
        (lambda c: c.close(), 60, ANOTHER),
        (lambda c: c.sendall(b"HTTP/1.1 400 Bad"), 60, ANOTHER),
        (lambda c: c.sendall(TOKEN.encode()), 5, STALLED),
        (lambda c: (c.sendall(TOKEN.encode()), c.close()), 60, STALLED),
    ],
    ids=["silent", "closes", "another", "stalls", "ends"],
)
def test_what_is_wrong_with_a_connection_is_told(answer, seconds, problem):
    def answer_all(listener: socket.socket) -> None:
        while True:
            answer(taken.enter_context(listener.accept()[0]))

    with contextlib.ExitStack() as taken, served(answer_all) as port:
        assert connect(port, seconds) == {"problem": problem}


def test_nobody_at_the_port_is_told():
    with agent.listen() as listener:
        port = listener.getsockname()[1]
    assert connect(port) == {"problem": "Connection refused"}


def test_programs_of_the_doctor_find_one_another_even_beside_one_that_stalls():
    serve = functools.partial(agent.serve, token=TOKEN)
    # Reads nothing.
    with served(serve) as port, socket.create_connection(("127.0.0.1", port)):
        assert connect(port).keys() == {"seconds"}


def test_the_program_for_hosts_is_understood_by_old_pythons():
    tree = ast.parse(Path(agent.__file__).read_text(), feature_version=(3, 6))
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    imported = {alias.name for node in imports for alias in node.names}
    assert "socket" in imported
    assert not {name for name in imported if name.startswith("chainermn")}
