"""Faults that are planted on hosts are named by the doctor, alone, with their host and a fix.

Each check finds one of its faults here; tests/tools/test_doctor_cluster.py has the words
by which it tells the others.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.hosts.doctor_hosts import LIBRARIES, Hosts
from tests.support.hosts.virtual_hosts import DEVICE
from tests.support.jobs import commands
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import MPIEXEC, on_open_mpi
from tests.support.tools.doctor import COMMUNICATORS

# Enough for all but the check that hangs, even on busy cores.
HANG_TIMEOUT = 120
EXPORT = f"export LD_LIBRARY_PATH='{LIBRARIES}'"
# As in many a ~/.bashrc: what isn't interactive comes no further than this.
LEAVING = "case $- in *i*) ;; *) return;; esac"
PYTHON = Path(sys.executable)
NUMPY = Path(np.__file__).parents[1] / f"numpy-{np.__version__}.dist-info" / "METADATA"
OTHER_NUMPY = NUMPY.read_text().replace(f"Version: {np.__version__}", "Version: 1.22.4")
# Another MPI's mpiexec, and what ours starts on each host by ssh.
OTHER_MPI = "mpiexec (OpenRTE) 4.1.4"
DAEMON = MPIEXEC.with_name("hydra_pmi_proxy")
if on_open_mpi():
    OTHER_MPI = "HYDRA build details:\n    Version: 3.1.4"
    DAEMON = MPIEXEC.with_name("prted")
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

    def shell(self, *lines: str) -> Planted:
        """What is run as each shell starts."""
        start = self.other("bashrc", "\n".join([*lines, ""]))
        return self.hosts.start_of_shells(self.host, start)

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
        others: hosts that the finding names besides.
    """

    host: str
    check: str
    found: str
    fix: str
    plant: Callable[[At], Planted] = lambda at: contextlib.nullcontext()
    others: tuple[str, ...] = ()


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


def blocked_ports(at: At) -> Planted:
    """Ports that a kernel gives to whoever asks for any; ssh's own is none of them."""
    ports = "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    rule = ("ipproto", "tcp", "sport", ports, "dport", ports, "prohibit")
    return at.hosts.undone(
        at.host, ("ip", "rule", "add", *rule), ("ip", "rule", "del", *rule)
    )


@contextlib.contextmanager
def jumbo_frames(at: At) -> Iterator[None]:
    """Two hosts send each other longer frames than the switch takes, which drops them."""
    # Longer ones that are to be cut later would pass.
    longer, usual = (
        f"ip link set dev {DEVICE} mtu {nbytes} gso_max_segs {segments}".split()
        for nbytes, segments in ((9000, 1), (1500, 65535))
    )
    with (
        at.hosts.undone("beta", longer, usual),
        at.hosts.undone("gamma", longer, usual),
    ):
        yield


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


# Faults of a group are planted together, as they don't touch one another.
FAULTS = {
    "logins": [
        Fault("nosuch", "host_names", "nosuch", "/etc/hosts"),
        Fault(
            "beta",
            "ssh",
            "refuses",
            "systemctl start ssh",
            lambda at: at.ssh("Port 23"),
        ),
        Fault("gamma", "host_keys", "doesn't know", "ssh gamma", other_host_key),
    ],
    "what hosts have": [
        Fault(
            "beta",
            "hosts_python",
            f"and not Python {platform.python_version()}",
            f"beta:{sys.prefix}",
            other_python,
        ),
        Fault(
            "beta",
            "hosts_variables",
            f"LD_LIBRARY_PATH .*{LIBRARIES}",
            EXPORT,
            lambda at: at.shell(LEAVING, EXPORT),
        ),
        Fault(
            "beta",
            "connections",
            "4 of 6 connections fail.*beta is part of each",
            "ufw allow from 10.99.0.",
            blocked_ports,
            others=("alpha", "gamma"),
        ),
        Fault(
            "gamma",
            "hosts_packages",
            f"numpy 1.22.4.*here {np.__version__}",
            f"pip install numpy=={np.__version__}",
            lambda at: at.file(NUMPY, OTHER_NUMPY),
        ),
        Fault(
            "gamma",
            "hosts_mpiexec",
            f"{MPIEXEC}",
            "on gamma",
            lambda at: at.program(MPIEXEC, f"echo '{OTHER_MPI}'"),
        ),
        Fault(
            "gamma",
            "script",
            "is not the one",
            "rsync",
            lambda at: at.file(at.script, "# older"),
        ),
        Fault(
            "gamma",
            "hosts_shared_memory",
            "2 MiB of 64 MiB",
            "ssh gamma ls",
            full_shared_memory,
        ),
    ],
    "frames that the switch drops": [
        Fault(
            "beta",
            "connections",
            "2 of 6 .* beta to gamma: a short message arrives, and a long one",
            "mtu 1500   # on beta and gamma",
            jumbo_frames,
            others=("gamma",),
        )
    ],
    "MPI hangs at start": [
        Fault(
            "beta",
            "placement",
            "mpiexec hangs.*no rank beg",
            "ssh beta mpiexec",
            hanging_start,
        )
    ],
}


@pytest.fixture(scope="module")
def hosts(cluster, tmp_path_factory) -> Iterator[Hosts]:
    with Hosts(cluster, tmp_path_factory.mktemp("doctor")).ready() as ready:
        yield ready
    assert soon(lambda: not cluster.processes()), cluster.processes()


@pytest.fixture
def script(tmp_path) -> Path:
    folder = tmp_path / "of 'ours'; all"
    folder.mkdir()
    script = folder / "train me.py"
    script.write_text("print()\n")
    return script


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_all_is_well_without_a_fault_whatever_a_start_up_file_prints(
    hosts, script, whole
):
    given = {"hosts": "alpha:2,beta:1,gamma", "n": 4, "script": script}
    talk = ("echo 'Welcome!'", "echo >&2 'permission denied'", EXPORT)
    with At(hosts, script, "beta").shell(*talk):
        status, found = hosts.examine(whole=whole, **given)
    assert {name: one["found"] for name, one in found.items() if one["fix"]} == {}
    assert status == 0
    mine = {name: one for name, one in found.items() if one["layer"] == "hosts"}
    unasked = {"hostfile", "srun", "srun_ranks"}
    assert {name for name, one in mine.items() if one["status"] != "ok"} == unasked
    assert mine["placement"]["details"]["ranks"] == {"alpha": 2, "beta": 1, "gamma": 1}
    assert "all 6 connections" in mine["connections"]["found"]
    pairs = mine["hosts_messages"]["details"]["pairs"]
    assert set(pairs) == {"alpha to beta", "alpha to gamma", "beta to gamma"}
    assert all(rate > 0 for rates in pairs.values() for rate in rates.values())
    tried = set(mine["hosts_communicators"]["details"]["communicators"])
    assert tried == {*COMMUNICATORS} - {"single_node", "pure_nccl"}


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(name, marks=() if len(faults) > 1 else pytest.mark.full)
        for name, faults in FAULTS.items()
    ],
)
def test_faults_are_named_and_nothing_else(hosts, script, group):
    named = {*hosts.cluster.hosts, *(fault.host for fault in FAULTS[group])}
    with contextlib.ExitStack() as planted:
        for fault in FAULTS[group]:
            planted.enter_context(fault.plant(At(hosts, script, fault.host)))
        status, found = hosts.examine(
            whole=False,
            hosts=",".join(sorted(named)),
            script=script,
            timeout=HANG_TIMEOUT,
        )
    assert status == 1
    wrong = {name for name, one in found.items() if one["fix"]}
    assert wrong == {fault.check for fault in FAULTS[group]}
    for fault in FAULTS[group]:
        finding = found[fault.check]
        assert finding["status"] == "failed"
        assert re.search(fault.found, finding["found"], re.DOTALL)
        assert fault.fix in finding["fix"]
        blamed = {host for host in named if host in finding["found"]}
        assert blamed == {fault.host, *fault.others}
