"""Sessions over ssh with the agent on each host, and what it means when ssh fails.

The command that ssh passes to a host's login shell, of whatever kind, is always the same: a POSIX
shell reads the program from its input. Paths reach the host only through the input, each byte
written as a number. So nothing in a path can be taken for anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chainermn_tools import jobs
from chainermn_tools.doctor import agent
from chainermn_tools.jobs import HOST_NAME

# For a login shell, which may be csh or fish: nothing in it is special to these.
COMMAND = "exec sh -c 'IFS= read -r code && eval \"$code\"'"
# The next line of the input is the program; it reads what follows.
LOADER = 'import json, sys; exec(compile(json.loads(sys.stdin.readline()), "doctor", "exec"))'
# Without a Python a host says in JSON what a shell can find out, each text in hexadecimal.
WITHOUT_PYTHON = """\
hex() { od -An -v -tx1 | tr -d " \\n"; }; \
there=; [ -f "$script" ] && there=yes; \
printf "\\n%s{" "$mark"; \
printf "\\"status\\": \\"%s\\", " "$(printf %s "$status" | hex)"; \
printf "\\"exists\\": \\"%s\\", " "$([ -e "$python" ] && printf yes | hex)"; \
printf "\\"other\\": \\"%s\\", " "$( (command -v python3 || command -v python) | hex)"; \
printf "\\"variables\\": \\"%s\\", " "$(env | hex)"; \
printf "\\"script\\": \\"%s\\", " "$(printf %s "$there" | hex)"; \
printf "\\"shm\\": \\"%s\\", " "$(df -Pk /dev/shm | tail -n 1 | hex)"; \
printf "\\"hostname\\": \\"%s\\"}\\n" "$(uname -n | hex)"
"""
MAX_LINE_BYTES = 1 << 20
MAX_STDERR_CHARACTERS = 20_000
GRACE_SECONDS = 1.0
# Where users tell mpiexec which ssh to take, MPICH and its relatives and then Open MPI.
HYDRA_AGENTS = ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC")
OPEN_MPI_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent")
OPTIONS = (
    *("-T", "-x"),
    "-v",  # even where a wrapper says -q it then says why it failed, and which keys it offered
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectionAttempts=1"),
)
OFFERED = re.compile(r"^debug1: Offering public key", re.MULTILINE)
LOGGED_IN = re.compile(r"^(?:debug1: )?Authenticated to ", re.MULTILINE)
# What -v adds: its own lines, and the banner of a version. And what is no failure.
VERBOSE_LINE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: "
    r"|Warning: Permanently added "
)
QUOTED_CHARACTERS = 300
IF_SLOW = "if it is just slow, give it more time with --timeout"


class FailureKind(NamedTuple):
    """A way in which a login can fail."""

    name: str  # what JSON calls it
    message: str  # what is wrong
    hint: str  # what to do about it, with ``{host}`` for the host's name
    pattern: str | None = None  # what ssh prints; None for a kind that is recognised otherwise
    check: str = "ssh"  # the name of the check that reports it


# Most telling first.
FAILURE_KINDS = (
    FailureKind(
        "unknown name",
        "nobody knows this name",
        "write the host's address, or add a line to /etc/hosts: ADDRESS {host}",
        r"could not resolve hostname|name or service not known",
        "host names",
    ),
    FailureKind(
        "changed host key",
        "its key is not the one that ssh knows",
        "ssh-keygen -R {host}   # if the host was installed anew, and else find out who answers",
        r"remote host identification has changed|host key for .* has changed",
        "host keys",
    ),
    FailureKind(
        "unknown host key",
        "ssh doesn't know its key yet, and would ask",
        "ssh {host}   # once, and answer yes if the fingerprint is right",
        r"host key verification failed|no .* host key is known for",
        "host keys",
    ),
    FailureKind(
        "refused key",
        "it takes none of the keys that ssh offers",
        "ssh-copy-id {host}",
        r"permission denied \(|too many authentication failures",
    ),
    FailureKind(
        "refused",
        "it refuses the connection: no ssh server listens there",
        "sudo systemctl start ssh   # on {host}; or put its port into ~/.ssh/config",
        r"connection refused",
    ),
    FailureKind(
        "unreachable",
        "there is no way to it, or it is down",
        "ping {host}   # and see that the host runs, and that no firewall drops port 22",
        r"timed out|no route to host|network is unreachable"
        r"|connect to host .*(?:permission denied|operation not permitted)",  # a firewall here
    ),
    FailureKind(
        "closed",
        "its ssh server closes the connection before the login",
        "sudo journalctl -u ssh   # on {host}, which says why: MaxStartups, a blocked address",
        r"connection closed by|connection reset by|kex_exchange_identification",
    ),
    FailureKind(
        "no key",
        "it wants a key, and ssh has none to offer",
        "ssh-keygen -t ed25519 && ssh-copy-id {host}",
    ),
    FailureKind(
        "no answer",
        "ssh gets no answer in time",
        f"ssh -v {{host}} true   # shows where it waits; {IF_SLOW}",
    ),
    FailureKind(
        "no shell",
        "the login succeeds, but what runs there gives no answer in time",
        "ssh {host} true   # if it doesn't end, see ~/.bashrc there and what it waits for; "
        + IF_SLOW,
    ),
    FailureKind(
        "no ssh",
        "ssh can't be started here",
        "sudo apt-get install openssh-client   # or what HYDRA_LAUNCHER_EXEC names",
    ),
)
KINDS = {kind.name: kind for kind in FAILURE_KINDS}


class SSHFailure(NamedTuple):
    """Why a host gave no answer: a kind's name, and what was said, on one line, if anything."""

    kind: str
    message: str


def program(vendor: str | None) -> list[str]:
    """Return the words with which the mpiexec of this vendor would start ssh."""
    if vendor == "Open MPI":
        chosen = next(filter(None, map(os.environ.get, OPEN_MPI_AGENTS)), "ssh")
        return shlex.split(chosen.split(" : ")[0])  # it may list several to choose from
    return [next(filter(None, map(os.environ.get, HYDRA_AGENTS)), "ssh")]


def login_command(program: Sequence[str], host: str, command: str, timeout: float) -> list[str]:
    """Return the words that run a command in the host's login shell; refuse what is no name."""
    if not HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no name of a host")
    limit = f"ConnectTimeout={max(1, int(timeout))}"
    return [*program, *OPTIONS, "-o", limit, "--", host, command]


def classify_failure(stderr: str) -> SSHFailure:
    """Return what made ssh fail, from what it wrote to standard error under ``-v``."""
    message = without_verbose_lines(stderr)
    if LOGGED_IN.search(stderr):
        return SSHFailure("no shell", message)
    for kind in FAILURE_KINDS:
        if kind.pattern and re.search(kind.pattern, message, re.IGNORECASE):
            if kind.name == "refused key" and not OFFERED.search(stderr):
                return SSHFailure("no key", message)
            return SSHFailure(kind.name, message)
    return SSHFailure("no answer", message)


def without_verbose_lines(stderr: str) -> str:
    """Return what ``-v`` did not add, on one line, the end of it if it is long."""
    lines = [line for line in stderr.splitlines() if not VERBOSE_LINE.match(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= QUOTED_CHARACTERS else f"... {text[-QUOTED_CHARACTERS:]}"


def first_input(python: str, script: str | None, order: dict[str, Any]) -> str:
    """Return what a host's shell reads: its code, the agent for this Python, and its first order.

    The ``script`` is the user's.
    """
    code = (
        f"mark={_quote(agent.MARK)}; python={_quote(python)}; script={_quote(script or '')}; "
        "mark=${mark%.}; python=${python%.}; script=${script%.}; "
        f"\"$python\" -c '{LOADER}'; status=$?; [ $status = 0 ] && exit 0; {WITHOUT_PYTHON}"
    )
    program = json.dumps(Path(agent.__file__).read_text())
    return f"{code.strip()}\n{program}\n{json.dumps({**order, 'script': script})}\n"


def _quote(text: str) -> str:
    """Return a shell's word for the text and a dot, which keeps newlines at the text's end."""
    octal = "".join(f"\\0{byte:03o}" for byte in text.encode(errors="surrogateescape"))
    return f"\"$(printf %b. '{octal}')\""


def parse_shell_answer(answer: dict[str, str]) -> dict[str, Any]:
    """Return what a host without Python said, in the form of the agent's facts."""
    said = {name: bytes.fromhex(text).decode(errors="replace") for name, text in answer.items()}
    lines = [line.partition("=") for line in said["variables"].splitlines()]
    # The last line of `df -Pk`: file system, size, used, free, ...
    words = said["shm"].split()
    shm = None
    if len(words) >= 4 and (words[1] + words[3]).isdigit():
        shm = {"total_bytes": int(words[1]) * 1024, "free_bytes": int(words[3]) * 1024}
    return {
        "python": None,
        "status": said["status"],
        "exists": bool(said["exists"]),
        "other": said["other"].strip(),
        "variables": {name: value for name, sign, value in lines if sign},
        "script": {"there": said["script"] == "yes"},
        "shm": shm,
        "hostname": said["hostname"].strip(),
    }


@contextlib.contextmanager
def open_sessions() -> Iterator[Callable[[Sequence[str]], Session]]:
    """Yield a function that starts a session; at the end of the block all are ended, together."""
    tag = jobs.TAG_VARIABLE, secrets.token_hex(8)
    sessions: list[Session] = []

    def start(args: Sequence[str]) -> Session:
        sessions.append(Session(args, tag))
        return sessions[-1]

    with jobs.register_tag(tag):
        try:
            yield start
        finally:
            _end([one.process for one in sessions], tag)


def _end(processes: Sequence[subprocess.Popen[bytes]], tag: tuple[str, str]) -> None:
    """End programs: by the end of their input, then by SIGTERM, and then by SIGKILL."""
    for stop in (_close_input, subprocess.Popen.terminate):
        for process in processes:
            stop(process)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    jobs.kill_by_env_tag(tag)
    for process in processes:
        process.wait()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


class Session:
    """A program that answers orders; made by what :func:`open_sessions` yields.

    Attributes:
        process: of the program.
        started: on ``time.monotonic()``'s clock.
        answered: set once the first answer has come, or the program has ended.
        stderr: what came over standard error so far, the end of it if it is long.
    """

    def __init__(self, args: Sequence[str], tag: tuple[str, str]) -> None:
        """Start the program, which is found again by the tag; raise OSError if it can't be."""
        self.started = time.monotonic()
        self.answered = threading.Event()
        self.stderr = ""
        self.process = subprocess.Popen(
            args,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, tag[0]: tag[1]},
            start_new_session=True,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        # Nobody waits for them to end: an orphan may hold their pipes for ever.
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        threading.Thread(target=self._read_answers, daemon=True).start()

    def send(self, text: str) -> None:
        """Send lines; without effect if the program has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next answer; None if there is none in time, or the program has ended."""
        try:
            return self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace")
                if text.startswith(agent.MARK):  # start-up files of shells print things, too
                    with contextlib.suppress(ValueError):
                        self._answers.put(json.loads(text[len(agent.MARK) :]))
                        self.answered.set()
        # Whoever hears that the program has ended asks why.
        self._stderr_reader.join(GRACE_SECONDS)
        self._answers.put(None)
        self.answered.set()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                text = self.stderr + piece.decode(errors="replace")
                self.stderr = text[-MAX_STDERR_CHARACTERS:]
