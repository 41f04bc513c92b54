"""Where a job runs: on this machine, or on hosts made of namespaces."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.jobs import MPIEXEC, variables
from tests.support.scripts import ROOT
from tests.support.virtual_hosts import Cluster

from .cases import Case

TRAINING = Path(__file__).with_name("training.py")
LAUNCH = ("-m", "chainermn_tools", "launch")
# The jobs of this run, by their environment; a value each.
MARK = "CHAINERMN_CHAOS"
DISK = "1m"
# Of a socket, in /proc/net/tcp: those in which a process is needed to have it.
OPEN = {"01": "ESTABLISHED", "0A": "LISTEN"}
SSH_PORT = 22


class Here:
    """This machine, which others use too."""

    hosts: tuple[str, ...] = ()

    def command(self, case: Case, file: Path, environment: dict[str, str]) -> list[str]:
        """The words that start the job."""
        words = [sys.executable, *LAUNCH] if case.launcher == "launch" else [str(MPIEXEC)]
        program = [] if case.launcher == "launch" else [sys.executable]
        return [*words, "-n", str(case.ranks), *program, str(TRAINING), str(file)]

    def processes(self, mark: str, ranks: list[int]) -> list[psutil.Process]:
        """Those of the job: all that have its mark, and the monitors of its ranks."""
        wanted, pids = f"{MARK}={mark}".encode(), set(map(str, ranks))
        found = []
        for process in psutil.process_iter():
            folder = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                marked = wanted in (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_text(errors="replace").split("\0")
                if marked or (is_monitor(words) and pids & set(words)):
                    found.append(process)
        return found

    def shared(self, mapped: set[str]) -> list[str]:
        """Of the files in /dev/shm that ranks of the job have mapped, those that are there."""
        return [f"/dev/shm/{name}" for name in sorted(mapped) if Path("/dev/shm", name).exists()]

    def remove(self, name: str) -> None:
        """Remove what `shared` named."""
        Path(name).unlink(missing_ok=True)

    def sockets(self) -> list[str]:
        """Of other jobs there may be any number; here they end with their processes."""
        return []

    @contextlib.contextmanager
    def disk(self, folder: Path) -> Iterator[None]:
        """Meanwhile the folder is a disk of its own."""
        raise NotImplementedError("a disk takes a host of its own")
        yield

    def seen(self, folder: Path) -> Path:
        """The folder as the job sees it."""
        return folder

    def cut(self) -> None:
        raise NotImplementedError("a link to cut takes two hosts")

    def mend(self) -> None:
        """Undo `cut`."""


class Hosts:
    """Hosts that nobody else uses."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts[:2]

    def command(self, case: Case, file: Path, environment: dict[str, str]) -> list[str]:
        """The words that start the job, from the first host."""
        first = self.hosts[0]
        second = case.ranks // 2 if case.hosts == 2 else 0
        dealt = {first: case.ranks - second, **({self.hosts[1]: second} if second else {})}
        if case.launcher == "mpiexec":
            words = self.cluster.mpiexec(dealt, [*environment, "OMP_NUM_THREADS", "PYTHONPATH"])
            return [*self.cluster.on(first), *words, str(TRAINING), str(file)]
        set_here = {
            **self.cluster.ssh_settings(),
            # Where Open MPI's daemons on other hosts make their folders.
            "PRTE_MCA_prte_remote_tmpdir_base": environment["TMPDIR"],
        }
        setting = [f"{name}={value}" for name, value in set_here.items()]
        listed = ",".join(f"{host}:{number}" for host, number in dealt.items())
        words = [sys.executable, *LAUNCH, "--hosts", listed, "-n", str(case.ranks)]
        return [*self.cluster.on(first), "env", *setting, *words, str(TRAINING), str(file)]

    def processes(self, mark: str, ranks: list[int]) -> list[psutil.Process]:
        """All that run there, but for sshd's, which outlast a cut link as TCP's connections do."""
        found = []
        for process in self.cluster.processes():
            with contextlib.suppress(psutil.Error):
                if not process.name().startswith("sshd"):
                    found.append(process)
        return found

    def shared(self, mapped: set[str]) -> list[str]:
        """All files in /dev/shm."""
        return [
            f"{host}:/dev/shm/{name}"
            for host in self.hosts
            for name in self.cluster.run(host, "ls", "-A", "/dev/shm").split()
        ]

    def remove(self, name: str) -> None:
        """Remove what `shared` named."""
        host, _, path = name.partition(":")
        self.cluster.run(host, "rm", "-rf", path)

    def sockets(self) -> list[str]:
        """Sockets of TCP that somebody has open, but for those of sshd's that end by themselves."""
        found = []
        for host in self.hosts:
            for line in self.cluster.run(host, "cat", "/proc/net/tcp").splitlines()[1:]:
                _, local, remote, state = line.split()[:4]
                ports = {int(address.split(":")[1], 16) for address in (local, remote)}
                if state in OPEN and SSH_PORT not in ports:
                    found.append(f"{host}: {OPEN[state]} {local} {remote}")
        return found

    @contextlib.contextmanager
    def disk(self, folder: Path) -> Iterator[None]:
        """Meanwhile the folder is a small disk of its own on the first host."""
        first = self.hosts[0]
        self.cluster.run(first, "mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder)
        try:
            yield
        finally:
            self.cluster.run(first, "umount", "-l", folder)

    def seen(self, folder: Path) -> Path:
        """The folder as the job sees it on the first host, whatever is mounted there."""
        return Path(f"/proc/{self.cluster.inits[self.hosts[0]]}/root", *folder.parts[1:])

    def cut(self) -> None:
        """Cut the second host's link."""
        self.cluster.run(self.hosts[1], "ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Undo `cut`."""
        self.cluster.run(self.hosts[1], "ip", "link", "set", "eth0", "up")


Ground = Here | Hosts


def is_monitor(words: list[str]) -> bool:
    return any("chainermn_comm.watchdog.monitor" in word for word in words)


def settings(mark: str, temporary: Path, seconds: float) -> dict[str, str]:
    """What a job gets besides this process's environment."""
    return {
        MARK: mark,
        "TMPDIR": str(temporary),
        "CHAINERMN_TIMEOUT": f"{seconds:g}",
    }


def all_variables(added: dict[str, str]) -> dict[str, str]:
    """With which the program finds this package."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return variables({**added, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
