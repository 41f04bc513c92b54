"""Each fault that is planted on a host is named by the doctor, alone, with its host and a fix."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.doctor import COMMUNICATORS
from tests.support.doctor_hosts import LIBRARIES, Hosts
from tests.support.jobs import MPIEXEC
from tests.support.processes import soon
from tests.support.virtual_hosts import DEVICE

ALL = "alpha,beta,gamma"
OPEN_MPI = (
    "Open MPI"
    in subprocess.run(
        [MPIEXEC, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
)
# What mpiexec starts on each host by ssh.
DAEMON = MPIEXEC.with_name("prted" if OPEN_MPI else "hydra_pmi_proxy")
# Enough for all but the check that hangs, even on busy cores.
HANG_TIMEOUT = 120
Plant = Callable[[Hosts, Path, str], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the doctor says; of beta, and with its name in place of any other.

    Attributes:
        check: the name of the only one that fails.
        found: words of what it finds.
        fix: words of what it advises.
        plant: puts the fault there for a `with` block, given the hosts, the script's folder and
            the host.
        given: options of the doctor.
        innocent: hosts that are not named.
    """

    check: str
    found: tuple[str, ...]
    fix: str
    plant: Plant = lambda hosts, folder, host: contextlib.nullcontext()
    given: dict[str, Any] = field(default_factory=lambda: {"hosts": ALL})
    innocent: tuple[str, ...] = ("alpha", "gamma")


def without_python(hosts: Hosts, folder: Path, host: str):
    return hosts.mounted(host, "-t", "tmpfs", "tmpfs", Path(sys.executable).parent)


def other_python(hosts: Hosts, folder: Path, host: str):
    program = hosts.program("python", f'exec {_another_python()} "$@"')
    return hosts.instead(host, Path(sys.executable), program)


def broken_python(hosts: Hosts, folder: Path, host: str):
    program = hosts.program(
        "python", "echo libpython3.so: cannot open shared object file >&2; exit 9"
    )
    return hosts.instead(host, Path(sys.executable), program)


def other_numpy(hosts: Hosts, folder: Path, host: str):
    ours = Path(np.__file__).with_name("version.py")
    theirs = hosts.folder / "version.py"
    theirs.write_text(ours.read_text().replace(np.__version__, "1.22.4"))
    return hosts.instead(host, ours, theirs)


def other_mpiexec(hosts: Hosts, folder: Path, host: str):
    return hosts.instead(host, MPIEXEC, _mpiexec_of_another(hosts))


@contextlib.contextmanager
def other_mpiexec_on_path(hosts: Hosts, folder: Path, host: str):
    (hosts.folder / "another").mkdir(exist_ok=True)
    _mpiexec_of_another(hosts).rename(hosts.folder / "another" / "mpiexec")
    start = _start(hosts, f"export LD_LIBRARY_PATH='{LIBRARIES}' PATH={hosts.folder}/another:$PATH")
    with hosts.start_of_shells(host, start):
        yield


def lost_libraries(hosts: Hosts, folder: Path, host: str):
    """As in many a ~/.bashrc: what isn't interactive comes no further than this."""
    rest = f"export LD_LIBRARY_PATH='{LIBRARIES}'"
    return hosts.start_of_shells(
        host, _start(hosts, f"case $- in *i*) ;; *) return;; esac\n{rest}")
    )


def mvapich_variable(hosts: Hosts, folder: Path, host: str):
    start = _start(hosts, f"export LD_LIBRARY_PATH='{LIBRARIES}' MV2_USE_CUDA=1")
    return hosts.start_of_shells(host, start)


def talkative_shell(hosts: Hosts, folder: Path, host: str):
    start = _start(hosts, f"echo 'Welcome!'; echo >&2 'permission denied'; {_export()}")
    return hosts.start_of_shells(host, start)


def no_script(hosts: Hosts, folder: Path, host: str):
    return hosts.mounted(host, "-t", "tmpfs", "tmpfs", folder)


def other_script(hosts: Hosts, folder: Path, host: str):
    return hosts.instead(host, folder / "train me.py", hosts.program("train.py", "# older"))


@contextlib.contextmanager
def blocked_ports(hosts: Hosts, folder: Path, host: str) -> Iterator[None]:
    """Ports that a kernel gives to whoever asks for any; ssh's own is none of them."""
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    both = "-".join(ports)
    rule = ("ipproto", "tcp", "sport", both, "dport", both, "prohibit")
    hosts.cluster.run(host, "ip", "rule", "add", *rule)
    try:
        yield
    finally:
        hosts.cluster.run(host, "ip", "rule", "del", *rule)


@contextlib.contextmanager
def jumbo_frames(hosts: Hosts, folder: Path, host: str) -> Iterator[None]:
    """Two hosts send each other longer frames than the switch takes, which drops them."""

    def frames(nbytes: int, segments: int) -> None:
        for host in ("beta", "gamma"):
            # Longer ones that are to be cut later would pass.
            size = ("mtu", nbytes, "gso_max_segs", segments)
            hosts.cluster.run(host, "ip", "link", "set", "dev", DEVICE, *size)

    frames(9000, 1)
    try:
        yield
    finally:
        frames(1500, 65535)


@contextlib.contextmanager
def full_shared_memory(hosts: Hosts, folder: Path, host: str) -> Iterator[None]:
    with hosts.cluster.shm(host, "64m"):
        hosts.cluster.run(host, "fallocate", "-l", "62m", "/dev/shm/left behind")
        yield


@contextlib.contextmanager
def hanging_start(hosts: Hosts, folder: Path, host: str) -> Iterator[None]:
    with hosts.instead(host, DAEMON, hosts.program("daemon", "exec sleep 300")):
        yield
    # On a host that mpiexec lost the connection to nobody ends them.
    for process in hosts.cluster.processes():
        with contextlib.suppress(psutil.Error):
            if process.name() == "sleep":
                process.kill()


def wrong_key(hosts: Hosts, folder: Path, host: str):
    key = hosts.folder / "another key"
    if not key.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
        subprocess.run(command, check=True, timeout=30)
    return hosts.instead(host, hosts.cluster.folder / "user.pub", Path(f"{key}.pub"))


def no_key(hosts: Hosts, folder: Path, host: str):
    return hosts.ssh_config(f"Host {host}\n    PubkeyAuthentication no\n")


def unknown_host_key(hosts: Hosts, folder: Path, host: str):
    known = hosts.folder / "known without beta"
    known.write_text((hosts.folder / "known").read_text().replace(host, "nobody", 1))
    return hosts.ssh_config(f'Host {host}\n    UserKnownHostsFile "{known}"\n')


def changed_host_key(hosts: Hosts, folder: Path, host: str):
    known = hosts.folder / "known otherwise"
    key = (hosts.folder / "user.pub").read_text()
    known.write_text(f"{host} {key}")
    return hosts.ssh_config(f'Host {host}\n    UserKnownHostsFile "{known}"\n')


def refused(hosts: Hosts, folder: Path, host: str):
    return hosts.ssh_config(f"Host {host}\n    Port 23\n")


def unreachable(hosts: Hosts, folder: Path, host: str):
    return hosts.ssh_config(f"Host {host}\n    HostName 10.99.0.99\n")


def of_other_mpi(hosts: Hosts, folder: Path, host: str):
    text = (
        "# our machines\nalpha:1\nbeta:1\n" if OPEN_MPI else "# ours\nalpha slots=1\nbeta slots=1\n"
    )
    (folder / "hosts").write_text(text)
    return contextlib.nullcontext()


FAULTS = {
    "unknown host": Fault(
        "host names",
        ("nosuch",),
        "/etc/hosts",
        given={"hosts": "alpha,beta,nosuch"},
        innocent=("alpha", "beta"),
    ),
    "refused ssh": Fault("ssh", ("beta", "refuses"), "systemctl start ssh", refused),
    "unreachable": Fault("ssh", ("beta", "no way"), "ping beta", unreachable),
    "wrong key": Fault("ssh", ("beta", "none of the keys"), "ssh-copy-id beta", wrong_key),
    "no key": Fault("ssh", ("beta", "none to offer"), "ssh-keygen", no_key),
    "unknown host key": Fault("host keys", ("beta", "doesn't know"), "ssh beta", unknown_host_key),
    "changed host key": Fault(
        "host keys", ("beta", "not the one"), "ssh-keygen -R beta", changed_host_key
    ),
    "missing Python": Fault(
        "hosts' python",
        ("beta", "there is no", sys.executable),
        f"beta:{sys.prefix}",
        without_python,
    ),
    "other Python": Fault(
        "hosts' python",
        ("beta", f"and not Python {platform.python_version()}"),
        f"beta:{sys.prefix}",
        other_python,
    ),
    "broken Python": Fault(
        "hosts' python", ("beta", "doesn't run", "libpython3"), f"beta:{sys.prefix}", broken_python
    ),
    "other NumPy": Fault(
        "hosts' packages",
        ("beta", "numpy 1.22.4", f"here {np.__version__}"),
        f"pip install numpy=={np.__version__}",
        other_numpy,
    ),
    "other mpiexec": Fault("hosts' mpiexec", ("beta", str(MPIEXEC)), "on beta", other_mpiexec),
    "other mpiexec on PATH": Fault(
        "hosts' mpiexec", ("beta", "PATH"), f"export PATH={MPIEXEC.parent}", other_mpiexec_on_path
    ),
    "script missing": Fault(
        "script", ("beta", "there is no", "train me.py"), "rsync", no_script, {"hosts": ALL}
    ),
    "other script": Fault("script", ("beta", "is not the one"), "rsync", other_script),
    "LD_LIBRARY_PATH lost": Fault(
        "hosts' variables",
        ("beta", "LD_LIBRARY_PATH", LIBRARIES),
        f"export LD_LIBRARY_PATH='{LIBRARIES}'",
        lost_libraries,
    ),
    "other MV2_USE_CUDA": Fault(
        "hosts' variables", ("beta", "MV2_USE_CUDA is '1'"), "unset MV2_USE_CUDA", mvapich_variable
    ),
    "blocked ports": Fault(
        "connections",
        ("4 of 6 connections fail", "beta is part of each"),
        "ufw allow from 10.99.0.",
        blocked_ports,
        innocent=(),
    ),
    "frames that the switch drops": Fault(
        "connections",
        ("2 of 6 connections fail", "beta to gamma: a short message arrives, and a long one"),
        "mtu 1500   # on beta and gamma",
        jumbo_frames,
        innocent=("alpha",),
    ),
    "hostfile of the wrong MPI": Fault(
        "hostfile",
        ("line 2", "alpha:1" if OPEN_MPI else "alpha slots=1"),
        "alpha slots=1" if OPEN_MPI else "alpha:1",
        of_other_mpi,
        given={"hostfile": "hosts"},
        innocent=("gamma",),
    ),
    "fewer slots than ranks": Fault(
        "slots",
        ("2 slots", "4 ranks"),
        "alpha:2,beta:2",
        given={"hosts": "alpha:1,beta:1", "n": 4},
        innocent=("gamma",),
    ),
    "MPI hangs at start": Fault(
        "placement",
        ("mpiexec hangs", "no rank beg", "beta"),
        "ssh beta mpiexec",
        hanging_start,
        {"hosts": ALL, "timeout": HANG_TIMEOUT},
    ),
    "full shared memory": Fault(
        "hosts' shared memory", ("beta", "2 MiB of 64 MiB"), "ssh beta ls", full_shared_memory
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
def test_all_is_well_without_a_fault_whatever_a_start_up_file_prints(hosts, script, whole):
    given = {"hosts": "alpha:2,beta:1,gamma", "n": 4, "script": script}
    with talkative_shell(hosts, script.parent, "beta"):
        status, found = hosts.examine(whole=whole, **given)
    assert {name: one["found"] for name, one in found.items() if one["fix"]} == {}
    assert status == 0
    mine = {name: one for name, one in found.items() if one["layer"] == "hosts"}
    assert {name for name, one in mine.items() if one["status"] != "ok"} == {"hostfile"}
    assert mine["placement"]["details"]["ranks"] == {"alpha": 2, "beta": 1, "gamma": 1}
    assert "all 6 connections" in mine["connections"]["found"]
    pairs = mine["hosts' messages"]["details"]["pairs"]
    assert set(pairs) == {"alpha to beta", "alpha to gamma", "beta to gamma"}
    for rates in pairs.values():
        assert rates["bytes_per_second"] > 0
        assert rates["tcp_bytes_per_second"] > 0
    tried = set(mine["hosts' communicators"]["details"]["communicators"])
    assert tried == {*COMMUNICATORS} - {"single_node", "pure_nccl"}
    assert set(mine["round trip"]["details"]["seconds"]) == {
        f"{a} to {b}" for a in hosts.cluster.hosts for b in hosts.cluster.hosts if a != b
    }


def assert_named(found: dict[str, Any], faults: dict[str, str]) -> None:
    """These faults, on these hosts, are what is wrong, and nothing else."""
    checks = {FAULTS[name].check for name in faults}
    assert {name: one["found"] for name, one in found.items() if one["fix"]}.keys() == checks
    for name, host in faults.items():
        fault = FAULTS[name]
        finding = found[fault.check]
        assert finding["status"] == "failed"
        for words in fault.found:
            assert words.replace("beta", host) in finding["found"]
        for other in fault.innocent:
            assert {host: "beta"}.get(other, other) not in finding["found"]
        assert fault.fix.replace("beta", host) in finding["fix"]


TOGETHER = {
    "logins": {"unknown host": "beta", "refused ssh": "beta", "unknown host key": "gamma"},
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
            planted.enter_context(FAULTS[name].plant(hosts, script.parent, host))
        status, found = hosts.examine(whole=False, hosts=named, script=script)
    assert status == 1
    assert_named(found, faults)


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(hosts, script, name):
    given = {"script": script, **FAULTS[name].given}
    with FAULTS[name].plant(hosts, script.parent, "beta"):
        if "hostfile" in given:
            given["hostfile"] = script.parent / given["hostfile"]
        status, found = hosts.examine(whole=True, **given)
    assert status == 1
    assert_named(found, {name: "beta"})


def _export() -> str:
    return f"export LD_LIBRARY_PATH='{LIBRARIES}'"


def _start(hosts: Hosts, text: str) -> Path:
    """A start-up file of shells."""
    path = hosts.folder / "another bashrc"
    path.write_text(f"{text}\n")
    return path


def _mpiexec_of_another(hosts: Hosts) -> Path:
    said = "HYDRA build details:\n    Version: 3.1.4" if OPEN_MPI else "mpiexec (OpenRTE) 4.1.4"
    return hosts.program("mpiexec", f"echo '{said}'")


def _another_python() -> str:
    """A Python of another version than this one."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = ["/usr/bin/python3", "/usr/local/bin/python3", *versions.glob("*/bin/python3")]
    for path in map(str, paths):
        if os.path.exists(path):
            asked = [path, "-c", "import platform; print(platform.python_version())"]
            version = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
            if version.stdout.strip() not in ("", platform.python_version()):
                return path
    raise LookupError("this machine has but one Python")
