"""The program that the doctor runs on each host, this one too: it reports facts and connects.

It is sent as text to whatever Python the host has. So it imports nothing of ours, and
keeps to what Python 3.6 understands: newer types stand in quotes. It reads orders, JSON
objects a line each, and answers each with a line that begins with MARK. It ends with
its input, or when its time is over.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

MARK = "chainermn-doctor:"
BACKLOG = 128  # connections that may wait until they are accepted
CONNECT_THREADS = 100  # threads that try connections
MAX_TEXT_LENGTH = 4000
# More than any network carries in one piece. One that is set to carry more than it can
# loses it.
STALL_TEST_BYTES = 1 << 18
STALLED = "a short message arrives, and a long one stalls"


def main() -> None:
    sys.path[:] = [folder for folder in sys.path if folder]
    order = json.loads(sys.stdin.readline())
    signal.alarm(int(order["seconds"]))  # ends it whatever it does
    listener = listen()
    threading.Thread(target=serve, args=(listener, order["token"]), daemon=True).start()
    answer(dict(facts(order), port=listener.getsockname()[1]))
    for line in sys.stdin:
        answer(try_connections(json.loads(line), order["token"]))


def answer(content: "dict[str, Any]") -> None:
    sys.stdout.write("\n" + MARK + json.dumps(content) + "\n")
    sys.stdout.flush()


def facts(order: "dict[str, Any]") -> "dict[str, Any]":
    implementation = platform.python_implementation()
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": implementation,
        },
        "packages": packages(order["packages"], order["families"]),
        "mpiexec": mpiexecs(order["mpiexec"], order["program_seconds"]),
        "variables": dict(os.environ),
        "script": None if order["script"] is None else script(order["script"]),
        "shm": shm(),
        "memory": memory_limit(),
        "hostname": socket.gethostname(),
        "machine": machine(),
    }


def packages(names: "list[str]", families: "list[str]") -> "dict[str, str | None]":
    """Return the versions of the distributions that are installed; of two, the imported one's."""
    try:
        from importlib import metadata
    except ImportError:  # before Python 3.8
        return {}
    found: dict[str, str | None] = {}
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name in names or name.startswith(tuple(family + "-" for family in families)):
            found.setdefault(name, one.metadata["Version"])
    return found


def mpiexecs(path: str, seconds: float) -> "dict[str, Any]":
    """Return the version text of mpiexec at the given path, and of the one on PATH."""
    found = {}
    for name, where in (("same path", path), ("on PATH", shutil.which("mpiexec"))):
        if where and os.path.exists(where):
            real, text = os.path.realpath(where), version_text(where, seconds)
            found[name] = {"path": real, "text": text or "", "hangs": text is None}
    return found


def version_text(path: str, seconds: float) -> "str | None":
    """Return what a program prints when it is asked for its version; None if it hangs."""
    try:
        process = Popen(
            [path, "--version"],
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
    except OSError as problem:
        return str(problem)
    try:
        return process.communicate(timeout=seconds)[0].decode(errors="replace")[
            :MAX_TEXT_LENGTH
        ]
    except TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()
        return None


def script(path: str) -> "dict[str, Any]":
    """Return whether the file is there, and a digest of it or why it can't be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
    except OSError as problem:
        return {"there": os.path.exists(path), "problem": problem.strerror}
    return {"there": True, "digest": digest.hexdigest()}


def shm() -> "dict[str, Any] | None":
    try:
        fs = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {
        "total_bytes": fs.f_frsize * fs.f_blocks,
        "free_bytes": fs.f_frsize * fs.f_bavail,
    }


def memory_limit() -> "int | None":
    """Return the bytes that the tightest control group allows; None without one."""
    limits = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for kinds, path in (line.strip().split(":", 2)[1:] for line in file):
            name = "memory.limit_in_bytes" if kinds else "memory.max"
            while kinds in ("", "memory"):
                where = "/sys/fs/cgroup/" + kinds + path + "/" + name
                with contextlib.suppress(OSError, ValueError), open(where) as limit:
                    limits.append(int(limit.read()))
                if path == "/":
                    break
                path = os.path.dirname(path)
    return min(limits, default=None)


def machine() -> str:
    """Return what is the same for all names of one host, and different on two."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {socket.gethostname()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return socket.gethostname()


def listen() -> socket.socket:
    """Return a socket that listens at a port that the kernel chose, over IPv6 too."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
    except OSError:  # no IPv6
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("", 0))
    listener.listen(BACKLOG)
    return listener


def serve(listener: socket.socket, token: str) -> None:
    """Send the token to every client, so that it knows which program it has reached."""
    while True:
        connection, _ = listener.accept()
        # One that stalls holds up no other.
        threading.Thread(
            target=send_data, args=(connection, token), daemon=True
        ).start()


def send_data(connection: socket.socket, token: str) -> None:
    """Send the token, and then enough to show whether large messages come through."""
    # Most close once they have the token.
    with connection, contextlib.suppress(OSError):
        connection.sendall(token.encode())  # in a packet of its own
        connection.sendall(bytes(STALL_TEST_BYTES))


def try_connections(order: "dict[str, Any]", token: str) -> "dict[str, Any]":
    """Connect to others, each ``[address, port]``; return what came of it, by name."""
    others, seconds = order["connect"], order["seconds"]
    with ThreadPoolExecutor(CONNECT_THREADS) as pool:
        found = pool.map(
            lambda one: connect(one[0], one[1], token, seconds), others.values()
        )
        return dict(zip(others, found))  # noqa: B905


def connect(address: str, port: int, token: str, seconds: float) -> "dict[str, Any]":
    """Return the seconds that a connection takes, or what was wrong with it."""
    begun, received = time.perf_counter(), bytearray()
    try:
        with socket.create_connection((address, port), seconds) as connection:
            found = {"seconds": time.perf_counter() - begun}
            received = read(connection, len(token))
            if received != token.encode():
                return {"problem": "something else answers there"}
            if len(read(connection, STALL_TEST_BYTES)) < STALL_TEST_BYTES:
                return {"problem": STALLED}
            return found
    except socket.timeout:  # noqa: UP041
        return {"problem": STALLED if received else "timed out"}
    except OSError as problem:
        return {"problem": problem.strerror or str(problem)}


def read(connection: socket.socket, nbytes: int) -> bytearray:
    """Return ``nbytes`` bytes, or fewer where the connection ends."""
    received = bytearray()
    while len(received) < nbytes:
        piece = connection.recv(min(STALL_TEST_BYTES, nbytes - len(received)))
        if not piece:
            break
        received += piece
    return received


if __name__ == "__main__":
    main()
