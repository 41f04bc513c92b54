"""The doctor's layer over hosts without any host: what it asks, what it makes of the answers."""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.hosts import hostfiles, remote, ssh
from chainermn_tools.doctor.hosts.conversation import conversations
from chainermn_tools.doctor.hosts.logins import MEANING, host_keys, host_names, login
from chainermn_tools.doctor.hosts.network import connections, round_trip
from chainermn_tools.doctor.hosts.round import HERE, Reply, Round, address, ask
from chainermn_tools.doctor.hosts.sameness import mpiexec, packages, python, script
from chainermn_tools.doctor.hosts.surroundings import shared_memory, variables
from chainermn_tools.environment.probe import Unavailable
from chainermn_tools.launch.hosts import Host, from_file

# Ends a test that hangs; nothing here takes so long.
LIMIT_SECONDS = 60.0
HYDRA = "HYDRA build details:\n    Version: 5.0.2\n"
MIB = 1 << 20
SCRIPT = "/home/me/train.py"
FACTS: dict[str, Any] = {
    "python": {"version": "3.11.7", "implementation": "CPython"},
    "packages": {"numpy": "2.4.6", "chainermn-comm": "2.0.0"},
    "mpiexec": {"same path": {"path": "/opt/bin/mpiexec", "text": HYDRA}},
    "variables": {"PATH": "/bin"},
    "script": {"there": True, "digest": "1234"},
    "shm": {"total_bytes": 512 * MIB, "free_bytes": 512 * MIB},
    "port": 40_000,
}


NOTHING: dict[str, Any] = {}


def reply(name: str, reached: dict[str, Any] | None = NOTHING, **said: Any) -> Reply:
    """A host whose answer is as it should be but for these facts."""
    own = {"hostname": name, "machine": name, **said}
    return Reply({**FACTS, **own}, reached=reached)


def look(
    check, *hosts: str, vendor: str | None = "MPICH", here: dict[str, Any] | None = None, **replies
):
    """What a check makes of such replies; those of other hosts are as they should be."""
    replies = {name: replies.get(name) or reply(name) for name in (*hosts, *replies)}
    round_ = Round({**FACTS, "hostname": "here", "machine": "here", **(here or {})}, replies)
    context = Context(
        time.monotonic() + LIMIT_SECONDS,
        hosts=tuple(Host(name, None) for name in replies),
        script=SCRIPT,
    )
    launcher = {"path": "/opt/bin/mpiexec", "vendor": vendor, "version": "5.0.2"}
    context.answers[ask] = lambda *_: round_
    context.answers[facts.launcher] = lambda *_: launcher
    return check.look(context)


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


@pytest.mark.parametrize("text", SAID)
def test_what_ssh_says_is_told_apart(text):
    found = ssh.trouble(f"OpenSSH_9.2p1 Debian-2, OpenSSL 3.0\r\ndebug1: Reading x\r\n{text}\r\n")
    assert found.kind == SAID[text]
    assert "debug1" not in found.said
    assert "OpenSSH_" not in found.said


@pytest.mark.parametrize("kind", MEANING)
def test_each_trouble_of_a_login_fails_one_check_with_a_fix(kind):
    bad = Reply(None, ssh.Trouble(kind, "it said so"))
    answers = [look(check, "a", b=bad) for check in (host_names, host_keys, login)]
    failed = [answer for answer in answers if answer.status == "failed"]
    assert len(failed) == 1
    assert failed[0].found.startswith("b: ")
    assert "it said so" in failed[0].found
    assert failed[0].fix
    assert "{" not in failed[0].fix
    assert [answer.status for answer in answers].count("ok") == 2
    after = (python, packages, mpiexec, script, variables, shared_memory)
    assert {look(check, b=bad).status for check in after} == {"skipped"}


@pytest.mark.parametrize(
    ("vendor", "variables", "expected"),
    [
        ("MPICH", {}, ["ssh"]),
        ("MPICH", {"HYDRA_LAUNCHER_EXEC": "/my tools/ssh"}, ["/my tools/ssh"]),
        ("MPICH", {"OMPI_MCA_plm_rsh_agent": "rsh"}, ["ssh"]),
        ("Open MPI", {"PRTE_MCA_plm_ssh_agent": "ssh -p 22 : rsh"}, ["ssh", "-p", "22"]),
        ("Open MPI", {"OMPI_MCA_plm_rsh_agent": "'/my tools/ssh'"}, ["/my tools/ssh"]),
        (None, {}, ["ssh"]),
    ],
)
def test_ssh_is_that_of_mpiexec(monkeypatch, vendor, variables, expected):
    for name in (*ssh.HYDRA_AGENTS, *ssh.OPEN_MPI_AGENTS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ssh.agent(vendor) == expected


def test_the_program_for_hosts_is_understood_by_old_pythons():
    ast.parse(Path(remote.__file__).read_text(), feature_version=(3, 6))


def test_packages_that_only_some_hosts_have_are_named():
    """Without a GPU this machine may lack them; hosts must agree."""
    with_cupy = reply("b", packages={**FACTS["packages"], "cupy-cuda12x": "14.1.0"})
    assert look(packages, a=dataclasses.replace(with_cupy), b=with_cupy).status == "ok"
    answer = look(packages, "a", b=with_cupy)
    assert answer.found == "a: cupy-cuda12x is missing"
    here = {"packages": {**FACTS["packages"], "cupy-cuda12x": "14.1.0"}}
    answer = look(packages, "a", b=with_cupy, here=here)
    assert answer.found == "a: cupy-cuda12x is missing (here 14.1.0)"
    assert "pip install cupy-cuda12x==14.1.0" in answer.fix


def test_our_packages_are_not_fetched_from_an_index():
    answer = look(packages, "a", b=reply("b", packages={"numpy": "2.4.6"}))
    assert answer.found == "b: chainermn-comm is missing (here 2.0.0)"
    assert "pip" not in answer.fix


def test_another_python_hides_what_follows_from_it():
    other = {
        "python": {"version": "3.12.1", "implementation": "CPython"},
        "packages": {},
        "mpiexec": {},
    }
    answers = {
        check.name: look(check, "a", b=reply("b", **other)) for check in (python, packages, mpiexec)
    }
    assert [one.status for one in answers.values()] == ["failed", "ok", "ok"]
    assert (
        answers["hosts' python"].found
        == f"b: {sys.executable} is Python 3.12.1 and not Python 3.11.7"
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "there is no /opt/bin/mpiexec"),
        ({"same path": {"path": "/opt/bin/mpiexec", "text": HYDRA}}, None),
        (
            {"same path": {"path": "/opt/bin/mpiexec", "text": "Open MPI 4.1"}},
            "is Open MPI 4.1 and not MPICH",
        ),
        ({"same path": {"path": "/opt/bin/mpiexec", "text": "no\nsense"}}, "that says 'no sense'"),
        ({"same path": {"path": "/opt/bin/mpiexec", "text": ""}}, "that says nothing"),
        (
            {
                "same path": {"path": "/opt/bin/mpiexec", "text": HYDRA},
                "on PATH": {"path": "/usr/bin/mpiexec", "text": "Open MPI 4.1"},
            },
            "leads to /usr/bin/mpiexec, Open MPI 4.1",
        ),
    ],
)
def test_another_mpiexec(said, expected):
    answer = look(mpiexec, "a", b=reply("b", mpiexec=said))
    assert answer.status == ("ok" if expected is None else "failed")
    if expected is not None:
        assert answer.found.startswith("b: ")
        assert expected in answer.found


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
def test_variables(vendor, here, there, status, words):
    answer = look(variables, b=reply("b", variables=there), vendor=vendor, here={"variables": here})
    assert answer.status == status, answer
    assert words in answer.found


@pytest.mark.parametrize(
    ("free", "total", "status"),
    [(512, 512, "ok"), (2, 512, "failed"), (2, 8, "failed"), (20, 64, "warning")],
)
def test_shared_memory(free, total, status):
    size = {"free_bytes": free * MIB, "total_bytes": total * MIB}
    answer = look(shared_memory, "a", b=reply("b", shm=size))
    assert answer.status == status
    assert (status == "ok") != answer.found.startswith(f"b: {free} MiB of {total} MiB")
    here = look(shared_memory, "a", b=reply("b", shm=size), here={"machine": "b"})
    assert here.status == "ok"  # the same machine, at which another check looks


GOOD, BAD = {"seconds": 0.001}, {"problem": "timed out"}


def test_connections_are_judged_pair_by_pair():
    a, b = (reply(name, {other: GOOD, HERE: GOOD}) for name, other in ("ab", "ba"))
    assert (
        look(connections, a=a, b=b).found == "all 4 connections between them succeed, at any port"
    )
    bad = reply("b", {"a": BAD, HERE: GOOD})
    answer = look(connections, a=a, b=bad)
    assert "1 of 4 connections" in answer.found
    assert answer.details["failed"] == [["b", "a", "timed out"]]
    unreached = reply("b", {"a": GOOD, HERE: BAD})
    assert look(connections, a=a, b=unreached).details["failed"] == [
        ["b", "this machine", "timed out"]
    ]
    assert look(connections, a=a, b=unreached, here={"machine": "a"}).status == "ok"
    silent = look(connections, a=a, b=reply("b", None))
    assert silent.status == "failed"
    assert silent.found.startswith("b did not")


def test_hosts_that_ssh_did_not_reach_by_an_address_are_not_tried():
    assert look(connections, a=reply("a", {}), b=reply("b", {})).status == "skipped"


def test_one_host_alone_needs_no_network():
    here = {"machine": "a"}
    assert look(connections, "a", here=here).status == "skipped"
    assert look(round_trip, "a", here=here).status == "skipped"


def test_hosts_that_are_far_apart_are_a_warning():
    a, b = (reply(name, {other: {"seconds": 0.08}}) for name, other in ("ab", "ba"))
    answer = look(round_trip, a=a, b=b, here={"machine": "a"})
    assert answer.status == "warning"
    assert "80 ms" in answer.found


def test_others_find_this_machine_where_ssh_came_from():
    far = {"variables": {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}}
    itself = {"variables": {"SSH_CONNECTION": "::1 50000 ::1 22"}}
    odd = {"variables": {"SSH_CONNECTION": "10.0.0.1 1 fe80::1%$(id) 2"}}
    able = {"far": far, "localhost": itself, "odd": odd, "none": {"variables": {}}}
    assert address(HERE, "far", able) == "10.0.0.1"
    assert address("localhost", "far", able) == "10.0.0.1"
    assert address("far", "localhost", able) == "10.0.0.2"
    assert address("odd", "far", able) is address("none", "far", able) is None


@pytest.mark.parametrize(
    ("text", "vendor", "expected"),
    [
        ("a:2\nb\n", "MPICH", {}),
        ("a:2\nb\n", "Open MPI", {1: ("a:2", "a slots=2")}),
        ("a slots=2\nb cpu = 4 # x\n", "MPICH", {1: ("a slots=2", "a:2"), 2: ("b cpu = 4", "b:4")}),
        ("#\na slots=2 max_slots=4", "Intel MPI", {2: ("a slots=2 max_slots=4", "a:2")}),
        ("a slots=2\nb cpu=4", "Open MPI", {}),
        ("a slots=2", None, {}),
        ("a;b:2\n-o:2\n'x':2\na:2:3", "Open MPI", {}),
    ],
)
def test_lines_for_another_mpi(text, vendor, expected):
    assert hostfiles.misspelt(text, vendor) == expected


names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(names, st.integers(1, 999)), min_size=1, max_size=5))
def test_the_right_spelling_says_the_same_to_the_other_mpi(hosts):
    mpich = "\n".join(f"{name}:{slots}" for name, slots in hosts)
    open_mpi = "\n".join(f"{name} slots={slots}" for name, slots in hosts)
    for wrong, right, vendor in ((open_mpi, mpich, "MPICH"), (mpich, open_mpi, "Open MPI")):
        spelt = hostfiles.misspelt(wrong, vendor)
        assert "\n".join(line for _, line in spelt.values()) == right
        assert from_file(wrong, "f") == from_file(right, "f")
        assert hostfiles.misspelt(right, vendor) == {}


def test_a_program_that_hangs_or_floods_is_ended(tmp_path):
    """The first ignores signals, the second writes what is no answer, without an end."""
    hangs = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 1; done"
    floods = f"while :; do echo {'y' * 2000}; echo z >&2; done"
    answers = f"printf '{remote.MARK}{{\"a\": 1}}\\n{remote.MARK}no JSON\\n'; echo oh >&2"
    began = time.monotonic()
    with conversations() as start:
        talks = [start(["sh", "-c", text]) for text in (hangs, floods, answers)]
        assert talks[2].hear(began + LIMIT_SECONDS) == {"a": 1}
        assert talks[2].hear(began + LIMIT_SECONDS) is None
        assert [talk.hear(time.monotonic() + 0.2) for talk in talks[:2]] == [None, None]
        talks[2].tell("more than it wants to hear\n" * 1000)
        talks[2].process.wait(LIMIT_SECONDS)
        assert talks[2].complaints() == "oh\n"
    assert time.monotonic() - began < LIMIT_SECONDS
    assert all(talk.process.poll() is not None for talk in talks)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def asking(monkeypatch, tmp_path: Path, ssh_script: str, seconds: float, **given: Any) -> Round:
    """A round with another program in place of ssh."""
    agent = tmp_path / "ssh"
    agent.write_text(f"#!/bin/sh\n{ssh_script}\n")
    agent.chmod(0o755)
    monkeypatch.setattr(ssh, "agent", lambda vendor: [str(agent)])
    context = Context(time.monotonic() + seconds, **given)
    context.answers[facts.launcher] = lambda *_: {}
    return ask(context)


def test_an_ssh_that_hangs_takes_no_longer_than_it_may(monkeypatch, tmp_path):
    began = time.monotonic()
    found = asking(monkeypatch, tmp_path, "exec sleep 600", 12, hosts=(Host("a", 1),))
    assert time.monotonic() - began < LIMIT_SECONDS
    assert found.hosts["a"].trouble == ssh.Trouble("no answer", found.hosts["a"].trouble.said)
    assert found.hosts["a"].trouble.said.startswith("nothing within ")


def test_no_ssh_at_all(monkeypatch):
    monkeypatch.setattr(ssh, "agent", lambda vendor: ["/nowhere/ssh"])
    context = Context(time.monotonic() + LIMIT_SECONDS, hosts=(Host("a", 1),))
    context.answers[facts.launcher] = lambda *_: {}
    found = ask(context).hosts["a"].trouble
    assert found == ssh.Trouble("no ssh", "/nowhere/ssh doesn't start: No such file or directory")


def test_a_machine_that_cannot_ask_itself_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    context = Context(time.monotonic() + LIMIT_SECONDS)
    context.answers[facts.launcher] = lambda *_: {}
    with pytest.raises(Unavailable, match="/nowhere/python can't be asked"):
        ask(context)
