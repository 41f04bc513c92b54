"""Faults that are planted on hosts are named by the doctor, alone, with their host and a fix.

tests/tools/test_doctor.py has those that can't be planted on a host.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.hosts.doctor_hosts import Hosts
from tests.support.jobs import commands
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import MPIEXEC, on_open_mpi
from tests.support.tools.doctor import COMMUNICATORS

# Enough for all but the check that hangs, even on busy cores.
HANG_TIMEOUT = 120
PYTHON = Path(sys.executable)
NUMPY = Path(np.__file__).parents[1] / f"numpy-{np.__version__}.dist-info" / "METADATA"
OTHER_NUMPY = NUMPY.read_text().replace(f"Version: {np.__version__}", "Version: 1.22.4")
# What mpiexec starts on each host by ssh.
DAEMON = MPIEXEC.with_name("prted" if on_open_mpi() else "hydra_pmi_proxy")
Planted = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class At:
    """Plants something on a host for a `with` block; `script` is the user's."""

    hosts: Hosts
    script: Path
    host: str

    def file(self, path: Path, text: str) -> Planted:
        return self.hosts.instead(self.host, path, self.other(path.name, text))

    def program(self, path: Path, text: str) -> Planted:
        return self.file(path, f"#!/bin/sh\n{text}\n")

    def ssh(self, setting: str) -> Planted:
        return self.hosts.ssh_config(f"Host {self.host}\n    {setting}\n")

    def other(self, name: str, text: str) -> Path:
        """A file for this host."""
        return commands.program(self.hosts.folder / self.host / name, text)


@dataclass(frozen=True)
class Fault:
    """What is planted on a host, and what the doctor says of it.

    Attributes:
        host: where it is.
        check: the name of the only one that fails.
        found: a pattern of what it finds.
        fix: words of what it advises.
        plant: puts the fault there for a `with` block.
    """

    host: str
    check: str
    found: str
    fix: str
    plant: Callable[[At], Planted] = lambda at: contextlib.nullcontext()


def other_host_key(at: At) -> Planted:
    key = (at.hosts.folder / "user.pub").read_text()
    known = at.other("known", f"nobody {key}")
    return at.ssh(f'UserKnownHostsFile "{known}"')


def other_python(at: At) -> Planted:
    """A Python of another version than this one."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    paths += versions.glob("*/bin/python3")
    code = "import platform; print(platform.python_version())"
    for path in map(str, filter(Path.exists, paths)):
        version = commands.run(path, "-c", code).stdout.strip()
        if version not in ("", platform.python_version()):
            return at.program(PYTHON, f'exec {path} "$@"')
    raise LookupError("this machine has but one Python")


@contextlib.contextmanager
def full_shared_memory(at: At) -> Iterator[None]:
    with at.hosts.cluster.shm(at.host, "64m"):
        at.hosts.cluster.run(at.host, "fallocate", "-l", "62m", "/dev/shm/left behind")
        yield


@contextlib.contextmanager
def hanging_start(at: At) -> Iterator[None]:
    with at.program(DAEMON, "exec sleep 300"):
        yield
    # On a host that mpiexec lost the connection to nobody ends them.
    for process in at.hosts.cluster.processes():
        with contextlib.suppress(psutil.Error):
            if process.name() == "sleep":
                process.kill()


FAULTS = {
    "wrong name": Fault("nosuch", "ssh", "known|resolve", "/etc/hosts"),
    "no sshd": Fault(
        "beta", "ssh", "refuses", "systemctl start ssh", lambda at: at.ssh("Port 23")
    ),
    "dead host": Fault(
        "beta", "ssh", "it is down", "beta", lambda at: at.ssh("HostName 10.99.0.77")
    ),
    "unknown key": Fault("gamma", "ssh", "key", "ssh gamma", other_host_key),
    "other Python": Fault(
        "beta",
        "hosts_python",
        f"and not CPython {platform.python_version()}",
        f"beta:{sys.prefix}",
        other_python,
    ),
    "no shared folder": Fault(
        "beta",
        "hosts_python",
        f"{sys.executable} doesn't run",
        f"beta:{sys.prefix}",
        lambda at: at.hosts.mounted("beta", "-t", "tmpfs", "tmpfs", PYTHON.parent),
    ),
    "other NumPy": Fault(
        "gamma",
        "hosts_packages",
        f"numpy 1.22.4.*here {np.__version__}",
        f"pip install numpy=={np.__version__}",
        lambda at: at.file(NUMPY, OTHER_NUMPY),
    ),
    "older script": Fault(
        "gamma",
        "script",
        "is not the one",
        "rsync",
        lambda at: at.file(at.script, "# older"),
    ),
    "full /dev/shm": Fault(
        "gamma",
        "hosts_shared_memory",
        "2 MiB of 64 MiB",
        "ssh gamma ls",
        full_shared_memory,
    ),
    "no daemon": Fault(
        "beta",
        "hosts_start",
        "no rank began on beta",
        "",
        lambda at: at.program(DAEMON, "echo no licence >&2; exit 1"),
    ),
    "MPI hangs": Fault(
        "beta",
        "hosts_start",
        "no rank began on beta within",
        "ssh beta mpiexec",
        hanging_start,
    ),
}
SLOW = ("MPI hangs", "dead host", "no daemon")


@pytest.fixture(scope="module")
def hosts(cluster, tmp_path_factory) -> Iterator[Hosts]:
    yield Hosts(cluster, tmp_path_factory.mktemp("doctor"))
    assert soon(lambda: not cluster.processes()), cluster.processes()


@pytest.fixture
def script(tmp_path) -> Path:
    folder = tmp_path / "of 'ours'; all"
    folder.mkdir()
    script = folder / "train me.py"
    script.write_text("print()\n")
    return script


def test_all_is_well_without_a_fault(hosts, script):
    given = {"hosts": "alpha:2,beta:1,gamma", "n": 4, "script": script}
    status, found = hosts.examine(whole=False, **given)
    assert {name: one["found"] for name, one in found.items() if one["fix"]} == {}
    assert status == 0
    mine = {name: one for name, one in found.items() if one["layer"] == "hosts"}
    assert [name for name, one in mine.items() if one["status"] != "ok"] == [
        "srun_ranks"
    ]
    ranks = mine["hosts_start"]["details"]["ranks"]
    assert ranks == {"alpha": 2, "beta": 1, "gamma": 1}
    tried = set(mine["hosts_communicators"]["details"]["tried"])
    assert tried >= {*COMMUNICATORS} - {"single_node", "pure_nccl"}


@pytest.mark.parametrize("name", ["alpha:2", "10.99.0.1:2"])
def test_this_host_needs_no_ssh(hosts, script, name):
    with hosts.ssh_config("Host *\n    Port 23\n"):
        status, found = hosts.examine(whole=False, hosts=name, script=script)
    assert status == 0, found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in SLOW else ())
        for name in FAULTS
    ],
)
def test_a_fault_is_named_alone_with_its_host_and_a_fix(hosts, script, name):
    fault = FAULTS[name]
    named = {*hosts.cluster.hosts, fault.host}
    with fault.plant(At(hosts, script, fault.host)):
        status, found = hosts.examine(
            whole=False,
            hosts=",".join(sorted(named)),
            script=script,
            timeout=HANG_TIMEOUT,
        )
    finding = only_failure(status, found, fault.check)
    assert re.search(fault.found, finding["found"], re.DOTALL), finding
    assert fault.fix in finding["fix"], finding
    said = finding["found"].replace("[mpiexec@alpha]", "")
    assert {host for host in named if host in said} == {fault.host}


def only_failure(status: int, found: dict[str, Any], check: str) -> dict[str, Any]:
    """The finding of this check, the only one that asks for anything."""
    wrong = {name: one for name, one in found.items() if one["fix"]}
    assert (status, list(wrong)) == (1, [check]), wrong
    assert wrong[check]["status"] == "failed"
    return wrong[check]


def test_more_ranks_than_slots_are_one_failure(hosts, script):
    given = {"hosts": "alpha:1,beta:1", "n": 5, "script": script}
    status, found = hosts.examine(whole=False, **given)
    finding = only_failure(status, found, "slots")
    assert "5 ranks don't fit: the hosts allow 2" in finding["found"]
    assert finding["fix"] == "-n 2"


def test_a_machine_without_ssh_is_one_failure(hosts, script):
    """Of the first host, which asks the other ones."""
    wrapper = hosts.folder / "bin" / "ssh"
    nothing = commands.program(hosts.folder / "nothing", "")
    ssh = Path(str(shutil.which("ssh")))
    wrapper.chmod(0o600)
    nothing.chmod(0o600)
    try:
        with hosts.instead("alpha", ssh, nothing):
            given = {"hosts": "alpha,beta,gamma", "script": script}
            status, found = hosts.examine(whole=False, **given)
    finally:
        wrapper.chmod(0o700)
    finding = only_failure(status, found, "ssh")
    assert finding["found"].startswith("beta: there is no ssh on PATH")
    assert "apt-get install openssh-client" in finding["fix"]
