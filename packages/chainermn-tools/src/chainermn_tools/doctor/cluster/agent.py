"""The program that the doctor runs on each host, this one too: what is there, who can be reached.

It is sent as text to whatever Python the host has. So it imports nothing of ours, and keeps to
what Python 3.6 understands: newer types stand in quotes. It reads orders, JSON objects a line
each, and answers each with a line that begins with MARK. It ends with its input, or when its time
is over.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MARK = "chainermn-doctor:"
# Of the same package two may be installed; the one that would be imported says in its own files.
IMPORTED = ("numpy", "mpi4py", "chainer", "cupy")
VERSION = re.compile(r"^(?:__version__|version)\s*(?::[^=]*)?=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
LISTENING = 128  # connections that may wait until they are accepted
CONNECTORS = 100  # threads that try connections
TRIES = 5  # connections to the same host, of which the fastest is its distance
LONGEST_TEXT = 4000
# More than any network carries in one piece. One that is told to carry more than it can loses it.
LARGE_BYTES = 1 << 18
STALLED = "a short message arrives, and a long one stalls"


def main() -> None:
    sys.path[:] = [folder for folder in sys.path if folder]
    job = json.loads(sys.stdin.readline())
    signal.alarm(int(job["seconds"]))  # ends it whatever it does
    listener = listen()
    threading.Thread(target=greet, args=(listener, job["token"]), daemon=True).start()
    say(dict(facts(job), port=listener.getsockname()[1]))
    for line in sys.stdin:
        say(reach(json.loads(line), job["token"]))


def say(answer: "dict[str, Any]") -> None:
    sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def facts(job: "dict[str, Any]") -> "dict[str, Any]":
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
        },
        "packages": packages(job["packages"], job["families"]),
        "mpiexec": mpiexecs(job["mpiexec"], job["program_seconds"]),
        "variables": dict(os.environ),
        "script": None if job["script"] is None else script(job["script"]),
        "shm": shm(),
        "hostname": socket.gethostname(),
        "machine": machine(),
    }


def packages(names: "list[str]", families: "list[str]") -> "dict[str, str | None]":
    """Versions of the distributions that are installed, by name."""
    try:
        from importlib import metadata, util
    except ImportError:  # before Python 3.8
        return {}
    found: dict[str, str | None] = {}
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name in names or name.startswith(tuple(family + "-" for family in families)):
            found.setdefault(name, one.metadata["Version"])
    for name in IMPORTED:
        spec = util.find_spec(name)
        if spec is not None and spec.origin:
            written, installed = written_version(os.path.dirname(spec.origin)), found.get(name)
            found[name] = written or installed
            if written and installed and written != installed:
                found[name] = f"{written} (installed as {installed})"
    return found


def written_version(folder: str) -> "str | None":
    for name in ("version.py", "_version.py", "__init__.py"):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                version = VERSION.search(file.read())
        except OSError:
            continue
        if version:
            return version.group(1)
    return None


def mpiexecs(path: str, seconds: float) -> "dict[str, Any]":
    """What mpiexec says at the path that is used here, and where PATH leads to another one."""
    found = {}
    first = shutil.which("mpiexec")
    for name, where in (("same path", path), ("on PATH", first)):
        if where and os.path.exists(where):
            found[name] = {"path": os.path.realpath(where), "text": version_text(where, seconds)}
    return found


def version_text(path: str, seconds: float) -> str:
    try:
        process = subprocess.Popen(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as problem:
        return str(problem)
    try:
        return process.communicate(timeout=seconds)[0].decode(errors="replace")[:LONGEST_TEXT]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()
        return f"it did not end within {seconds:g} s"


def script(path: str) -> "dict[str, Any]":
    """Whether the file is there, and a digest of it; None where it can't be read."""
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
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {
        "total_bytes": found.f_frsize * found.f_blocks,
        "free_bytes": found.f_frsize * found.f_bavail,
    }


def machine() -> str:
    """The same for all names of one host, and different on two."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {socket.gethostname()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return socket.gethostname()


def listen() -> socket.socket:
    """A socket that takes connections at a port that the kernel chose, over IPv6 too."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
    except OSError:  # no IPv6
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("", 0))
    listener.listen(LISTENING)
    return listener


def greet(listener: socket.socket, token: str) -> None:
    """Tell whoever connects that it has reached this program and no other."""
    while True:
        connection, _ = listener.accept()
        # One that stalls holds up no other.
        threading.Thread(target=tell, args=(connection, token), daemon=True).start()


def tell(connection: socket.socket, token: str) -> None:
    """Send the token, and then as much as shows whether large messages come through."""
    try:
        connection.sendall(token.encode())
        connection.sendall(bytes(LARGE_BYTES))
    except OSError:  # most close once they have the token
        pass
    finally:
        connection.close()


def reach(order: "dict[str, Any]", token: str) -> "dict[str, Any]":
    """Connect to others, each ``[address, port]``; what came of it, by name."""
    others = order["connect"]
    with ThreadPoolExecutor(CONNECTORS) as pool:
        found = pool.map(
            lambda one: connect(one[0], one[1], token, order["seconds"]), others.values()
        )
        return dict(zip(others, found))  # noqa: B905


def connect(address: str, port: int, token: str, seconds: float) -> "dict[str, Any]":
    """Seconds of the fastest connection, or what went wrong with the first that failed."""
    fastest = seconds
    for left in reversed(range(TRIES)):
        begun = time.perf_counter()
        heard = b""
        try:
            with socket.create_connection((address, port), seconds) as connection:
                fastest = min(fastest, time.perf_counter() - begun)
                heard = read(connection, len(token))
                if heard != token.encode():
                    return {"problem": "something else answers there"}
                if not left and len(read(connection, LARGE_BYTES)) < LARGE_BYTES:
                    return {"problem": STALLED}
        except socket.timeout:  # noqa: UP041
            return {"problem": STALLED if heard else "timed out"}
        except OSError as problem:
            return {"problem": problem.strerror or str(problem)}
    return {"seconds": fastest}


def read(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer where the connection ends."""
    heard = b""
    while len(heard) < nbytes:
        piece = connection.recv(nbytes - len(heard))
        if not piece:
            break
        heard += piece
    return heard


if __name__ == "__main__":
    main()
