"""Faults that are planted one by one, and the row that the check they concern makes of each.

Faults of hosts and of jobs of Slurm are planted in real ones, by tests/cluster and
tests/slurm; here are those that can't be planted there.
"""

from __future__ import annotations

import platform
import sys
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tools.doctor import (
    ANSWER,
    COMMUNICATORS,
    MIB,
    STAGES,
    Check,
    CheckResult,
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


def row(found: CheckResult) -> str:
    """What a user reads of a check."""
    if found.hint is None:
        return f"{found.status}: {found.message}"
    return f"{found.status}: {found.message} fix: {found.hint}"


def facts(path: str, value: Any) -> dict[str, Any]:
    return {"facts": {path: value}}


def lacking(path: str, reason: str) -> dict[str, Any]:
    return facts(path, {"unavailable": reason})


def shm(free, total):
    return {"free_bytes": free * MIB, "total_bytes": total * MIB}


def on_hosts(*ranks, **ended):
    """Hosts a and b that answer well, and what a job of two ranks on them reports."""
    mine = {**ANSWER, "version": platform.python_version()}
    answers = {host: Login(answer={**mine, "host": host}) for host in "ab"}
    return {"hosts": "a,b", "logins": answers, "job": job(*ranks, **ended)}


def of_b(**facts):
    """The same, where b has other facts."""
    return on_hosts(steps(host="a"), steps(host="b", **facts))


def ended(end, **how):
    """The same, where the second rank comes to its end in a step."""
    return on_hosts(steps(), steps(end, host="b"), **how)


def wrong(step):
    """The same, where ranks find a problem in a step."""
    found = {"problem": "wrong"}
    return on_hosts(steps(step, found), steps(step, found, "b"))


def answering(**answer: Any) -> dict[str, Any]:
    """The same, where b answers otherwise."""
    planted = {**of_b(), "script": "/x.py"}
    planted["logins"]["b"] = Login(answer=answer, said="it said so")
    return planted


CUPY = {"packages.cupy-cuda12x": "14.1.0"}
DEVICES = {"gpus.cupy": {"devices": [{}, {}], "cuda": "12.4"}}
GPUS = {"gpus": ["nvidia0"], "facts": {**CUPY, **DEVICES, "gpus.nccl": "2.22.3"}}
ALONE = {**steps("meet"), "start": {"size": 1}}
SINGLE = {"job": job({"start": {"size": 2, "level": "single"}})}
NO_GPUS = {name: {"reason": "no CuPy"} for name in steps()}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "programs": {"scontrol": "echo a b", "squeue": "echo NONE", "srun": "exit 1"},
}

# By the names of checks: their rows, and what is planted for them.
TABLE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "packages": [
        (
            "warning: *pip uninstall -y cupy-cuda12x cupy-cuda13x ",
            {"facts": {**CUPY, "packages.cupy-cuda13x": "14.1.0"}},
        ),
    ],
    "import_chainermn": [
        ("skipped: only parts", facts("imports.chainermn", None)),
        ("failed: *not this*together", facts("imports.chainermn", "Chainer's")),
        (
            "failed: *not this*together",
            {
                "facts": {
                    "packages.chainermn": "1.3",
                    "imports.chainermn": "its",
                    "imports.finder": "no",
                }
            },
        ),
        (
            "failed: *.pth files*import chainermn_comm",
            {"facts": {"imports.chainermn": "old", "imports.finder": "not registered"}},
        ),
        (
            "warning: *CHAINERMN_USE_BUNDLED*unset",
            {**facts("imports.chainermn", "old"), "CHAINERMN_USE_BUNDLED": "1"},
        ),
    ],
    "mpi4py": [
        (
            "failed: *within 30 s*--timeout",
            lacking("mpi.library", "no answer within 30 s"),
        ),
        (
            "failed: cannot load MPI library*install mpich",
            lacking("mpi.library", "cannot load MPI library"),
        ),
    ],
    "mpiexec": [
        ("warning: *it says: what*first on PATH", facts("mpi.launcher.vendor", None)),
        (
            f"failed: no mpiexec on PATH*export PATH={sys.prefix}",
            {**lacking("mpi.launcher", "no mpiexec on PATH"), "PATH": "/"},
        ),
    ],
    "mpi_match": [
        ("failed: other: each rank*PATH", facts("mpi.mismatch", "other")),
        ("skipped: *will show", facts("mpi.launcher.vendor", None)),
    ],
    "shared_memory": [
        ("failed: 16 MiB of 512*ls -lS", facts("machine.shared_memory", shm(16, 512))),
        ("failed: 16 MiB of 16*shm-size", facts("machine.shared_memory", shm(16, 16))),
        ("warning: 26 MiB of 64*ls", facts("machine.shared_memory", shm(26, 64))),
        (
            "failed: *no such folder*mount -t tmpfs",
            lacking("machine.shared_memory", "no such folder"),
        ),
    ],
    "cores": [
        ("warning: 4 of the machine's 8*5 ranks take turns*at most 4", {"ranks": 5}),
        ("ok: 4 of the machine's 8", {"ranks": 10, "hosts": "a,b"}),
        ("warning: *5 ranks*at most 4", {"ranks": 5, "hosts": "localhost"}),
        (
            "warning: *OMP_NUM_THREADS=3*OMP_NUM_THREADS=2",
            {"ranks": 2, "OMP_NUM_THREADS": "3"},
        ),
    ],
    "gpus": [
        ("skipped: no NVIDIA GPU", {}),
        ("ok: 1 GPU; without nvidia-smi", {"gpus": ["nvidia0"]}),
        ("ok: 1: 580, H200, 1", facts("gpus.driver", ["580, H200, 1"])),
        (
            "failed: couldn't talk*nvidia-smi must work",
            {"gpus": ["nvidia0"], **lacking("gpus.driver", "couldn't talk")},
        ),
    ],
    "cupy": [
        ("ok: CuPy 14.1.0 sees 2 GPUs", GPUS),
        ("warning: *compute on CPUs*cupy-cuda13x", {"gpus": ["nvidia0"]}),
        ("warning: *hides*unset", {**GPUS, "CUDA_VISIBLE_DEVICES": "-1"}),
        ("failed: *2 GPUs, for 3 ranks*at most 2", {**GPUS, "ranks": 3}),
        (
            "failed: it crashed*show_config",
            {
                "gpus": ["x"],
                "facts": {**CUPY, "gpus.cupy": {"unavailable": "it crashed"}},
            },
        ),
    ],
    "nccl": [
        ("skipped: CuPy sees no GPU", {}),
        ("ok: NCCL 2.22.3", GPUS),
        (
            "failed: 2.4.8 is too old*-U nvidia-nccl-cu13",
            {"facts": {**DEVICES, "gpus.nccl": "2.4.8"}},
        ),
        (
            "warning: NCCL is not installed*nvidia-nccl",
            {"facts": {**DEVICES, "gpus.nccl": "absent"}},
        ),
    ],
    "scheduler": [
        ("ok: *grants 4 tasks on a,b", SLURM),
        (
            "failed: *hosts can't be read: scontrol*doctor --hosts",
            {**SLURM, "programs": {"scontrol": "exit 1"}},
        ),
    ],
    "ranks_start": [
        (
            "failed: 0 of 2 ranks were*within 30 s*getent hosts",
            {"job": job(status=None)},
        ),
    ],
    "ranks_meet hosts_meet": [
        (
            "failed: each of 2 ranks is rank 0 of 1*mpiexec of MPICH",
            on_hosts(ALONE, ALONE),
        ),
        ("failed: MPI starts on 1 of 2 ranks; *must print", ended("start", err="oh")),
        ("failed: meet: 1 of 2 ranks*HYDRA_IFACE", ended("meet", status=None)),
    ],
    "thread_level": [
        ("warning: *single*unset", SINGLE),
        ("ok: *single", {**SINGLE, "MPI4PY_RC_THREAD_LEVEL": "single"}),
    ],
    "messages hosts_messages": [
        ("failed: messages: wrong*report", wrong("messages")),
        ("failed: messages: 1 of 2*UCX_TLS", ended("messages", status=None)),
    ],
    "communicators hosts_communicators": [
        ("failed: flat: wrong*another communicator", wrong("flat")),
        ("failed: flat: 1 of 2*report it", ended("flat", err="oh", status=1)),
    ],
    "gpu_communicators": [("skipped: no CuPy", {"job": job(NO_GPUS, NO_GPUS)})],
    "ranks_end": [
        ("failed: *status 9*echo $?", on_hosts(steps(), steps(), status=9)),
        ("failed: end: 1 of 2*must print", ended("end")),
    ],
    "slots": [
        ("ok: 2 ranks on a, 1 rank on b", {"hosts": "a:2,b:2", "ranks": 3}),
        ("failed: 5 ranks don't fit*-n 4", {"hosts": "a:2,b:2", "ranks": 5}),
    ],
    "hosts_python": [("failed: *doesn't run: it said so*rsync", answering(status=1))],
    "script": [
        ("skipped: no script", of_b()),
        (
            "failed: b: /x.py can't be read: gone*rsync",
            answering(**{"no script": "gone"}),
        ),
    ],
    "hosts_start": [
        (
            "failed: the ranks started elsewhere: 2 ranks on a; wanted: 1 rank on a*HYDRA_",
            on_hosts(steps(), steps()),
        ),
        (
            "failed: no rank began on b; *status 1: oh no*ssh b mpiexec",
            on_hosts(steps(), status=1, err="oh no"),
        ),
        ("failed: *on a within 30 s; if*ssh a", on_hosts(status=None)),
    ],
    "hosts_packages": [
        ("failed: b: *chainermn is missing*rsync", of_b(packages={})),
    ],
    "hosts_memory": [
        (
            "failed: b: *allows 200 MiB; ranks need 256*sbatch --mem=256M",
            of_b(memory={"cgroup_bytes": 200 * MIB}),
        ),
    ],
    "hosts_shared_memory": [
        ("warning: b: 25 MiB of 64*ssh b ls", of_b(shared_memory=shm(25, 64))),
        (
            "failed: b: *ssh b",
            on_hosts(
                steps(host="a", shared_memory=shm(25, 64)),
                steps(host="b", shared_memory=shm(1, 8)),
            ),
        ),
    ],
    "hosts_communicators": [
        ("failed: end: 1 of 2*report it", ended("end", err="oh", status=1)),
    ],
    "srun_ranks": [
        (
            "warning: MPICH over UCX sends more*ofi",
            {**on_hosts(status=None, err="mpi/pmi2: too long"), **SLURM},
        ),
    ],
}


@pytest.mark.parametrize(
    ("names", "expected", "planted"),
    [(names, *one) for names, rows in TABLE.items() for one in rows],
)
def test_a_fault_has_its_row(machine, names, expected, planted):
    for name in names.split():
        found = row(machine.look(name, **planted))
        assert fnmatchcase(found, f"{expected}*"), found
        assert (" fix: " in found) == expected.startswith(("failed", "warning"))


def test_every_check_has_its_faults():
    # Each check has a row of TABLE, or is named here and has a test below.
    elsewhere = {"python", "import_chainer", "ssh"}
    named = {name for names in TABLE for name in names.split()}
    assert elsewhere | named == {name for names in STAGES.values() for name in names}


@pytest.mark.parametrize(
    ("expected", "name", "value"),
    [
        ("failed: *on Darwin", "platform.system", lambda: "Darwin"),
        ("failed: PyPy", "platform.python_implementation", lambda: "PyPy"),
        ("warning: *free-threaded", "sysconfig.get_config_var", lambda _: "1"),
        ("failed: ", "sys.version_info", (3, 10)),
        ("warning: *newer", "sys.version_info", (3, 16)),
    ],
)
def test_pythons_that_are_not_supported(machine, expected, name, value):
    machine.patch.setattr(name, value)
    assert fnmatchcase(row(machine.look("python")), f"{expected}*fix: use CPython*")


def test_what_is_missing_of_requirements_is_named(machine):
    def distribution(version, *requires):
        return SimpleNamespace(metadata={"Version": version}, requires=requires)

    found = {
        "chainermn": distribution("2.0", "numpy>=2", "chainermn-comm", "(no sense"),
        "numpy": distribution("1.26", "gone; python_version < '3'", "x; extra == 'a'"),
    }
    machine.patch.setattr(software.environment, "distributions", lambda: found)
    missing = software.unsatisfied_requirements()
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


# Logins


def plant_ssh(machine, program: str) -> None:
    """Plant a program in place of ssh, whose last words are host and command."""
    ssh = write_program(machine.folder / "ssh", program)
    machine.plant(HYDRA_LAUNCHER_EXEC=str(ssh))


def ask(machine, program: str, hosts: str = "b", **more: Any) -> dict[str, Login]:
    """What logins give by a program in place of ssh."""
    plant_ssh(machine, program)
    return logins.ask_all(machine.context(hosts, **more))


# What OpenSSH says, with -v; tests/cluster has what it says of hosts that it can't reach.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("me@b: Permission denied (publickey).", "*[!)] fix: ssh-copy-id"),
        ("Authenticated to b ([10.0.0.2]:22).", "the login succeeds*fix: ssh b true"),
        ("debug1: Connecting to b port 22.", "ssh gets no answer*fix: ssh -v b true"),
        ("unheard of", "ssh fails: unheard of fix: ssh -v b true"),
    ],
)
def test_what_ssh_says_is_told_apart(machine, text, expected):
    banner = "OpenSSH_9.2p1 Debian-2, OpenSSL 3.0\ndebug1: Reading x"
    (machine.folder / "said").write_text(f"{banner}\n{text}\n")
    plant_ssh(machine, f"cat {machine.folder}/said >&2; exit 255")
    found = row(machine.look("ssh", hosts="b"))
    assert fnmatchcase(found, f"failed: b: {expected}*"), found
    assert "debug1" not in found
    assert "OpenSSH_" not in found


SHELL = 'while [ $# -gt 1 ]; do shift; done; cd / && exec sh -c "$1"'


def test_a_host_says_what_it_has_whatever_its_start_up_files_print(machine):
    script = machine.folder / "it's $(touch trap);.py"
    script.write_text("print()")
    talk = "echo Welcome!; echo 'permission denied' >&2"
    found = ask(machine, f"{talk}; {SHELL}", script=str(script))
    assert found["b"].answer == found[logins.THIS_MACHINE].answer
    assert len(found["b"].answer["script"]) == 64


def test_a_python_that_does_not_run_gives_its_status(machine):
    machine.patch.setattr(sys, "executable", "/bin/false")
    assert ask(machine, SHELL)["b"].answer == {"status": 1}


def test_a_host_that_hangs_holds_up_no_other(machine):
    machine.patch.setattr(logins, "SHARE", 0.05)
    found = ask(machine, f"case $* in *' b '*) sleep 600;; esac; {SHELL}", hosts="b,c")
    assert [bool(found[host].answer) for host in "bc"] == [False, True]
    assert found["b"].problem == "ssh gets no answer in time"


def test_without_ssh_the_remedy_is_named_and_this_machine_asked_without_it(machine):
    machine.plant(HYDRA_LAUNCHER_EXEC="/nowhere/ssh")
    found = row(machine.look("ssh", hosts=f"b,localhost,127.0.0.1,{platform.node()}"))
    assert found.startswith("failed: b: there is no /nowhere/ssh on PATH fix: sudo apt")
    assert "; " not in found


# How checks are run


def test_checks_that_need_a_failed_one_are_skipped_for_it_and_one_that_raises_fails(
    machine,
):
    def check(name, result, *needs):
        return Check(name, "?", lambda _: result, needs)

    def crash(_):
        raise ValueError("oh\x1b[2J")

    checks = (
        check("good", ok("it is")),
        check("bad", failed("no", "try")),
        check("after", ok("it is"), "good", "bad"),
        check("last", ok("it is"), "after"),
        Check("crash", "?", crash),
        check("none", skipped("nothing")),
        check("free", ok("it is"), "none"),
    )
    results = list(run_checks([Stage("x", "", checks)], machine.context()))
    found = {one.name: row(one) for one in results}
    assert list(found) == [one.name for one in checks]
    assert found["after"] == found["last"] == "skipped: 'bad' failed"
    assert results[3].blocked_by == "bad"
    assert "ValueError: oh [2J fix: this is a mistake of the doctor" in found["crash"]
    assert found["free"] == "ok: it is"


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
