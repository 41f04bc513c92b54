"""The doctor's layer over hosts without any host: what it asks, what it makes of the answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.support.jobs.processes import is_gone
from tests.support.tools.doctor import (
    FACTS,
    HERE,
    HYDRA,
    MAX_LOGINS,
    MIB,
    STAGES,
    Machine,
    each_row,
    partners,
    write_program,
)

# What OpenSSH says, with -v.
OFFER = "debug1: Offering public key: /home/me/.ssh/id_ed25519 ED25519 SHA256:x agent\n"
LOGIN = 'debug1: Authenticating\r\nAuthenticated to b ([10.0.0.2]:22) using "publickey".\r\n'
CHANGED = (
    "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
    + 30 * "Someone could be eavesdropping on you right now!\n"
    + "Host key for b has changed and you have requested strict checking.\n"
    "Host key verification failed."
)
SAID = {
    "ssh: Could not resolve hostname b: Name or service not known": "ssh_unknown_host",
    "ssh: connect to host b port 22: Connection refused": "ssh_refused",
    "ssh: connect to host b port 22: Connection timed out": "ssh_unreachable",
    "ssh: connect to host b port 22: No route to host": "ssh_unreachable",
    "ssh: connect to host b port 22: Network is unreachable": "ssh_unreachable",
    "ssh: connect to host b port 22: Permission denied": "ssh_unreachable",
    "kex_exchange_identification: read: Connection reset by peer": "ssh_closed",
    "Connection closed by 10.0.0.2 port 22": "ssh_closed",
    "Host key verification failed.": "ssh_host_key",
    "No ED25519 host key is known for b and you have requested strict checking.\n"
    "Host key verification failed.": "ssh_host_key",
    CHANGED: "ssh_host_key_changed",
    "me@b: Permission denied (publickey,password).": "ssh_permission_denied",
    f"{OFFER}me@b: Permission denied (publickey).": "ssh_permission_denied",
    f"{OFFER}Received disconnect from b: Too many authentication failures": "ssh_permission_denied",
    LOGIN: "no shell",
    f"{OFFER}{LOGIN}bash: permission denied (it says)": "no shell",
    "debug1: Connecting to b [10.0.0.2] port 22.": "no answer",
    "": "no answer",
}
OF_LOGINS = ("host_names", "host_keys", "ssh")


def test_what_ssh_says_is_told_apart(machine):
    """Each host's ssh says something else."""
    machine.quick_here()
    hosts = {f"h{number}": text for number, text in enumerate(SAID)}
    for host, text in hosts.items():
        said = f"OpenSSH_9.2p1 Debian-2, OpenSSL 3.0\r\ndebug1: Reading x\r\n{text}\r\n"
        (machine.folder / host).write_text(said)
    ssh = f'while [ $# -gt 2 ]; do shift; done; cat "{machine.folder}/$1" >&2; exit 255'
    kinds = {}
    for one in machine.ask(
        *OF_LOGINS, hosts=list(hosts), mpi="MPICH", ssh=ssh
    ).values():
        assert one.status == "failed"
        assert "debug1" not in one.message
        assert "OpenSSH_" not in one.message
        kinds |= one.details["hosts"]
    assert kinds == {host: SAID[text] for host, text in hosts.items()}


@pytest.mark.parametrize("kind", [*dict.fromkeys(SAID.values()), "no ssh"])
def test_each_trouble_of_a_login_fails_one_check_with_a_fix(machine, kind):
    found = machine.ask(*OF_LOGINS, mpi="MPICH", replies={"a": {}, "b": kind}).values()
    (failed,) = [one for one in found if one.status == "failed"]
    assert failed.message.startswith("b: ")
    assert "it said so" in failed.message
    assert failed.hint
    assert "{" not in failed.hint
    assert [one.status for one in found].count("ok") == 2
    after = STAGES["hosts"][6:13]
    assert after[-1] == "hosts_shared_memory"
    found = machine.ask(*after, replies={"b": kind}).values()
    assert {one.status for one in found} == {"skipped"}


@pytest.mark.parametrize(
    ("vendor", "variables", "words"),
    [
        ("MPICH", {}, ["ssh", "-T"]),
        (
            "MPICH",
            {"HYDRA_LAUNCHER_EXEC": "{}/my tools/ssh"},
            ["{}/my tools/ssh", "-T"],
        ),
        ("MPICH", {"OMPI_MCA_plm_rsh_agent": "rsh"}, ["ssh", "-T"]),
        (
            "Open MPI",
            {"PRTE_MCA_plm_ssh_agent": "ssh -p 22 : rsh"},
            ["ssh", "-p", "22", "-T"],
        ),
        (
            "Open MPI",
            {"OMPI_MCA_plm_rsh_agent": "'{}/my tools/ssh'"},
            ["{}/my tools/ssh", "-T"],
        ),
        (None, {}, ["ssh", "-T"]),
    ],
)
def test_ssh_is_that_of_mpiexec(machine, vendor, variables, words):
    folder = str(machine.folder)
    recording = (
        f'for word in "$0" "$@"; do printf "%s\\n" "$word"; done > {folder}/words'
    )
    machine.quick_here()
    machine.program("ssh", recording)
    write_program(machine.folder / "my tools" / "ssh", recording)
    machine.plant(**{name: value.format(folder) for name, value in variables.items()})
    machine.look("ssh", hosts="a", mpi=vendor)
    ssh, *rest = (machine.folder / "words").read_text().split("\n")
    assert ssh == words[0].format(folder) or (words[0], ssh) == (
        "ssh",
        f"{folder}/bin/ssh",
    )
    assert rest[: len(words) - 1] == words[1:]


def test_no_ssh_at_all(machine, says):
    machine.quick_here()
    said = "/nowhere/ssh doesn't start: No such file or directory"
    found = says("ssh", "failed", said, hosts="a", HYDRA_LAUNCHER_EXEC="/nowhere/ssh")
    assert found.details["hosts"] == {"a": "no ssh"}


def test_a_machine_that_cannot_ask_itself_says_so(says, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    says("ssh", "failed", "/nowhere/python can't be asked", hosts="a")


HANGS = "trap '' TERM; echo $$ > {}/pid; while :; do sleep 1; done"
# A line without an end, and no answer.
FLOODS = (
    "head -c 3000000 /dev/zero | tr '\\0' y; "
    "head -c 300000 /dev/zero | tr '\\0' z >&2; sleep 600"
)
BABBLES = "printf 'chainermn-doctor:no JSON\\n'; echo oh >&2"


@pytest.mark.ci
def test_hosts_that_hang_flood_or_babble_hold_up_no_other(machine):
    scripts = {
        "hangs": HANGS.format(machine.folder),
        "floods": FLOODS,
        "babbles": BABBLES,
    }
    for host, script in {**scripts, "well": 'exec sh -c "$2"'}.items():
        (machine.folder / host).write_text(script)
    ssh = f'while [ $# -gt 2 ]; do shift; done; f="{machine.folder}/$1"; exec sh "$f" "$1" "$2"'
    hosts, checks = [*scripts, "well"], ("ssh", "hosts_python")
    found = machine.ask(*checks, hosts=hosts, seconds=30, mpi="MPICH", ssh=ssh)
    assert found["ssh"].details["hosts"] == dict.fromkeys(scripts, "no answer")
    assert found["hosts_python"].message.startswith("well: ")
    assert is_gone(int((machine.folder / "pid").read_text()))
    assert "(of hangs: nothing within " in found["ssh"].message


@pytest.mark.parametrize(
    ("status", "said"),
    [(127, "there is no {}"), (9, "{} doesn't run (exit status 9): oh no")],
)
def test_a_python_that_is_missing_or_broken_is_named(machine, status, said):
    machine.quick_here()
    ssh = f"printf '\\nchainermn-doctor:{{\"status\": {status}}}\\n'; echo oh no >&2"
    found = machine.ask("ssh", "hosts_python", hosts="a", mpi="MPICH", ssh=ssh)
    assert [one.status for one in found.values()] == ["ok", "failed"]
    assert found["hosts_python"].message == f"a: {said.format(sys.executable)}"


def test_not_all_hosts_are_logged_in_to_at_the_same_time(machine):
    """Each ssh counts those that run; one that hangs gives its place to another."""
    machine.quick_here()
    folder = machine.folder / "running"
    folder.mkdir()
    count = (
        f"mkdir {folder}/$$; ls {folder} | wc -l >> {machine.folder}/counts; sleep 0.3"
    )
    ssh = (
        f"{count}; rmdir {folder}/$$; "
        "echo ssh: connect to host b: Connection refused >&2; exit 255"
    )
    hosts = [f"h{number}" for number in range(3 * MAX_LOGINS)]
    found = machine.look("ssh", hosts=hosts, seconds=120, mpi="MPICH", ssh=ssh)
    assert found.details["hosts"] == dict.fromkeys(hosts, "ssh_refused")
    counts = [int(line) for line in (machine.folder / "counts").read_text().split()]
    assert len(counts) == len(hosts)
    assert 1 < max(counts) <= MAX_LOGINS
    found = machine.look(
        "ssh", hosts=hosts, seconds=12, mpi="MPICH", ssh="exec sleep 600"
    )
    assert found.details["hosts"] == dict.fromkeys(hosts, "no answer")


@pytest.mark.parametrize("count", [1, 2, 16, 17, 512])
def test_many_hosts_try_few_connections_and_each_is_tried_from_several(count):
    hosts = [f"h{number}" for number in range(count)]
    tried = {host: partners(host, hosts) for host in hosts}
    most = count - 1 if count <= 16 else 9
    for host, others in tried.items():
        assert len({*others} - {host}) == len(others) <= most
        assert sum(host in others for others in tried.values()) == len(others)
    reached, waiting = {hosts[0]}, [hosts[0]]
    while waiting:
        new = {*tried[waiting.pop()]} - reached
        reached |= new
        waiting += new
    assert reached == {*hosts}


@pytest.mark.full
def test_512_hosts_are_examined_within_the_usual_time_out(machine):
    machine.quick_here()
    machine.many()
    hosts, names = [f"h{number}" for number in range(512)], ("ssh", "connections")
    found = machine.ask(*names, hosts=hosts, seconds=120, mpi="MPICH")
    assert [one.status for one in found.values()] == ["ok"] * 2, found
    assert "all 5120 connections" in found["connections"].message


def test_what_ssh_says_last_is_waited_for(machine):
    machine.quick_here()
    ssh = "exec 1>&-; sleep 0.3; echo ssh: connect to host b: Connection refused >&2; exit 255"
    found = machine.look("ssh", hosts="a", mpi="MPICH", ssh=ssh)
    assert found.details["hosts"] == {"a": "ssh_refused"}


@pytest.mark.parametrize(
    "part", ["programs", "answers", "versions", "logins", "connections", "job"]
)
def test_with_a_longer_time_out_each_part_of_the_work_gets_more(machine, part):
    """So that the hint to use `--timeout` helps wherever it is given."""
    assert machine.time_of(part, 1200) > 3 * machine.time_of(part, 120)


# What is made of the answers

CUPY = {"packages": {**FACTS["packages"], "cupy-cuda12x": "14.1.0"}}
NO_CUPY = "a: cupy-cuda12x is missing (here 14.1.0)"
OTHER_PYTHON = {"version": "3.12.1", "implementation": "CPython"}
OTHER = {"python": OTHER_PYTHON, "packages": {}, "mpiexec": {}}
SCRIPT = "/home/me/train.py"
PYTHON = f"b: {sys.executable} is Python 3.12.1 and not Python 3.11.7"
NO_PYTHON = f"there is no {sys.executable}"
PATHS, FI = "LD_LIBRARY_PATH", "FI_PROVIDER"
FAIL = "connections fail, at ports that the kernel chose:"


def of(
    a: Mapping[str, Any] = {},
    b: Mapping[str, Any] = {},
    here: Mapping[str, Any] = {},
    **more: Any,
) -> dict[str, Any]:
    """Two hosts and this machine, with the facts in which each differs."""
    return {"replies": {"a": a, "b": b, "here": here}, **more}


def mpiexecs(
    same: str | None, first: str | None = None, hangs: bool = False
) -> dict[str, Any]:
    """What a host's mpiexec says that has this machine's path, and the first one on PATH."""
    at = {"path": "/opt/bin/mpiexec", "text": same, "hangs": hangs}
    said = {} if same is None else {"same path": at}
    if first is not None:
        said["on PATH"] = {"path": "/usr/bin/mpiexec", "text": first}
    return of(b={"mpiexec": said})


def variables(
    here: dict[str, str], there: dict[str, str], vendor: str = "MPICH"
) -> dict[str, Any]:
    return {
        "replies": {"here": {"variables": here}, "b": {"variables": there}},
        "mpi": vendor,
    }


def memory(free: int, total: int, machine: str = "here") -> dict[str, Any]:
    size = {"free_bytes": free * MIB, "total_bytes": total * MIB}
    return of(b={"shm": size}, here={"machine": machine})


def script(**there: Any) -> dict[str, Any]:
    return of(b={"script": {"there": True, **there}}, script=SCRIPT)


# Connections: of two hosts, what each found when it connected to the other and to this
# machine.
GOOD, BAD, FAR = {"seconds": 0.001}, {"problem": "timed out"}, {"seconds": 0.08}
STALLED = {"problem": "a short message arrives, and a long one stalls"}


def reaching(**reached: Any) -> dict[str, Any]:
    return {
        "reached": {
            HERE if name == "here" else name: one for name, one in reached.items()
        }
    }


A, B = reaching(b=GOOD, here=GOOD), reaching(a=GOOD, here=GOOD)

TABLE = {
    "hosts_packages": [
        ("ok", "", "", of(CUPY, CUPY)),
        ("failed", NO_CUPY, "pip install cupy-cuda12x==14.1.0", of(b=CUPY, here=CUPY)),
        ("ok", "", "", of(b=OTHER)),  # another Python hides what follows from it
    ],
    "hosts_python": [
        ("failed", PYTHON, "", of(b=OTHER)),
        ("failed", f"b: {NO_PYTHON}", " b", of(b={"no_python": NO_PYTHON})),
    ],
    "hosts_mpiexec": [
        ("ok", "", "", of(b=OTHER)),
        ("failed", "b: there is no /opt/bin/mpiexec", "", mpiexecs(None)),
        ("ok", "", "", mpiexecs(HYDRA)),
        (
            "failed",
            "/opt/bin/mpiexec is Open MPI 4.1 and not MPICH",
            "",
            mpiexecs("Open MPI 4.1"),
        ),
        ("failed", "that says 'no sense'", "", mpiexecs("no\nsense")),
        ("failed", "that says nothing", "", mpiexecs("")),
        (
            "failed",
            "b: /opt/bin/mpiexec --version does not end",
            "--timeout",
            mpiexecs("", hangs=True),
        ),
        (
            "failed",
            "leads to /usr/bin/mpiexec, Open MPI 4.1",
            "",
            mpiexecs(HYDRA, "Open MPI 4.1"),
        ),
    ],
    "script": [
        ("ok", "", "", script(digest="1234")),
        ("failed", "b: there is no /home/me/train.py", "rsync", script(there=False)),
        ("failed", "is not the one of this machine", "rsync", script(digest="5678")),
        (
            "failed",
            "read: Permission denied",
            "rsync",
            script(problem="Permission denied"),
        ),
        ("skipped", "", "", of()),
    ],
    "hosts_variables": [
        ("ok", "they are as here", "", variables({}, {})),
        ("ok", "but for PATH", "", variables({"PATH": "/x:/bin"}, {"PATH": "/bin"})),
        ("ok", "", "", variables({PATHS: "/x:/y"}, {PATHS: "/y:/z:/x"})),
        ("failed", "lacks /x", "", variables({PATHS: "/x:/y"}, {PATHS: "/y"})),
        ("failed", "is not set", "", variables({PATHS: "/x"}, {})),
        ("ok", "", "", variables({PATHS: ""}, {})),
        ("ok", "", "", variables({}, {PATHS: "/x"})),
        ("warning", "NCCL_DEBUG", "", variables({}, {"NCCL_DEBUG": "INFO"})),
        ("ok", "", "", variables({"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"})),
        (
            "ok",
            "",
            "",
            variables({"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, "Open MPI"),
        ),
        ("warning", FI, "", variables({FI: "tcp"}, {FI: "psm"}, "Open MPI")),
        ("ok", "", "", variables({"OMP_NUM_THREADS": "1"}, {})),
        (
            "ok",
            "",
            "",
            variables({}, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "1"}),
        ),
    ],
    "hosts_shared_memory": [
        ("ok", "512 MiB", "", memory(512, 512)),
        ("failed", "b: 2 MiB of 512 MiB", "", memory(2, 512)),
        ("failed", "b: 2 MiB of 8 MiB", "", memory(2, 8)),
        ("warning", "b: 20 MiB of 64 MiB", "", memory(20, 64)),
        # The same machine, at which another check looks.
        ("ok", "512 MiB", "", memory(2, 512, "b")),
        ("ok", "512 MiB", "", memory(20, 64, "b")),
    ],
    "connections": [
        ("ok", "all 4 connections", "", of(A, B)),
        (
            "failed",
            f"1 of 4 {FAIL} b to a: timed",
            "",
            of(A, reaching(a=BAD, here=GOOD)),
        ),
        (
            "failed",
            f"1 of 4 {FAIL} b to this machine: timed",
            "",
            of(A, reaching(a=GOOD, here=BAD)),
        ),
        ("ok", "all 2", "", of(A, reaching(a=GOOD, here=BAD), {"machine": "a"})),
        ("failed", "b did not", "", of(reaching(b=GOOD), {"reached": None})),
        ("skipped", "", "", of()),  # ssh told no address
        ("skipped", "", "", {"replies": {"a": {}, "here": {"machine": "a"}}}),
        # The size of packets, if it may be all of it; else a firewall.
        (
            "failed",
            "",
            "mtu 1500   # on a and b",
            of(reaching(b=STALLED), reaching(a=GOOD)),
        ),
        ("failed", "", "ufw", of(reaching(b=STALLED), reaching(a=BAD))),
    ],
    "slots": [
        ("ok", "5 on a and 4 on b", "", dict(hosts="a,b", ranks=9)),
        ("ok", "1 on a and 1 on b", "", dict(hosts="a:1,b:1")),
        ("ok", "2 on a and 1 on b", "", dict(hosts="a:2,b", ranks=3)),
        (
            *("failed", "4 ranks don't fit: the hosts have 2 slots", "-n 2   #"),
            dict(hosts="a:1,b:1", ranks=4),
        ),
    ],
}


@each_row(TABLE)
def test_what_hosts_have_and_say_is_judged(says, check, status, said, fix, given):
    says(check, status, said, fix, **given)


def test_packages_are_not_compared_with_none_nor_ours_fetched_from_an_index(says):
    """Without a GPU this machine may lack some; hosts must agree."""
    found = says("hosts_packages", "failed", **of(b=CUPY))
    assert found.message == "a: cupy-cuda12x is missing"
    without = {"packages": {"numpy": "2.4.6"}}
    found = says("hosts_packages", "failed", **of(b=without))
    assert found.message == "b: chainermn-comm is missing (here 2.0.0)"
    assert "pip" not in found.hint


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
def test_the_address_in_a_fix_is_that_which_ssh_used(says, connection, address):
    """What a host says of itself never becomes a part of a command unless it is an address."""
    a = {"variables": {"SSH_CONNECTION": connection}, **reaching(b=BAD)}
    b = {"variables": {"SSH_CONNECTION": "10.0.0.9 1 10.0.0.1 22"}, **reaching(a=GOOD)}
    found = says("connections", "failed", **of(a, b))
    assert found.hint.startswith(f"sudo ufw allow from {address}   # on b")
    assert found.details["failed"] == [["a", "b", "timed out"]]


# Hostfiles


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
def test_lines_for_another_mpi(machine, text, vendor, expected):
    found = machine.hostfile(text, vendor)
    assert found.details.get("lines", {}) == expected
    assert not expected or f"write in line {next(iter(expected))}: " in found.hint
    assert (found.status == "failed") == bool(expected or ";" in text)


names = st.text("ab01", min_size=1, max_size=6) | st.sampled_from(["a.b", "a-b.c"])
slots = st.dictionaries(names, st.integers(1, 999), min_size=1, max_size=5)


@settings(max_examples=20)
@drawn(slots)
def test_the_right_spelling_is_what_the_other_mpi_reads(tmp_path_factory, named):
    mpich = [f"{name}:{slots}" for name, slots in named.items()]
    open_mpi = [f"{name} slots={slots}" for name, slots in named.items()]
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, tmp_path_factory.getbasetemp())
        for wrong, right, vendor in (
            (open_mpi, mpich, "MPICH"),
            (mpich, open_mpi, "Open MPI"),
        ):
            found = machine.hostfile("\n".join(wrong), vendor)
            assert list(found.details["lines"].values()) == right
            assert machine.hostfile("\n".join(right), vendor).status == "ok"
