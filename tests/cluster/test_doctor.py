"""Each fault that is planted on a host is named by the doctor, alone, with its host and a fix."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.hosts.doctor_hosts import LIBRARIES, Hosts
from tests.support.hosts.virtual_hosts import DEVICE
from tests.support.jobs import commands
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import MPIEXEC
from tests.support.tools.doctor import COMMUNICATORS

ALL = "alpha,beta,gamma"
OPEN_MPI = "Open MPI" in commands.run(MPIEXEC, "--version").stdout
# What mpiexec starts on each host by ssh.
DAEMON = MPIEXEC.with_name("prted" if OPEN_MPI else "hydra_pmi_proxy")
# Enough for all but the check that hangs, even on busy cores.
HANG_TIMEOUT = 120
EXPORT = f"export LD_LIBRARY_PATH='{LIBRARIES}'"
PYTHON = Path(sys.executable)
NUMPY = Path(np.__file__).parents[1] / f"numpy-{np.__version__}.dist-info" / "METADATA"
OTHER_MPI = (
    "HYDRA build details:\n    Version: 3.1.4"
    if OPEN_MPI
    else "mpiexec (OpenRTE) 4.1.4"
)
OURS, OTHERS = (
    ("alpha slots=1", "alpha:1") if OPEN_MPI else ("alpha:1", "alpha slots=1")
)
TALK = ("echo 'Welcome!'", "echo >&2 'permission denied'")
Planted = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class At:
    """Plants something on a host for a `with` block; `folder` is the script's."""

    hosts: Hosts
    folder: Path
    host: str

    def hidden(self, folder: Path) -> Planted:
        return self.hosts.mounted(self.host, "-t", "tmpfs", "tmpfs", folder)

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

    def other_key_of(self, name: str) -> Planted:
        """All that ssh knows of hosts' keys."""
        known = self.other(
            "known", f"{name} {(self.hosts.folder / 'user.pub').read_text()}"
        )
        return self.ssh(f'UserKnownHostsFile "{known}"')

    def other(self, name: str, text: str) -> Path:
        """A file for this host."""
        return commands.program(self.hosts.folder / self.host / name, text)


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the doctor says; of beta, and with its name in place of any other.

    Attributes:
        check: the name of the only one that fails.
        found: a pattern of what it finds.
        fix: words of what it advises.
        plant: puts the fault there for a `with` block.
        given: options of the doctor.
        innocent: hosts that are not named; beta is, unless it is one of them.
    """

    check: str
    found: str
    fix: str
    plant: Callable[[At], Planted] = lambda at: contextlib.nullcontext()
    given: dict[str, Any] = field(default_factory=lambda: {"hosts": ALL})
    innocent: tuple[str, ...] = ("alpha", "gamma")


def other_mpiexec_on_path(at: At) -> Planted:
    path = at.other("mpiexec", f"#!/bin/sh\necho '{OTHER_MPI}'\n")
    return at.shell(f"{EXPORT} PATH={path.parent}:$PATH")


def wrong_key(at: At) -> Planted:
    folder = at.hosts.cluster.folder
    return at.hosts.instead(at.host, folder / "user.pub", folder / "hostkey.pub")


def hostfile_of_other_mpi(at: At) -> Planted:
    text = f"# ours\n{OTHERS}\n{OTHERS.replace('alpha', 'beta')}\n"
    (at.folder / "hosts").write_text(text)
    return contextlib.nullcontext()


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


PYTHONS = f"beta:{sys.prefix}"
OTHER_NUMPY = NUMPY.read_text().replace(f"Version: {np.__version__}", "Version: 1.22.4")
NO_LIBRARY = "echo libpython3.so is missing >&2; exit 9"
# As in many a ~/.bashrc: what isn't interactive comes no further than this.
LEAVING = "case $- in *i*) ;; *) return;; esac"
FAULTS = {
    "unknown host": Fault(
        *("host_names", "nosuch", "/etc/hosts"),
        given={"hosts": "alpha,beta,nosuch"},
        innocent=("alpha", "beta"),
    ),
    "refused ssh": Fault(
        "ssh", "refuses", "systemctl start ssh", lambda at: at.ssh("Port 23")
    ),
    "unreachable": Fault(
        *("ssh", "no way", "ping beta"), lambda at: at.ssh("HostName 10.99.0.99")
    ),
    "wrong key": Fault("ssh", "takes no key", "ssh-copy-id beta", wrong_key),
    "no key": Fault(
        *("ssh", "takes no key", "ssh-keygen"),
        lambda at: at.ssh("PubkeyAuthentication no"),
    ),
    "unknown host key": Fault(
        *("host_keys", "doesn't know", "ssh beta"), lambda at: at.other_key_of("nobody")
    ),
    "changed host key": Fault(
        *("host_keys", "not the one", "ssh-keygen -R beta"),
        lambda at: at.other_key_of(at.host),
    ),
    "missing Python": Fault(
        *("hosts_python", f"there is no {PYTHON}", PYTHONS),
        lambda at: at.hidden(PYTHON.parent),
    ),
    "other Python": Fault(
        *("hosts_python", f"and not Python {platform.python_version()}", PYTHONS),
        lambda at: at.program(PYTHON, f'exec {_another_python()} "$@"'),
    ),
    "broken Python": Fault(
        *("hosts_python", "doesn't run.*libpython3", PYTHONS),
        lambda at: at.program(PYTHON, NO_LIBRARY),
    ),
    "other NumPy": Fault(
        *("hosts_packages", f"numpy 1.22.4.*here {np.__version__}"),
        f"pip install numpy=={np.__version__}",
        lambda at: at.file(NUMPY, OTHER_NUMPY),
    ),
    "other mpiexec": Fault(
        *("hosts_mpiexec", f"{MPIEXEC}", "on beta"),
        lambda at: at.program(MPIEXEC, f"echo '{OTHER_MPI}'"),
    ),
    "other mpiexec on PATH": Fault(
        *("hosts_mpiexec", "PATH", f"export PATH={MPIEXEC.parent}"),
        other_mpiexec_on_path,
    ),
    "script missing": Fault(
        *("script", "there is no .*train me.py", "rsync"),
        lambda at: at.hidden(at.folder),
    ),
    "other script": Fault(
        *("script", "is not the one", "rsync"),
        lambda at: at.file(at.folder / "train me.py", "# older"),
    ),
    "LD_LIBRARY_PATH lost": Fault(
        *("hosts_variables", f"LD_LIBRARY_PATH .*{LIBRARIES}"),
        f"export LD_LIBRARY_PATH='{LIBRARIES}'",
        lambda at: at.shell(LEAVING, EXPORT),
    ),
    "blocked ports": Fault(
        *("connections", "4 of 6 connections fail.*beta is part of each"),
        *("ufw allow from 10.99.0.", blocked_ports),
        innocent=(),
    ),
    "frames that the switch drops": Fault(
        *(
            "connections",
            "2 of 6 .* beta to gamma: a short message arrives, and a long one",
        ),
        *("mtu 1500   # on beta and gamma", jumbo_frames),
        innocent=("alpha",),
    ),
    "hostfile of the wrong MPI": Fault(
        *("hostfile", f"line 2, .{OTHERS}", OURS, hostfile_of_other_mpi),
        given={"hostfile": "hosts"},
        innocent=("gamma",),
    ),
    "fewer slots than ranks": Fault(
        *("slots", "4 ranks .*2 slots", "-n 2"),
        given={"hosts": "alpha:1,beta:1", "n": 4},
        innocent=("alpha", "beta", "gamma"),
    ),
    "MPI hangs at start": Fault(
        *("placement", "mpiexec hangs.*no rank beg", "ssh beta mpiexec", hanging_start),
        given={"hosts": ALL, "timeout": HANG_TIMEOUT},
    ),
    "full shared memory": Fault(
        *("hosts_shared_memory", "2 MiB of 64 MiB", "ssh beta ls"), full_shared_memory
    ),
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
    with At(hosts, script.parent, "beta").shell(*TALK, EXPORT):
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


def assert_named(found: dict[str, Any], faults: dict[str, str]) -> None:
    """These faults, on these hosts, are what is wrong, and nothing else."""
    checks = {FAULTS[name].check for name in faults}
    assert {
        name: one["found"] for name, one in found.items() if one["fix"]
    }.keys() == checks
    for name, host in faults.items():
        fault = FAULTS[name]
        finding = found[fault.check]
        assert finding["status"] == "failed"
        assert re.search(fault.found.replace("beta", host), finding["found"], re.DOTALL)
        assert (host in finding["found"]) == ("beta" not in fault.innocent)
        for other in fault.innocent:
            assert {host: "beta"}.get(other, other) not in finding["found"]
        assert fault.fix.replace("beta", host) in finding["fix"]


TOGETHER = {
    "logins": {
        "unknown host": "beta",
        "refused ssh": "beta",
        "unknown host key": "gamma",
    },
    "what hosts have": {
        "other Python": "beta",
        "LD_LIBRARY_PATH lost": "beta",
        "blocked ports": "beta",
        "other NumPy": "gamma",
        "other mpiexec": "gamma",
        "other script": "gamma",
        "full shared memory": "gamma",
    },
}


@pytest.mark.parametrize("faults", TOGETHER.values(), ids=TOGETHER)
def test_faults_that_do_not_touch_one_another_are_all_named(hosts, script, faults):
    named = f"{ALL},nosuch" if "unknown host" in faults else ALL
    with contextlib.ExitStack() as planted:
        for name, host in faults.items():
            planted.enter_context(FAULTS[name].plant(At(hosts, script.parent, host)))
        status, found = hosts.examine(whole=False, hosts=named, script=script)
    assert status == 1
    assert_named(found, faults)


@pytest.mark.full
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(hosts, script, name, whole):
    given = {"script": script, **FAULTS[name].given}
    with FAULTS[name].plant(At(hosts, script.parent, "beta")):
        if "hostfile" in given:
            given["hostfile"] = script.parent / given["hostfile"]
        status, found = hosts.examine(whole=whole, **given)
    assert status == 1
    assert_named(found, {name: "beta"})


def _another_python() -> str:
    """A Python of another version than this one."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    paths += versions.glob("*/bin/python3")
    code = "import platform; print(platform.python_version())"
    for path in map(str, filter(Path.exists, paths)):
        if commands.run(path, "-c", code).stdout.strip() not in (
            "",
            platform.python_version(),
        ):
            return path
    raise LookupError("this machine has but one Python")
