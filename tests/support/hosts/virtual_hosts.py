"""Hosts made of namespaces: each with its own network, name, processes, /dev/shm and sshd.

They hang on a bridge that lies in a namespace of its own, too: nothing of it can be
seen from outside, so runs at the same time don't meet, and all of it goes when its
processes do, which end with the process that made them however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]

from tests.support.jobs.runner import (
    MPIEXEC,
    SECONDS,
    Job,
    Meanwhile,
    on_open_mpi,
    run_command,
    variables,
)

T = TypeVar("T")

# Program and the Debian package that brings it.
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
PREFIX = "chainermn-hosts-"  # of the folder
DEVICE = "eth0"
SHM = "512m"
# They end hangs, no more.
COMMAND_SECONDS = 120.0
LAUNCH_SECONDS = 300.0

# The life of a host, as its first process: $0 is its name, $1 the folder of the
# cluster. It says there that it has its mounts, since nothing else is sure to be new:
# until it has them, it sees what this machine has, which may run an sshd as well.
HOST = f"""
set -e
hostname "$0"
mount -t tmpfs -o size={SHM} tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind "$1/hosts" /etc/hosts
ip link set lo up
touch "$1/$0.ready"
exec "$(command -v sshd)" -D -e -f /dev/null -h "$1/hostkey" -o AuthorizedKeysFile="$1/user.pub" \\
    -o StrictModes=no -o PidFile=none -o PermitRootLogin=yes -o UsePAM=yes
"""
SWITCH = """
set -e
ip link add bridge type bridge
ip link set bridge up
touch "$0/ready"
exec sleep infinity
"""
SSH = """#!/bin/sh
exec ssh -q -F none -i '{folder}/user' -o StrictHostKeyChecking=no \\
    -o UserKnownHostsFile=/dev/null "$@"
"""


def missing() -> str:
    """What this machine lacks to make hosts; "" if nothing."""
    programs = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if programs:
        packages = sorted({PROGRAMS[name] for name in programs})
        return (
            f"no {', '.join(programs)} (Debian: apt-get install {' '.join(packages)})"
        )
    tried = subprocess.run(
        [
            "unshare",
            *NAMESPACES,
            "--fork",
            "sh",
            "-c",
            "ip link add bridge type bridge",
        ],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
        env=os.environ | {"PATH": _path()},
    )
    if tried.returncode:
        return f"no right to make namespaces and a bridge: {tried.stderr.strip()}"
    return ""


class Cluster:
    """Hosts, each with an sshd; a context manager that ends them.

    Attributes:
        hosts: their names.
        folder: keys and other files that the hosts use.
        inits: the first process of each host, with whose end the host ends.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """Make the hosts; when that fails, none is left."""
        self.hosts = tuple(hosts)
        self.inits: dict[str, int] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._cleanup = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            self.folder = Path(
                self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            )
            self._write_files()
            switch = self._start(
                "unshare", "--net", "sh", "-c", SWITCH, str(self.folder)
            )
            self._await((self.folder / "ready").stat)
            for number, host in enumerate(hosts, start=1):
                self._add(host, number, switch)
            for host in hosts:
                self._await_sshd(host)
            undo.pop_all()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and whatever runs there; a second call does nothing."""
        inits = []
        for pid in self.inits.values():
            with suppress(psutil.NoSuchProcess):
                inits.append(psutil.Process(pid))
        self._cleanup.close()
        psutil.wait_procs(inits, COMMAND_SECONDS)

    def run(self, host: str, *command: object, seconds: float = COMMAND_SECONDS) -> str:
        """Run a command on a host; what it printed. It must succeed."""
        return _output(*self.on(host), *command, seconds=seconds)

    def start(self, host: str, *command: object) -> int:
        """Start a process on a host that lives as long as the cluster, unless it ends before."""
        return self._start(*self.on(host), *map(str, command))

    def limit(self, rate: str | None, burst: str = "256kb") -> None:
        """Shape what every host sends to a rate such as "1gbit"; None for no limit.

        A ``burst`` goes faster, which flatters small messages.
        """
        for host in self.hosts:
            # There may be none.
            with suppress(subprocess.CalledProcessError):
                self.run(host, "tc", "qdisc", "del", "dev", DEVICE, "root")
            if rate is not None:
                shape = f"tbf rate {rate} burst {burst} latency 50ms".split()
                self.run(host, "tc", "qdisc", "add", "dev", DEVICE, "root", *shape)

    @contextmanager
    def shm(self, host: str, size: str) -> Iterator[None]:
        """Meanwhile a new and empty /dev/shm on the host, that holds so much, such as "4m"."""
        self.run(
            host, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"
        )
        try:
            yield
        finally:
            self.run(host, "umount", "/dev/shm")

    def processes(self) -> list[psutil.Process]:
        """All that runs on the hosts but their sshd."""
        inits = set(self.inits.values())
        ours = {os.readlink(f"/proc/{pid}/ns/pid") for pid in inits}
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                space = os.readlink(f"/proc/{process.pid}/ns/pid")
                if space in ours and process.pid not in inits:
                    found.append(process)
        return found

    def job(
        self,
        ranks: dict[str, int],
        *arguments: object,
        alternating: bool = False,
        environment: dict[str, str] | None = None,
        seconds: float = SECONDS,
        meanwhile: Meanwhile | None = None,
    ) -> Job:
        """Run ``python *arguments`` on hosts, started by mpiexec on the first through ssh.

        Args:
            ranks: how many on each host.
            arguments: of the interpreter, such as a script that begins with PRELUDE.
            alternating: deal ranks out in turn instead of filling host after host.
            environment: variables to set besides those of this process.
            seconds: as `run_command` takes it, like the rest.
            meanwhile: see there.
        """
        passed = ["PYTHONPATH", "OMP_NUM_THREADS", *(environment or {})]
        mpiexec = self._mpiexec(ranks, passed, alternating)
        command = [*self.on(next(iter(ranks))), *mpiexec, *map(str, arguments)]
        return run_command(
            command,
            variables(environment),
            seconds,
            self.processes,
            meanwhile=meanwhile,
        )

    def launch(
        self,
        *words: object,
        environment: dict[str, str] | None = None,
        seconds: float = LAUNCH_SECONDS,
        meanwhile: Meanwhile | None = None,
    ) -> Job:
        """Run ``chainermn launch`` on the first host, otherwise as `job` does."""
        ssh = str(self.folder / "ssh")
        set_here = {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": ssh,
            "UCX_TLS": "tcp,self",  # else it finds out that the hosts are one machine
            "PRTE_MCA_plm_ssh_agent": ssh,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            **(environment or {}),
        }
        launch = (sys.executable, "-m", "chainermn_tools", "launch")
        command = [*self.on(self.hosts[0]), *launch, *map(str, words)]
        return run_command(
            command, variables(set_here), seconds, self.processes, meanwhile=meanwhile
        )

    def _mpiexec(
        self, ranks: dict[str, int], passed: list[str], alternating: bool
    ) -> list[str]:
        """The words before the arguments of ``python``; Open MPI passes on what is `passed`."""
        total = sum(ranks.values())
        if on_open_mpi():
            return [
                *(str(MPIEXEC), "--mca", "plm_rsh_agent", str(self.folder / "ssh")),
                *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
                *("--host", ",".join(f"{host}:{n}" for host, n in ranks.items())),
                *("--map-by", "node" if alternating else "slot"),
                *(word for name in passed for word in ("-x", name)),  # MPICH passes all
                *("-n", str(total), sys.executable),
            ]
        if alternating:
            dealt = [list(ranks)[rank % len(ranks)] for rank in range(total)]
            if {host: dealt.count(host) for host in ranks} != ranks:
                raise ValueError(f"MPICH deals in turn, so it can't do {ranks}")
        hosts = [host if alternating else f"{host}:{n}" for host, n in ranks.items()]
        return [
            *(
                str(MPIEXEC),
                "-launcher",
                "ssh",
                "-launcher-exec",
                str(self.folder / "ssh"),
            ),
            # UCX would find out that the hosts are one machine, and bypass the network.
            *("-genv", "UCX_TLS", "tcp,self"),
            *("-hosts", ",".join(hosts), "-n", str(total), sys.executable),
        ]

    def on(self, host: str) -> list[str]:
        """The words before a command that is to run on a host."""
        return ["nsenter", "-t", str(self.inits[host]), *NAMESPACES, "--"]

    def _write_files(self) -> None:
        for key in ("user", "hostkey"):
            _output(
                "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key
            )
        rows = [
            f"{_address(number)} {host}"
            for number, host in enumerate(self.hosts, start=1)
        ]
        (self.folder / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", *rows, ""])
        )
        wrapper = self.folder / "ssh"
        wrapper.write_text(SSH.format(folder=self.folder))
        wrapper.chmod(0o700)

    def _start(self, *command: str) -> int:
        """Start a process that lives as long as the cluster, and ends when this one does."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | {"PATH": _path()},
                start_new_session=True,
            )
        self._started.append(process)
        self._cleanup.callback(process.wait, COMMAND_SECONDS)
        self._cleanup.callback(process.kill)
        return process.pid

    def _add(self, host: str, number: int, switch: int) -> None:
        """Start a host and plug it into the bridge."""
        options = (*NAMESPACES, "--mount-proc", "--propagation", "private", "--fork")
        outer = self._start(
            "unshare",
            *options,
            "--kill-child=KILL",
            "sh",
            "-c",
            HOST,
            host,
            str(self.folder),
        )
        init = self._await(lambda: psutil.Process(outer).children()[0].pid)
        self.inits[host] = init
        self._await((self.folder / f"{host}.ready").stat)
        port = f"port{number}"
        in_switch = ("nsenter", "-t", switch, "--net", "ip", "link")
        peer = ("peer", "name", DEVICE, "netns", init)
        _output(*in_switch, "add", port, "type", "veth", *peer)
        _output(*in_switch, "set", port, "master", "bridge", "up")
        in_host = ("nsenter", "-t", init, "--net", "ip")
        _output(*in_host, "addr", "add", f"{_address(number)}/24", "dev", DEVICE)
        _output(*in_host, "link", "set", DEVICE, "up")

    def _await_sshd(self, host: str) -> None:
        self._await(lambda: self.run(self.hosts[0], self.folder / "ssh", host, "true"))

    def _await(self, attempt: Callable[[], T]) -> T:
        """What the attempt gives once it succeeds."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while True:
            try:
                return attempt()
            except (subprocess.SubprocessError, IndexError, OSError) as error:
                ended = any(process.poll() is not None for process in self._started)
                if ended or time.monotonic() > deadline:
                    log = (self.folder / "log").read_text(errors="replace")
                    raise RuntimeError(f"a host didn't start: {error}\n{log}") from None
            time.sleep(0.05)


def _address(number: int) -> str:
    return f"10.99.0.{number}"


def _path() -> str:
    """PATH with the folders where sshd and tc may lie."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class _CommandError(subprocess.CalledProcessError):
    """That a command failed, and what it said."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.stderr}"


def _output(*command: object, seconds: float = COMMAND_SECONDS) -> str:
    done = subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | {"PATH": _path()},
    )
    if done.returncode:
        raise _CommandError(done.returncode, done.args, done.stdout, done.stderr)
    return done.stdout
