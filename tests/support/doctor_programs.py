"""What the doctor's own programs do on hosts, one by one: to answer, to connect, to exchange."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chainermn_tools.doctor.hosts import bootstrap, exchanging, remote

SECONDS = 60.0  # ends a hang, no more


def said_by(shell: str, python: str, script: str, folder: str) -> dict[str, Any]:
    """What a host says that has such a login shell and Python, as sshd starts it there."""
    order = {"seconds": 60, "token": "t", "packages": [], "families": ["cupy"]}
    order |= {"mpiexec": None, "program_seconds": 5}
    done = subprocess.run(
        [shell, "-c", bootstrap.COMMAND],
        input=bootstrap.first_lines(python, script, order).encode(),
        capture_output=True,
        cwd=folder,
        timeout=SECONDS,
        check=False,
    )
    answers = [line for line in done.stdout.split(b"\n") if line.startswith(remote.MARK.encode())]
    assert len(answers) == 1, done
    said: dict[str, Any] = json.loads(answers[0][len(remote.MARK) :])
    return said if "python" in said else bootstrap.without_python(said)


def source_for_hosts() -> str:
    """The program that is sent to whatever Python a host has."""
    return Path(remote.__file__).read_text()


def connect(port: int, token: str, seconds: float) -> dict[str, Any]:
    """What a host finds that connects to a port of this machine."""
    return remote.connect("127.0.0.1", port, token, seconds)


listen = remote.listen


@contextlib.contextmanager
def greeting(token: str) -> Iterator[int]:
    """The port at which a host's program awaits others."""

    def greet() -> None:
        with contextlib.suppress(OSError):  # the listener is closed in the end
            remote.greet(listener, token)

    with remote.listen() as listener:
        threading.Thread(target=greet, daemon=True).start()
        yield listener.getsockname()[1]


# What ranks on hosts do; these run in a world


def exchange_messages(
    world: Any, hosts: Sequence[str], pairs: Sequence[tuple[str, str, str | None]]
) -> tuple[bool, list[dict[str, Any]]]:
    """Whether no pair's connection stalled, and what all ranks said (collective)."""
    said: list[dict[str, Any]] = []
    well = exchanging.messages(world, hosts, pairs, lambda **record: said.append(record))
    return well, [record for records in world.allgather(said) for record in records]


def try_communicators(world: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """What this rank said while communicators were tried (collective)."""
    said: list[dict[str, Any]] = []
    exchanging.communicators(world, names, lambda **record: said.append(record))
    return said


def corrupt(patch: pytest.MonkeyPatch) -> None:
    """Let all that comes back be wrong."""
    patch.setattr(exchanging, "is_filled", lambda *_, **__: False)


@contextlib.contextmanager
def stalling(world: Any) -> Iterator[None]:
    """Meanwhile rank 1 takes a connection, and reads next to nothing."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as taken:

        def take(listener: Any, _: int) -> None:
            taken.enter_context(listener.accept()[0]).recv(1)

        patch.setattr(exchanging, "STALL_SECONDS", 0.5)
        if world.rank == 1:
            patch.setattr(exchanging, "_take", take)
        yield
