"""The doctor's layer over hosts without any host: what it asks, what it makes of the answers."""

from __future__ import annotations

import ast
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.doctor import (
    FACTS,
    HERE,
    HYDRA,
    LAYERS,
    MIB,
    Machine,
    write_program,
)
from tests.support.doctor_programs import source_for_hosts
from tests.support.processes import is_gone

# What OpenSSH says, with -v.
OFFER = "debug1: Offering public key: /home/me/.ssh/id_ed25519 ED25519 SHA256:x agent\n"
LOGIN = 'debug1: Authenticating\r\nAuthenticated to b ([10.0.0.2]:22) using "publickey".\r\n'
CHANGED = (
    "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed."
)
SAID = {
    "ssh: Could not resolve hostname b: Name or service not known": "unknown name",
    "ssh: connect to host b port 22: Connection refused": "refused",
    "ssh: connect to host b port 22: Connection timed out": "unreachable",
    "ssh: connect to host b port 22: No route to host": "unreachable",
    "ssh: connect to host b port 22: Network is unreachable": "unreachable",
    "ssh: connect to host b port 22: Permission denied": "unreachable",
    "kex_exchange_identification: read: Connection reset by peer": "closed",
    "Connection closed by 10.0.0.2 port 22": "closed",
    "Host key verification failed.": "unknown host key",
    "No ED25519 host key is known for b and you have requested strict checking.\n"
    "Host key verification failed.": "unknown host key",
    CHANGED: "changed host key",
    "me@b: Permission denied (publickey,password).": "no key",
    f"{OFFER}me@b: Permission denied (publickey).": "refused key",
    f"{OFFER}Received disconnect from b: Too many authentication failures": "refused key",
    LOGIN: "no shell",
    f"{OFFER}{LOGIN}bash: permission denied (it says)": "no shell",
    "debug1: Connecting to b [10.0.0.2] port 22.": "no answer",
    "": "no answer",
}
# Whoever ends a conversation leaves its pipes to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
OF_LOGINS = ("host names", "host keys", "ssh")


def test_what_ssh_says_is_told_apart(machine):
    """Each host's ssh says something else."""
    machine.quick_here()
    for number, text in enumerate(SAID):
        said = f"OpenSSH_9.2p1 Debian-2, OpenSSL 3.0\r\ndebug1: Reading x\r\n{text}\r\n"
        (machine.folder / f"h{number}").write_text(said)
    machine.ssh(f'while [ $# -gt 2 ]; do shift; done; cat "{machine.folder}/$1" >&2; exit 255')
    hosts = [f"h{number}" for number in range(len(SAID))]
    kinds = {}
    for one in machine.ask(*hosts, checks=OF_LOGINS).values():
        assert one.status == "failed"
        assert "debug1" not in one.found
        assert "OpenSSH_" not in one.found
        kinds |= one.details["hosts"]
    assert [kinds[host] for host in hosts] == list(SAID.values())


@pytest.mark.parametrize("kind", [*dict.fromkeys(SAID.values()), "no ssh"])
def test_each_trouble_of_a_login_fails_one_check_with_a_fix(machine, kind):
    machine.mpi()
    machine.hosts("a", b=kind)
    found = [machine.look(name) for name in OF_LOGINS]
    (failed,) = [one for one in found if one.status == "failed"]
    assert failed.found.startswith("b: ")
    assert "it said so" in failed.found
    assert failed.fix
    assert "{" not in failed.fix
    assert [one.status for one in found].count("ok") == 2
    machine.hosts(b=kind)
    after = LAYERS["hosts"][5:11]
    assert after[-1] == "hosts' shared memory"
    assert {machine.look(name).status for name in after} == {"skipped"}


@pytest.mark.parametrize(
    ("vendor", "variables", "words"),
    [
        ("MPICH", {}, ["ssh", "-T"]),
        ("MPICH", {"HYDRA_LAUNCHER_EXEC": "{}/my tools/ssh"}, ["{}/my tools/ssh", "-T"]),
        ("MPICH", {"OMPI_MCA_plm_rsh_agent": "rsh"}, ["ssh", "-T"]),
        ("Open MPI", {"PRTE_MCA_plm_ssh_agent": "ssh -p 22 : rsh"}, ["ssh", "-p", "22", "-T"]),
        ("Open MPI", {"OMPI_MCA_plm_rsh_agent": "'{}/my tools/ssh'"}, ["{}/my tools/ssh", "-T"]),
        (None, {}, ["ssh", "-T"]),
    ],
)
def test_ssh_is_that_of_mpiexec(machine, vendor, variables, words):
    folder = str(machine.folder)
    noting = f'for word in "$0" "$@"; do printf "%s\\n" "$word"; done > {folder}/words'
    machine.quick_here()
    machine.program("ssh", noting)
    write_program(machine.folder / "my tools" / "ssh", noting)
    machine.mpi(vendor, vendor)
    machine.variables(**{name: value.format(folder) for name, value in variables.items()})
    machine.ask("a", checks=["ssh"])
    ssh, *rest = (machine.folder / "words").read_text().split("\n")
    assert ssh == words[0].format(folder) or (words[0], ssh) == ("ssh", f"{folder}/bin/ssh")
    assert rest[: len(words) - 1] == words[1:]


def test_no_ssh_at_all(machine):
    machine.mpi()
    machine.quick_here()
    machine.variables(HYDRA_LAUNCHER_EXEC="/nowhere/ssh")
    found = machine.ask("a", checks=["ssh"])["ssh"]
    assert found.details["hosts"] == {"a": "no ssh"}
    assert "/nowhere/ssh doesn't start: No such file or directory" in found.found


def test_a_machine_that_cannot_ask_itself_says_so(machine, monkeypatch):
    machine.mpi()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = machine.ask("a", checks=["ssh"])["ssh"]
    assert (found.status, "/nowhere/python can't be asked" in found.found) == ("failed", True)


HANGS = "trap '' TERM; echo $$ > {}/pid; while :; do sleep 1; done"
# A line without an end, and no answer.
FLOODS = (
    "head -c 3000000 /dev/zero | tr '\\0' y; head -c 300000 /dev/zero | tr '\\0' z >&2; sleep 600"
)
BABBLES = "printf 'chainermn-doctor:no JSON\\n'; echo oh >&2"


def test_hosts_that_hang_flood_or_babble_hold_up_no_other(machine):
    scripts = {"hangs": HANGS.format(machine.folder), "floods": FLOODS, "babbles": BABBLES}
    for host, script in {**scripts, "well": 'exec sh -c "$2"'}.items():
        (machine.folder / host).write_text(script)
    machine.ssh(
        f'while [ $# -gt 2 ]; do shift; done; f="{machine.folder}/$1"; exec sh "$f" "$1" "$2"'
    )
    found = machine.ask(*scripts, "well", checks=["ssh", "hosts' python"], seconds=16)
    assert found["ssh"].details["hosts"] == dict.fromkeys(scripts, "no answer")
    assert found["hosts' python"].found.startswith("well: ")
    assert is_gone(int((machine.folder / "pid").read_text()))
    assert "(of hangs: nothing within " in found["ssh"].found


def test_the_program_for_hosts_is_understood_by_old_pythons():
    tree = ast.parse(source_for_hosts(), feature_version=(3, 6))
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    }
    assert "socket" in imported
    assert not {name for name in imported if name.startswith("chainermn")}


# What is made of the answers


@pytest.fixture
def of_hosts(machine):
    """Gives what a check finds where these hosts were asked; see `Machine.hosts`."""

    def look(check, *well, vendor="MPICH", script="/home/me/train.py", **said):
        machine.mpi(vendor, vendor)
        machine.hosts(*well, **said)
        return machine.look(check, script=script)

    return look


CUPY = {"packages": {**FACTS["packages"], "cupy-cuda12x": "14.1.0"}}


def test_packages_that_only_some_hosts_have_are_named(of_hosts):
    """Without a GPU this machine may lack them; hosts must agree."""
    assert of_hosts("hosts' packages", a=CUPY, b=CUPY).status == "ok"
    found = of_hosts("hosts' packages", "a", b=CUPY)
    assert found.found == "a: cupy-cuda12x is missing"
    found = of_hosts("hosts' packages", "a", b=CUPY, here=CUPY)
    assert found.found == "a: cupy-cuda12x is missing (here 14.1.0)"
    assert "pip install cupy-cuda12x==14.1.0" in found.fix


def test_our_packages_are_not_fetched_from_an_index(of_hosts):
    found = of_hosts("hosts' packages", "a", b={"packages": {"numpy": "2.4.6"}})
    assert found.found == "b: chainermn-comm is missing (here 2.0.0)"
    assert "pip" not in found.fix


def test_another_python_hides_what_follows_from_it(of_hosts):
    python = {"version": "3.12.1", "implementation": "CPython"}
    other = {"python": python, "packages": {}, "mpiexec": {}}
    names = ("hosts' python", "hosts' packages", "hosts' mpiexec")
    found = [of_hosts(name, "a", b=other) for name in names]
    assert [one.status for one in found] == ["failed", "ok", "ok"]
    assert found[0].found == f"b: {sys.executable} is Python 3.12.1 and not Python 3.11.7"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"exists": False, "other": "/usr/bin/python3"}, "; /usr/bin/python3 is another one"),
        ({"exists": True, "status": "9", "said": "oh"}, " doesn't run (exit status 9): oh"),
    ],
)
def test_a_python_that_is_missing_or_broken_there(of_hosts, said, words):
    found = of_hosts("hosts' python", "a", b={"python": None, **said})
    assert found.status == "failed"
    assert found.found.startswith("b: ")
    assert found.found.endswith(f"{sys.executable}{words}")
    assert " b" in found.fix


@pytest.mark.parametrize(
    ("same", "first", "expected"),
    [
        (None, None, "there is no /opt/bin/mpiexec"),
        (HYDRA, None, None),
        ("Open MPI 4.1", None, "is Open MPI 4.1 and not MPICH"),
        ("no\nsense", None, "that says 'no sense'"),
        ("", None, "that says nothing"),
        (HYDRA, "Open MPI 4.1", "leads to /usr/bin/mpiexec, Open MPI 4.1"),
    ],
)
def test_another_mpiexec(of_hosts, same, first, expected):
    said = {}
    if same is not None:
        said["same path"] = {"path": "/opt/bin/mpiexec", "text": same}
    if first is not None:
        said["on PATH"] = {"path": "/usr/bin/mpiexec", "text": first}
    found = of_hosts("hosts' mpiexec", "a", b={"mpiexec": said})
    assert found.status == ("ok" if expected is None else "failed")
    assert expected is None or (found.found.startswith("b: ") and expected in found.found)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"there": True, "digest": "1234"}, None),
        ({"there": False}, "b: there is no /home/me/train.py"),
        ({"there": True, "digest": "5678"}, "is not the one of this machine"),
        ({"there": True, "problem": "Permission denied"}, "can't be read: Permission denied"),
    ],
)
def test_another_script(of_hosts, there, words):
    found = of_hosts("script", "a", b={"script": there})
    assert found.status == ("ok" if words is None else "failed")
    assert words is None or (words in found.found and "rsync" in found.fix)
    assert of_hosts("script", "a", script=None).status == "skipped"


@pytest.mark.parametrize(
    ("vendor", "here", "there", "status", "words"),
    [
        ("MPICH", {}, {}, "ok", "they are as here"),
        ("MPICH", {"PATH": "/x:/bin"}, {"PATH": "/bin"}, "ok", "but for PATH"),
        ("MPICH", {"LD_LIBRARY_PATH": "/x:/y"}, {"LD_LIBRARY_PATH": "/y:/z:/x"}, "ok", ""),
        ("MPICH", {"LD_LIBRARY_PATH": "/x:/y"}, {"LD_LIBRARY_PATH": "/y"}, "failed", "lacks /x"),
        ("MPICH", {"LD_LIBRARY_PATH": "/x"}, {}, "failed", "is not set"),
        ("MPICH", {"LD_LIBRARY_PATH": ""}, {}, "ok", ""),
        ("MPICH", {}, {"LD_LIBRARY_PATH": "/x"}, "ok", ""),
        ("MPICH", {"MV2_SMP_USE_CMA": "0"}, {}, "failed", "MV2_SMP_USE_CMA is not set (here '0')"),
        ("MPICH", {}, {"MV2_USE_CUDA": "1"}, "failed", "MV2_USE_CUDA is '1' (here not set)"),
        ("MPICH", {}, {"MV2_X;id": "1"}, "ok", ""),
        ("MPICH", {}, {"NCCL_DEBUG": "INFO"}, "warning", "NCCL_DEBUG"),
        ("MPICH", {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, "ok", ""),
        ("Open MPI", {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, "ok", ""),
        ("Open MPI", {"FI_PROVIDER": "tcp"}, {"FI_PROVIDER": "psm"}, "warning", "FI_PROVIDER"),
        ("MPICH", {"OMP_NUM_THREADS": "1"}, {}, "ok", ""),
        ("MPICH", {}, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "1"}, "ok", ""),
    ],
)
def test_variables(of_hosts, vendor, here, there, status, words):
    said = {"here": {"variables": here}, "b": {"variables": there}}
    found = of_hosts("hosts' variables", vendor=vendor, **said)
    assert found.status == status, found
    assert words in found.found


@pytest.mark.parametrize(
    ("free", "total", "status"),
    [(512, 512, "ok"), (2, 512, "failed"), (2, 8, "failed"), (20, 64, "warning")],
)
def test_shared_memory(of_hosts, free, total, status):
    name, size = "hosts' shared memory", {"free_bytes": free * MIB, "total_bytes": total * MIB}
    found = of_hosts(name, "a", b={"shm": size})
    assert found.status == status
    assert (status == "ok") != found.found.startswith(f"b: {free} MiB of {total} MiB")
    found = of_hosts(name, "a", b={"shm": size}, here={"machine": "b"})
    assert found.status == "ok", "the same machine, at which another check looks"


# Connections

GOOD, BAD = {"seconds": 0.001}, {"problem": "timed out"}
STALLED = {"problem": "a short message arrives, and a long one stalls"}


def reaching(**reached: dict) -> dict:
    return {"reached": {HERE if name == "here" else name: one for name, one in reached.items()}}


@pytest.mark.parametrize(
    ("of_a", "of_b", "machine_here", "failures"),
    [
        (reaching(b=GOOD, here=GOOD), reaching(a=GOOD, here=GOOD), "here", []),
        (reaching(b=GOOD, here=GOOD), reaching(a=BAD, here=GOOD), "here", [["b", "a"]]),
        (reaching(b=GOOD, here=GOOD), reaching(a=GOOD, here=BAD), "here", [["b", "this machine"]]),
        (reaching(b=GOOD, here=GOOD), reaching(a=GOOD, here=BAD), "a", []),
    ],
)
def test_connections_are_judged_pair_by_pair(of_hosts, of_a, of_b, machine_here, failures):
    found = of_hosts("connections", a=of_a, b=of_b, here={"machine": machine_here})
    assert found.status == ("failed" if failures else "ok")
    assert found.details.get("failed", []) == [[*pair, "timed out"] for pair in failures]
    pairs = 4 if machine_here == "here" else 2
    said = f"{len(failures)} of {pairs} connections" if failures else f"all {pairs} connections"
    assert said in found.found


def test_a_host_that_did_not_finish_and_hosts_that_were_not_to_try(of_hosts):
    silent = of_hosts("connections", a=reaching(b=GOOD), b={"reached": None})
    assert (silent.status, silent.found.startswith("b did not")) == ("failed", True)
    assert of_hosts("connections", "a", "b").status == "skipped", "ssh told no address"
    for name in ("connections", "round trip"):
        assert of_hosts(name, "a", here={"machine": "a"}).status == "skipped", "one host alone"


def test_what_stalls_is_laid_to_the_size_of_packets_and_not_to_a_firewall(of_hosts):
    found = of_hosts("connections", a=reaching(b=STALLED), b=reaching(a=GOOD))
    assert "mtu 1500   # on a and b" in found.fix
    found = of_hosts("connections", a=reaching(b=STALLED), b=reaching(a=BAD))
    assert "ufw" in found.fix, "a firewall may be all of it"


def test_hosts_that_are_far_apart_are_a_warning(of_hosts):
    far = {"seconds": 0.08}
    found = of_hosts("round trip", a=reaching(b=far), b=reaching(a=far), here={"machine": "a"})
    assert (found.status, "80 ms" in found.found) == ("warning", True)


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        # The addresses of ssh's client and server, with their ports.
        ("10.0.0.1 50000 10.0.0.2 22", "10.0.0.2"),
        ("::1 50000 ::1 22", "10.0.0.9"),  # from this machine to itself
        ("10.0.0.1 1 fe80::1%$(id) 2", "a"),
        ("", "a"),
    ],
)
def test_the_address_in_a_fix_is_that_which_ssh_used(of_hosts, connection, address):
    """What a host says of itself never becomes a part of a command unless it is an address."""
    of_a = {"variables": {"SSH_CONNECTION": connection}, **reaching(b=BAD)}
    of_b = {"variables": {"SSH_CONNECTION": "10.0.0.9 1 10.0.0.1 22"}, **reaching(a=GOOD)}
    fix = of_hosts("connections", a=of_a, b=of_b).fix
    assert fix.startswith(f"sudo ufw allow from {address}   # on b")


# What the user wrote


@pytest.mark.parametrize(
    ("hosts", "ranks", "status", "said"),
    [
        ("a,b", 9, "ok", "no number of slots"),
        ("a:1,b:1", None, "ok", "2 slots on 2 hosts"),
        ("a:2,b", 3, "ok", "3 slots on 2 hosts for 3 ranks"),
        ("a:1,b:1", 4, "failed", "2 slots on 2 hosts, and 4 ranks"),
    ],
)
def test_fewer_slots_than_ranks_are_named(machine, hosts, ranks, status, said):
    found = machine.look("slots", hosts=hosts, ranks=ranks)
    assert (found.status, said in found.found) == (status, True)
    assert status == "ok" or ("-n 2 " in found.fix and "a:2,b:2" in found.fix)


@pytest.fixture
def of_hostfile(machine):
    """Gives the check's finding about a hostfile of this content for an MPI."""

    def look(text, vendor):
        path = machine.folder / "hosts"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        machine.mpi(vendor, vendor)
        return machine.look("hostfile", hostfile=str(path))

    return look


@pytest.mark.parametrize(
    ("text", "vendor", "expected"),
    [
        ("a:2\nb\n", "MPICH", {}),
        ("a:2\nb\n", "Open MPI", {"1": "a slots=2"}),
        ("a slots=2\nb cpu = 4 # x\n", "MPICH", {"1": "a:2", "2": "b:4"}),
        ("#\na slots=2 max_slots=4", "Intel MPI", {"2": "a:2"}),
        ("a slots=2\nb slots=4", "Open MPI", {}),
        ("a slots=2", None, {}),
        ("a;b:2\n-o:2\n'x':2\na:2:3", "Open MPI", {}),
    ],
)
def test_lines_for_another_mpi(of_hostfile, text, vendor, expected):
    found = of_hostfile(text, vendor)
    assert found.details.get("lines", {}) == expected
    assert not expected or f"write in line {next(iter(expected))}: " in found.fix
    assert (found.status == "failed") == bool(expected or ";" in text)


hosts = st.text("ab01", min_size=1, max_size=6) | st.sampled_from(["a.b", "a-b.c"])


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(hosts, st.integers(1, 999)), min_size=1, max_size=5, unique_by=lambda h: h[0]
    )
)
def test_the_right_spelling_is_what_the_other_mpi_reads(tmp_path_factory, named):
    mpich = [f"{name}:{slots}" for name, slots in named]
    open_mpi = [f"{name} slots={slots}" for name, slots in named]
    path = tmp_path_factory.getbasetemp() / "hostfile"
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, path.parent)
        for wrong, right, vendor in ((open_mpi, mpich, "MPICH"), (mpich, open_mpi, "Open MPI")):
            machine.mpi(vendor, vendor)
            path.write_text("\n".join(wrong))
            found = machine.look("hostfile", hostfile=str(path))
            assert list(found.details["lines"].values()) == right
            path.write_text("\n".join(right))
            assert machine.look("hostfile", hostfile=str(path)).status == "ok"
