"""Faults that are planted one by one, and what the check that they concern makes of each."""

from __future__ import annotations

import platform
import sys
import sysconfig
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tools.doctor import (
    ANSWER,
    COMMUNICATORS,
    MIB,
    STAGES,
    Check,
    Login,
    Stage,
    failed,
    job,
    logins,
    ok,
    rank_tests,
    run_checks,
    skipped,
    software,
    steps,
    write_program,
)
from tests.support.worlds.topologies import KNOWN

# What OpenSSH says, with -v.
LOGIN = 'debug1: Authenticating\nAuthenticated to b ([10.0.0.2]:22) using "publickey".'
SSH_SAYS = {
    "ssh: Could not resolve hostname b: Name or service not known": "/etc/hosts",
    "ssh: connect to host b port 22: Connection refused": "systemctl start ssh",
    "ssh: connect to host b port 22: No route to host": "ping",
    "Host key verification failed.": "ssh b",
    "me@b: Permission denied (publickey,password).": "ssh-copy-id",
    LOGIN: "ssh b true   # if it doesn't end",
    "debug1: Connecting to b [10.0.0.2] port 22.": "ssh -v b true",
    "": "ssh -v b true",
    "unheard of": "ssh -v b true",
}
WELL = (steps(host="a"), steps(host="b"))
HYDRA_SAYS = "Fatal error in internal_Init_thread: Other MPI error"


def facts(path: str, value: Any) -> dict[str, Any]:
    return {"facts": {path: value}}


def there(**answer: str | int) -> dict[str, Any]:
    """Hosts a and b, of which the second answers otherwise."""
    mine = {**ANSWER, "version": platform.python_version(), "host": "a"}
    other = {**mine, "host": "b", **answer}
    if "status" in answer:
        other = dict(answer)
    if "no script" in answer:
        del other["script"]
    found = {"a": Login(answer=mine), "b": Login(answer=other, said="it said so")}
    return {"hosts": "a,b", "logins": found}


def on_b(**reported: Any) -> dict[str, Any]:
    """Ranks on a and b, of which the second reports otherwise."""
    return {**there(), "job": job(steps(host="a"), steps(host="b", **reported))}


def ended(end: str, **more: Any) -> dict[str, Any]:
    """A job of two ranks, of which the second comes to its end in a step."""
    return {**there(), "job": job(steps(), steps(end, host="b"), **more)}


def wrong(step: str, problem: str) -> dict[str, Any]:
    found = {"problem": problem}
    return {**there(), "job": job(steps(step, found), steps(step, found, "b"))}


def shm(free: int, total: int = 512) -> dict[str, int]:
    return {"free_bytes": free * MIB, "total_bytes": total * MIB}


CUPY = {"packages.cupy-cuda12x": "14.1.0"}
NO_CUPY = {"unavailable": "CuPy is not installed"}
DEVICES = {"gpus.cupy": {"devices": [{}, {}], "cuda": "12.4"}}
GPUS = {"gpus": ["nvidia0"], "facts": {**CUPY, **DEVICES, "gpus.nccl": "2.22.3"}}
ALONE = {**there(), "job": job(*[{**steps("meet"), "start": {"size": 1}}] * 2)}
SINGLE = {"size": 2, "level": "single"}

TABLE: dict[str, list[tuple[str, str, str, dict[str, Any]]]] = {
    "packages": [
        ("ok", "chainer 7.8.1", "", {}),
        (
            "warning",
            "cupy-cuda12x cupy-cuda13x",
            "pip uninstall",
            {"facts": {**CUPY, "packages.cupy-cuda13x": "14.1.0"}},
        ),
    ],
    "import_chainermn": [
        ("ok", "facade", "", {}),
        ("skipped", "only parts", "", facts("imports.chainermn", None)),
        (
            "failed",
            "not this",
            "together",
            {
                "facts": {
                    "packages.chainermn": "1.3",
                    "imports.chainermn": "site-packages",
                }
            },
        ),
        ("failed", "Chainer's", "together", facts("imports.chainermn", "Chainer's")),
        (
            "failed",
            ".pth files",
            "import chainermn_comm",
            {"facts": {"imports.chainermn": "old", "imports.finder": "not registered"}},
        ),
        (
            "warning",
            "CHAINERMN_USE_BUNDLED",
            "unset",
            {**facts("imports.chainermn", "old"), "CHAINERMN_USE_BUNDLED": "1"},
        ),
    ],
    "mpi4py": [
        ("ok", "MPICH 5.0.2", "", {}),
        (
            "failed",
            "no answer within 30 s",
            "--timeout",
            facts("mpi.library", {"unavailable": "no answer within 30 s"}),
        ),
        (
            "failed",
            "cannot load MPI library",
            "install mpich",
            facts("mpi.library", {"unavailable": "cannot load MPI library"}),
        ),
    ],
    "mpiexec": [
        ("ok", "/opt/mpiexec, of MPICH", "", {}),
        (
            "warning",
            "it says: what",
            "first on PATH",
            facts("mpi.launcher.vendor", None),
        ),
        (
            "failed",
            "no mpiexec on PATH",
            f"export PATH={sys.prefix}",
            {
                **facts("mpi.launcher", {"unavailable": "no mpiexec on PATH"}),
                "PATH": "/",
            },
        ),
    ],
    "mpi_match": [
        ("ok", "both are MPICH", "", {}),
        ("failed", "other: each rank", "PATH", facts("mpi.mismatch", "other")),
        ("skipped", "will show", "", facts("mpi.launcher.vendor", None)),
    ],
    "shared_memory": [
        ("ok", "512 MiB", "", {}),
        ("failed", "16 MiB of 512", "ls -lS", facts("machine.shared_memory", shm(16))),
        (
            "failed",
            "16 MiB of 16",
            "shm-size",
            facts("machine.shared_memory", shm(16, 16)),
        ),
        ("warning", "26 MiB of 64", "ls", facts("machine.shared_memory", shm(26, 64))),
        (
            "failed",
            "no such folder",
            "mount -t tmpfs",
            facts("machine.shared_memory", {"unavailable": "no such folder"}),
        ),
    ],
    "cores": [
        ("ok", "4 of the machine's 8", "", {}),
        ("warning", "5 ranks take turns", "at most 4", {"ranks": 5}),
        ("ok", "4 of", "", {"ranks": 5, "hosts": "a,b"}),
        ("warning", "5 ranks", "at most 4", {"ranks": 5, "hosts": "localhost"}),
        (
            "warning",
            "OMP_NUM_THREADS=3",
            "OMP_NUM_THREADS=2",
            {"ranks": 2, "OMP_NUM_THREADS": "3"},
        ),
    ],
    "gpus": [
        ("skipped", "no NVIDIA GPU", "", {}),
        ("ok", "1 GPUs; no nvidia-smi", "", {"gpus": ["nvidia0"]}),
        ("ok", "1: 580, H200, 1", "", facts("gpus.driver", ["580, H200, 1"])),
        (
            "failed",
            "couldn't talk",
            "nvidia-smi must work",
            {
                "gpus": ["nvidia0"],
                **facts("gpus.driver", {"unavailable": "couldn't talk"}),
            },
        ),
    ],
    "cupy": [
        ("skipped", "no NVIDIA GPU", "", {}),
        ("ok", "CuPy 14.1.0 sees 2 GPUs", "", GPUS),
        ("warning", "compute on CPUs", "cupy-cuda13x[ctk]", {"gpus": ["nvidia0"]}),
        ("warning", "hides", "unset", {**GPUS, "CUDA_VISIBLE_DEVICES": "-1"}),
        ("failed", "2 GPUs, for 3 ranks", "at most 2", {**GPUS, "ranks": 3}),
        (
            "failed",
            "it crashed",
            "show_config",
            {
                "gpus": ["x"],
                "facts": {**CUPY, "gpus.cupy": {"unavailable": "it crashed"}},
            },
        ),
    ],
    "nccl": [
        ("skipped", "CuPy sees no GPU", "", {}),
        ("ok", "2.22.3", "", GPUS),
        (
            "failed",
            "2.4.8 is too old",
            "-U nvidia-nccl-cu13",
            {"facts": {**DEVICES, "gpus.nccl": "2.4.8"}},
        ),
        (
            "warning",
            "absent",
            "nvidia-nccl",
            {"facts": {**DEVICES, "gpus.nccl": "absent"}},
        ),
    ],
    "scheduler": [("skipped", "no job of Slurm", "", {})],
    "ranks_start": [
        ("ok", "2 ranks", "", {"job": job(*WELL)}),
        ("failed", "0 of 2 ranks were", "getent hosts", {"job": job(status=None)}),
        (
            "failed",
            "status 9: oh no",
            "getent hosts",
            {"job": job(status=9, err="oh no")},
        ),
    ],
    "ranks_meet": [
        ("ok", "each sees all 2", "", {"job": job(*WELL)}),
        ("failed", "each of 2 ranks is rank 0 of 1", "mpiexec of MPICH", ALONE),
        ("failed", "starts on 1 of 2 ranks; ", "must print", ended("start", err="oh")),
        ("failed", "starts on 1 of 2", "must print", ended("start", status=None)),
        ("failed", "meet: 1 of 2 ranks", "HYDRA_IFACE", ended("meet", status=None)),
    ],
    "thread_level": [
        ("ok", "multiple", "", {"job": job(*WELL)}),
        ("warning", "single", "unset", {"job": job({"start": SINGLE})}),
        (
            "ok",
            "single",
            "",
            {"job": job({"start": SINGLE}), "MPI4PY_RC_THREAD_LEVEL": "single"},
        ),
    ],
    "messages": [
        ("ok", "right", "", {"job": job(*WELL)}),
        (
            "failed",
            "messages: rank 1: wrong",
            "report",
            wrong("messages", "rank 1: wrong"),
        ),
        ("failed", "messages: 1 of 2 ranks", "UCX_TLS", ended("messages", status=None)),
    ],
    "communicators": [
        ("ok", "right", "", {"job": job(*WELL)}),
        ("failed", "flat: wrong", "another communicator", wrong("flat", "wrong")),
        ("failed", "flat: 1 of 2", "report it", ended("flat", err="oh", status=1)),
    ],
    "gpu_communicators": [
        ("ok", "right", "", {"job": job(*WELL)}),
        (
            "skipped",
            "no CuPy",
            "",
            {"job": job(*[{name: {"reason": "no CuPy"} for name in steps()}] * 2)},
        ),
    ],
    "ranks_end": [
        ("ok", "all do", "", {"job": job(*WELL)}),
        ("failed", "status 9", "echo $?", {"job": job(*WELL, status=9)}),
    ],
    "slots": [
        ("ok", "2 ranks on a, 1 rank on b", "", {"hosts": "a:2,b:2", "ranks": 3}),
        ("failed", "5 ranks don't fit", "-n 4", {"hosts": "a:2,b:2", "ranks": 5}),
    ],
    "ssh": [
        ("ok", "2 hosts answered", "", there()),
        (
            "failed",
            "a: it fails; b: it fails (a: oh)",
            "try a",
            {"logins": dict.fromkeys("ab", Login({}, "it fails", "try a", "oh"))},
        ),
    ],
    "hosts_python": [
        ("ok", "CPython 3.", "", there()),
        ("failed", "is CPython 3.6 and not", f"b:{sys.prefix}", there(version="3.6")),
        ("failed", f"b: there is no {sys.executable}", "rsync", there(status=127)),
        ("failed", "doesn't run: it said so", "rsync", there(status=1)),
    ],
    "script": [
        ("ok", "is the same", "", {**there(), "script": "/x.py"}),
        ("skipped", "no script", "", there()),
        ("failed", "not the one", "b:/x.py", {**there(script="5"), "script": "/x.py"}),
        (
            "failed",
            "b: /x.py can't be read: gone",
            "rsync",
            {**there(**{"no script": "gone"}), "script": "/x.py"},
        ),
    ],
    "srun_ranks": [("skipped", "no job of Slurm", "", there())],
    "hosts_start": [
        ("ok", "1 rank on a, 1 rank on b", "", on_b()),
        (
            "failed",
            "they are: 2 ranks on a; wanted: 1 rank on a",
            "HYDRA_",
            {**there(), "job": job(steps(), steps())},
        ),
        (
            "failed",
            "no rank began on b; mpiexec ended with status 1: oh no",
            "ssh b mpiexec",
            {**there(), "job": job(steps(), status=1, err="oh no")},
        ),
        (
            "failed",
            "on a, b within 30 s; if",
            "ssh a",
            {**there(), "job": job(status=None)},
        ),
    ],
    "hosts_packages": [
        ("ok", "", "", on_b()),
        (
            "failed",
            "b: numpy is missing (here 2.4.6)",
            "pip install numpy==2.4.6",
            on_b(packages={**steps()["facts"]["packages"], "numpy": None}),
        ),
        ("failed", "chainermn is missing", "rsync", on_b(packages={})),
    ],
    "hosts_memory": [
        ("ok", "", "", on_b()),
        (
            "failed",
            "b: a control group allows 200 MiB; ranks need 256",
            "sbatch --mem=256M",
            on_b(memory={"cgroup_bytes": 200 * MIB}),
        ),
    ],
    "hosts_shared_memory": [
        ("ok", "", "", on_b()),
        ("failed", "b: 2 MiB of 64", "ssh b ls", on_b(shared_memory=shm(2, 64))),
        ("warning", "b: 25 MiB of 64", "ssh b ls", on_b(shared_memory=shm(25, 64))),
    ],
    "hosts_meet": [
        ("ok", "each sees all 2", "", on_b()),
        ("failed", "each of 2 ranks is rank 0 of 1", "mpiexec of MPICH", ALONE),
    ],
    "hosts_messages": [
        ("ok", "right", "", on_b()),
        ("failed", "messages: 1 of 2", "HYDRA_IFACE", ended("messages", status=None)),
    ],
    "hosts_communicators": [
        ("ok", "right", "", on_b()),
        ("failed", "flat: wrong", "another communicator", wrong("flat", "wrong")),
        ("failed", "end: 1 of 2", "report it", ended("end", err="oh", status=1)),
    ],
}


@pytest.mark.parametrize(
    ("check", "status", "said", "fix", "planted"),
    [(check, *row) for check, rows in TABLE.items() for row in rows],
)
def test_a_check_says_what_is_planted(machine, check, status, said, fix, planted):
    found = machine.look(check, **planted)
    assert (found.status, said in found.message) == (status, True), found
    assert (found.hint is None) == (status in ("ok", "skipped")), found
    assert fix in (found.hint or ""), found


def test_every_check_is_in_the_table():
    asked = {"python", "import_chainer"}  # by tests of their own, or of the command
    assert asked | TABLE.keys() == {name for names in STAGES.values() for name in names}


@pytest.mark.parametrize(
    ("status", "said", "name", "value"),
    [
        ("ok", sys.executable, "platform.system", "Linux"),
        ("failed", "on Darwin", "platform.system", "Darwin"),
        ("failed", "PyPy", "platform.python_implementation", "PyPy"),
        ("warning", "free-threaded", "sysconfig.get_config_var", "1"),
    ],
)
def test_pythons_that_are_not_supported(machine, status, said, name, value):
    machine.patch.setattr(sysconfig, "get_config_var", lambda _: None)
    machine.patch.setattr(name, lambda *_: value)
    found = machine.look("python")
    assert (found.status, said in found.message) == (status, True), found


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "failed"), ((3, 16), "warning")]
)
def test_versions_of_python_are_compared_as_numbers(machine, version, status):
    machine.patch.setattr(sys, "version_info", version)
    assert machine.look("python").status == status


def test_what_is_missing_of_requirements_is_named(machine):
    def distribution(version, *requires):
        return SimpleNamespace(metadata={"Version": version}, requires=requires)

    found = {
        "chainermn": distribution("2.0", "numpy>=2", "chainermn-comm", "(no sense"),
        "numpy": distribution("1.26", "gone; python_version < '3'", "x; extra == 'a'"),
    }
    machine.patch.setattr(software.environment, "distributions", lambda: found)
    missing = software.unsatisfied_requirements(["chainermn"])
    assert missing == {
        "numpy>=2": "chainermn needs numpy>=2, not 1.26",
        "chainermn-comm": "chainermn needs chainermn-comm, which is missing",
    }
    assert machine.look("packages").hint == software.INSTALL_ALL
    del found["chainermn"].requires
    found["chainermn"].requires = ["numpy>=2"]
    assert "pip install 'numpy>=2'" in machine.look("packages").hint


def test_a_chainer_that_cannot_be_imported_is_quoted(machine):
    module = machine.folder / "chainer.py"
    module.write_text("raise ImportError('no such thing')")
    machine.plant(PYTHONPATH=str(machine.folder), CHAINERMN_NO_COMPAT="1")
    found = machine.look("import_chainer")
    assert (found.status, "no such thing" in found.message) == ("failed", True)
    assert found.hint.startswith("unset CHAINERMN_NO_COMPAT")


# Slurm


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(
    ("status", "said", "fix", "planted"),
    [
        ("ok", "grants 4 tasks on a,b", "", {}),
        ("failed", "8 ranks don't fit", "salloc -n 8", {"ranks": 8}),
        ("failed", "not c", "a,b", {"hosts": "a,c,10.0.0.1"}),
        ("failed", "b is down* (gone)", "--exclude=b", {"sinfo": "b down* gone"}),
        ("warning", "ends in", "TimeLimit", {"squeue": "2020-01-01T00:00:00"}),
        ("ok", "", "", {"squeue": "NONE"}),
    ],
)
def test_what_slurm_grants(machine, status, said, fix, planted):
    programs = {
        name: f"printf %s '{planted.pop(name, '')}'" for name in ("sinfo", "squeue")
    }
    programs["scontrol"] = "echo a b"
    planted = {**planted}
    found = machine.look("scheduler", programs=programs, **SLURM, **planted)
    assert (found.status, said in found.message) == (status, True), found
    assert fix in (found.hint or "")


@pytest.mark.parametrize(
    ("status", "said", "result"),
    [
        ("ok", "all 2 do", job(*WELL)),
        ("warning", "rank 0 of 1", job(*[{**steps("meet"), "start": {"size": 1}}] * 2)),
        ("warning", "sends more", job(status=None, err="mpi/pmi2: too long")),
        ("failed", "don't come to their end; they say: oh", job(err="oh", status=1)),
    ],
)
def test_ranks_of_srun(machine, status, said, result):
    programs = {"srun": "exit 1"}
    planted = {**there(), **SLURM, "job": result, "programs": programs}
    found = machine.look("srun_ranks", **planted)
    assert (found.status, said in found.message) == (status, True), found


# Logins


def ask(machine, program: str, hosts: str = "b", **more: Any) -> dict[str, Login]:
    """What logins give by a program in place of ssh, whose last words are host and command."""
    ssh = write_program(machine.folder / "ssh", program)
    machine.plant(HYDRA_LAUNCHER_EXEC=str(ssh))
    return logins.ask_all(machine.context(hosts, **more))


@pytest.mark.parametrize(("text", "fix"), SSH_SAYS.items())
def test_what_ssh_says_is_told_apart(machine, text, fix):
    banner = "OpenSSH_9.2p1 Debian-2, OpenSSL 3.0\ndebug1: Reading x"
    (machine.folder / "said").write_text(f"{banner}\n{text}\n")
    found = ask(machine, f"cat {machine.folder}/said >&2; exit 255")["b"]
    assert found.problem
    assert fix in found.hint
    assert "debug1" not in found.said
    assert "OpenSSH_" not in found.said


SHELL = 'while [ $# -gt 1 ]; do shift; done; cd / && exec sh -c "$1"'


def test_a_host_says_what_it_has_whatever_its_start_up_files_print(machine):
    script = machine.folder / "it's $(touch trap);.py"
    script.write_text("print()")
    talk = "echo Welcome!; echo 'permission denied' >&2"
    found = ask(machine, f"{talk}; {SHELL}", script=str(script))
    assert found["b"].answer == found[logins.THIS_MACHINE].answer
    assert len(found["b"].answer["script"]) == 64
    assert found["b"].answer["version"] == platform.python_version()


@pytest.mark.parametrize(
    ("python", "status"), [("/nowhere/python", 127), ("/bin/false", 1)]
)
def test_a_python_that_is_missing_or_broken_is_told(machine, python, status):
    machine.patch.setattr(sys, "executable", python)
    assert ask(machine, SHELL)["b"].answer == {"status": status}


def test_a_host_that_hangs_holds_up_no_other(machine):
    machine.patch.setattr(logins, "SHARE", 0.1)
    found = ask(machine, f"case $* in *' b '*) sleep 600;; esac; {SHELL}", hosts="b,c")
    assert [bool(found[host].answer) for host in "bc"] == [False, True]
    assert found["b"].problem == "ssh gets no answer in time"


def test_without_ssh_the_remedy_is_named_and_this_machine_asked_without_it(machine):
    machine.plant(HYDRA_LAUNCHER_EXEC="/nowhere/ssh")
    names = f"b,localhost,127.0.0.1,{platform.node()}"
    found = logins.ask_all(machine.context(names))
    assert found["b"].problem == "there is no /nowhere/ssh on PATH"
    assert "openssh-client" in found["b"].hint
    assert all(found[name].answer for name in names.split(",")[1:])


# How checks are run


def test_checks_that_need_a_failed_one_are_skipped_for_it_and_one_that_raises_fails(
    machine,
):
    def crash(_):
        raise ValueError("oh\x1b[2J")

    checks = [
        Check("good", "?", lambda _: ok("it is")),
        Check("bad", "?", lambda _: failed("no", "try")),
        Check("after", "?", lambda _: ok("it is"), ("good", "bad")),
        Check("last", "?", lambda _: ok("it is"), ("after",)),
        Check("crash", "?", crash),
        Check("none", "?", lambda _: skipped("nothing")),
        Check("free", "?", lambda _: ok("it is"), ("none",)),
    ]
    results = run_checks([Stage("x", "", tuple(checks))], machine.context())
    found = {one.name: one for one in results}
    statuses = ["ok", "failed", "skipped", "skipped", "failed", "skipped", "ok"]
    assert [one.status for one in found.values()] == statuses
    assert found["last"].blocked_by == found["after"].blocked_by == "bad"
    assert "ValueError: oh [2J" in found["crash"].message
    assert "mistake of the doctor" in found["crash"].hint


# What ranks do


def test_no_communicator_is_forgotten():
    assert sorted(COMMUNICATORS) == sorted(KNOWN)


@pytest.mark.world
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("name", COMMUNICATORS)
def test_a_communicator_is_right_and_a_wrong_value_noticed(world, monkeypatch, name):
    assert rank_tests.try_messages(world) == {"problem": None}
    if name == "pure_nccl":
        assert "reason" in rank_tests.try_communicator(world, name)
        return
    if name != "single_node":
        assert rank_tests.try_communicator(world, name) == {"problem": None}
    real = rank_tests.mean_grads
    off = int(world.rank == world.size - 1)
    monkeypatch.setattr(
        rank_tests, "mean_grads", lambda *given: [one + off for one in real(*given)]
    )
    found = rank_tests.try_communicator(world, name)["problem"]
    assert found == f"rank {world.size - 1}: wrong values of mean_grad arrived"
