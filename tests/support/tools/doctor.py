"""The one door to the doctor: a machine that is made up, and what the check of a name says of it.

A fact is planted as the system would tell it where that is quick: by programs on PATH,
variables and installed packages. What must be replaced inside the doctor is replaced
here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chainermn_tools import doctor, environment, jobs, threads
from chainermn_tools.cli.doctor import doctor as command
from chainermn_tools.doctor import (
    CheckResult,
    Context,
    Stage,
    gpus,
    machine,
    placement,
    software,
)
from chainermn_tools.doctor.check import Check, failed, ok, skipped, warning
from chainermn_tools.doctor.cluster import agent, session, ssh
from chainermn_tools.doctor.cluster import facts as cluster
from chainermn_tools.doctor.ranks import checks as ranks
from chainermn_tools.doctor.ranks import job as rank_job
from chainermn_tools.environment import packages, probe
from chainermn_tools.jobs import Host, parse_host_list, tags
from tests.support.jobs import commands

__all__ = ["Check", "CheckResult", "Context", "failed", "ok", "skipped", "warning"]

SECONDS = 60.0  # ends a hang, no more
MIB = 1 << 20
ALL = (doctor.LOCAL, doctor.RANKS, doctor.CLUSTER)
CHECKS = {one.name: one for stage in ALL for one in stage.checks}
QUESTIONS = [(one.name, one.question) for one in CHECKS.values()]
STAGES = {stage.name: [one.name for one in stage.checks] for stage in ALL}
COMMUNICATORS, STEPS = ranks.COMMUNICATORS, tuple(rank_job.STEPS)
Unavailable, call_in_subprocess = jobs.Unavailable, environment.call_in_subprocess
MAX_LOGINS, partners = cluster.MAX_LOGINS, cluster.partners
# What the user may ask for, as `Context` has it.
ASKED = {"ranks", "hosts", "hostfile", "script"}
# Variables by which a machine tells of itself, or a user of what is wanted.
TELLING = ("CHAINERMN_", "CUDA_VISIBLE", "IBV_", "MV2_", "RDMAV_", "SLURM_")
TELLING += ("HYDRA_", "OMPI_MCA_plm", "PRTE_MCA_plm", "MPI4PY_RC_THREAD")
# This machine, for the hosts that connect to it.
HERE = cluster.THIS_MACHINE
HYDRA = "HYDRA build details:\n    Version: 5.0.2\n"
# What a host says of which all is well.
FACTS: dict[str, Any] = {
    "python": {"version": "3.11.7", "implementation": "CPython"},
    "packages": {"numpy": "2.4.6", "chainermn-comm": "2.0.0"},
    "mpiexec": {"same path": {"path": "/opt/bin/mpiexec", "text": HYDRA}},
    "variables": {"PATH": "/bin"},
    "script": {"there": True, "digest": "1234"},
    "shm": {"total_bytes": 512 * MIB, "free_bytes": 512 * MIB},
    "memory": None,
    "port": 40_000,
}


# Reads its code, Python's path, the program and its order; then whom to connect to.
MANY = """while [ $# -gt 2 ]; do shift; done
for line in code python program order; do IFS= read -r $line; done
printf '\\n%s' {mark}; printf '%s\\n' {facts} | sed "s/NAME/$1/g"
IFS= read -r order; printf '\\n%s' {mark}
printf '%s\\n' "$order" |
    sed -E 's/.*"connect": (.*), "seconds".*/\\1/; s/\\[[^]]*\\]/{{"seconds": 0.0001}}/g'
cat
"""


class Machine:
    """A machine as the doctor finds it: this one, but for what is planted.

    Attributes:
        folder: its ``bin`` comes first on PATH once a program is there.
        started: the words of each job whose ranks are made up.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.started: list[list[str]] = []
        self._patch = patch
        self._facts: dict[Any, Callable[..., Any]] = {}
        self._hosts: Sequence[str] = ()
        for name in os.environ:
            if name.startswith(TELLING) or name.endswith("_NUM_THREADS"):
                patch.delenv(name)

    # What it is asked

    def look(self, name: str, **given: Any) -> CheckResult:
        """What the check of a name finds; see `ask`."""
        return self.ask(name, **given)[name]

    def ask(
        self, *names: str, seconds: float = SECONDS, **given: Any
    ) -> dict[str, CheckResult]:
        """What checks of these names find, side by side and whatever others would.

        `given` are ranks, hosts, hostfile and script as a user names them, and what
        `plant` takes.
        """
        asked = {name: given.pop(name) for name in ASKED & given.keys()}
        self.plant(**given)
        checks = tuple(dataclasses.replace(CHECKS[name], needs=()) for name in names)
        found = doctor.run_checks(
            [Stage("", "", checks, 1.0)], self.context(seconds, **asked)
        )
        return {one.name: one for one in found}

    def hostfile(self, text: str, vendor: str | None) -> CheckResult:
        """What the check of hostfiles finds in one, for mpiexec of this vendor."""
        path = self.folder / "hosts"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return self.look("hostfile", hostfile=str(path), mpi=vendor)

    def live(self) -> dict[str, CheckResult]:
        """What all checks of ranks on this machine find, where those before them are content."""
        found = doctor.run_checks([content(doctor.LOCAL), doctor.RANKS], self.context())
        return {one.name: one for one in found if one.stage == "live"}

    def command(self, *arguments: object, **planted: CheckResult) -> Result:
        """`chainermn doctor` in this process; each check finds all well, or what is planted."""
        answers = {
            name if name in CHECKS else name.replace("_", " "): answer
            for name, answer in planted.items()
        }
        if unknown := answers.keys() - CHECKS.keys():
            raise KeyError(f"no such checks: {unknown}")
        with self._patch.context() as patch:
            for name in ("LOCAL", "RANKS", "CLUSTER"):
                patch.setattr(doctor, name, content(getattr(doctor, name), answers))
            patch.setattr(tags, "_closed", False)  # and again afterwards
            return CliRunner().invoke(command, list(map(str, arguments)))

    def context(
        self,
        seconds: float = SECONDS,
        hosts: str | Sequence[str] | None = None,
        **asked: Any,
    ) -> Context:
        """What checks are given, for so many seconds."""
        hosts = self._hosts if hosts is None else hosts
        named = (
            parse_host_list(hosts)
            if isinstance(hosts, str)
            else [Host(one, None) for one in hosts]
        )
        deadline = time.monotonic() + seconds
        return Context(
            deadline,
            hosts=tuple(named),
            cache={fact: _outcome(give) for fact, give in self._facts.items()},
            **asked,
        )

    def time_of(self, part: str, timeout: float) -> float:
        """The seconds that a part of the doctor's work gets."""
        context = self.context(timeout)
        times = {
            "answers": cluster.ANSWER_TIME,
            "versions": cluster.VERSION_TIME,
            "logins": cluster.LOGIN_TIME,
            "connections": cluster.CONNECTIONS_TIME,
            "job": placement.JOB_TIME,
        }
        return (
            context.time_for(*times[part])
            if part in times
            else context.program_timeout()
        )

    # What is planted as the system would tell it

    def plant(self, **planted: Any) -> None:
        """Call methods of these names with a mapping's items, a tuple's, or one value.

        All other names are those of variables, of which None unsets one.
        """
        for name, value in planted.items():
            if isinstance(value, dict):
                getattr(self, name)(**value)
            elif hasattr(self, name):
                getattr(self, name)(*(value if isinstance(value, tuple) else (value,)))
            elif value is None:
                self._patch.delenv(name, raising=False)
            else:
                self._patch.setenv(name, value)

    def returns(self, **values: Any) -> None:
        """Let functions, named as in ``os.statvfs``, return values or raise them."""
        for name, value in values.items():
            self._patch.setattr(name, _gives(value))

    def version(self, *numbers: int) -> None:
        """Python's."""
        self._patch.setattr(sys, "version_info", numbers)

    def program(self, name: str, script: str) -> Path:
        """A shell script as a program on PATH, before others of its name."""
        path = write_program(self.folder / "bin" / name, script)
        if str(path.parent) not in os.environ["PATH"]:
            self.plant(PATH=f"{path.parent}:{os.environ['PATH']}")
        return path

    def installed(self, **metadata: str | tuple[str, ...]) -> None:
        """The metadata of distributions, before others of these names: a version, requirements."""
        for name, said in metadata.items():
            version, *requires = (said,) if isinstance(said, str) else said
            info = self.folder / "site" / f"{name.replace('-', '_')}-0.dist-info"
            info.mkdir(parents=True)
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {one}" for one in requires]
            (info / "METADATA").write_text("\n".join([*lines, ""]), encoding="utf-8")
        self._patch.syspath_prepend(str(self.folder / "site"))

    def shared_memory(self, total: int, free: int, **files: int) -> None:
        """/dev/shm of so many MiB, with files of so many bytes."""
        self.returns(
            **{
                "os.statvfs": SimpleNamespace(
                    f_frsize=MIB, f_blocks=total, f_bavail=free
                )
            }
        )
        (self.folder / "shm").mkdir()
        for name, nbytes in files.items():
            (self.folder / "shm" / name).write_bytes(b"x" * nbytes)
        self._patch.setattr(machine, "SHM_FOLDER", self.folder / "shm")

    def cores(self, usable: int, load: float = 0.0) -> None:
        """So many cores, and so many processes that want them."""
        self._patch.setattr(threads, "tightest_cgroup", lambda: None)
        allowed = set(range(usable))
        self.returns(
            **{"os.sched_getaffinity": allowed, "os.getloadavg": (load, 0.0, 0.0)}
        )

    def gpu_files(self, *names: str) -> None:
        """What the driver shows of GPUs: files of /dev, and folders of its own below /proc."""
        dev, proc = self.folder / "dev", self.folder / "proc"
        for folder in (dev, proc):
            folder.mkdir()
        for name in names:
            ((dev if name.startswith("nvidia") else proc) / name).touch()
        self._patch.setattr(gpus, "DRIVER_FOLDERS", (dev, proc))

    # What is planted as facts, since the system tells it slowly

    def mpi(self, library: object = "MPICH", *launcher: object) -> None:
        """The vendor of mpi4py's MPI, and another of mpiexec; an exception where there is none."""
        for fact, vendor in (
            (software.find_library, library),
            (software.find_launcher, *(launcher or [library])),
        ):
            shown = {
                "standard": "4.1",
                "description": ["what it says"],
                "path": "/opt/bin/mpiexec",
            }
            known = {"vendor": vendor, "version": vendor and "5.0.2", **shown}
            self._facts[fact] = _gives(
                vendor if isinstance(vendor, Exception) else known
            )

    def packages(self, **versions: str | None) -> None:
        """The versions of distributions; all others are missing. With one of CuPy is its module."""
        known = dict.fromkeys(
            (
                *packages.OUR_PACKAGES,
                *packages.OTHER_PACKAGES,
                *packages.PACKAGE_FAMILIES,
            )
        )
        self._facts[software.installed_versions] = _gives({**known, **versions})
        if any(name.startswith("cupy-") for name in versions):
            (self.folder / "site" / "cupy").mkdir(parents=True)
            self._patch.syspath_prepend(str(self.folder / "site"))

    def children(self, **answers: Any) -> None:
        """What processes answer that import what may hang or crash, by the function's name."""
        real = environment.call_in_subprocess

        def child(function: Callable[[], Any], *more: Any) -> Any:
            name = function.__name__
            return _gives(answers[name])() if name in answers else real(function, *more)

        for module in (environment, probe):
            self._patch.setattr(module, "call_in_subprocess", child)

    # Ranks

    def mpiexec(self, script: str) -> Path:
        """A shell script in place of mpiexec, which takes options of MPICH's."""
        self.mpi()
        path = self.program("mpiexec", script)
        self._facts[software.find_launcher] = _gives(
            {**self._facts[software.find_launcher](), "path": str(path)}
        )
        return path

    def job(
        self,
        *found: Mapping[str, Any],
        said: Sequence[Mapping[str, Any]] = (),
        status: int | None = 0,
        out: str = "",
        err: str = "",
    ) -> None:
        """Make up what becomes of a job, and what it prints; its status is None if it hangs.

        Each process here reports what it found in each step, None for the one that it
        is at. Ranks on hosts report what is `said`; with `began` that they have started
        on a host.
        """
        events = [
            jobs.Event(rank, "started", {"pid": rank}) for rank in range(len(found))
        ]
        for rank, steps in enumerate(found):
            done = [(step, one) for step, one in steps.items() if one is not None]
            events += [_event(rank, step=step, result=one) for step, one in done]
        for one in said:
            started = jobs.Event(0, "started", {"host": one.get("began")})
            events.append(started if "began" in one else _event(0, **one))
        output = jobs.JobOutput(
            status or 0, status is None, None, events, stdout=out, stderr=err
        )

        def run_job(args: Sequence[str], *more: Any, **options: Any) -> jobs.JobOutput:
            self.started.append(list(args))
            return output

        self._patch.setattr(jobs, "run_job", run_job)

    def exchange(self) -> tuple[list[tuple[Any, ...]], list[str]]:
        """The pairs of hosts and the communicators that the last job was to try."""
        order = json.loads(self.started[-1][-1])
        pairs, names = order["options"]["pairs"], order["options"]["communicators"]
        return [tuple(pair) for pair in pairs], names

    # Hosts

    def replies(
        self, here: Mapping[str, Any] = {}, **said: Mapping[str, Any] | str
    ) -> None:
        """Hosts that were asked; each is as it should be but for the facts that are given.

        `reached` is what came of connecting to others. One that gives a word gave no
        answer, for a reason of this kind. This machine, `here`, may differ, too.
        """
        mine = {**FACTS, "hostname": "here", "machine": "here", **here}
        answers = {name: _reply(name, one) for name, one in said.items()}
        self._facts[cluster.gather_facts] = _gives(cluster.ClusterFacts(mine, answers))
        self._hosts = tuple(said)

    def ssh(self, script: str) -> None:
        """A program in place of ssh, its last words a host and a command; asked anew each time."""
        self.plant(HYDRA_LAUNCHER_EXEC=str(write_program(self.folder / "ssh", script)))

    def many(self) -> None:
        """Hosts in place of ssh, of any names: each gives its facts, and reaches all others."""
        told = {**FACTS, "hostname": "NAME", "machine": "NAME"}
        told["variables"] = {"SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}
        self.ssh(MANY.format(mark=agent.MARK, facts=shlex.quote(json.dumps(told))))

    def quick_here(self) -> None:
        """Let this machine's own answer take no time."""
        said = {**FACTS, "hostname": "here", "machine": "here"}
        text = shlex.quote(f"{agent.MARK}{json.dumps(said)}")
        path = write_program(self.folder / "python", f"printf '\\n%s\\n' {text}")
        self._patch.setattr(sys, "executable", str(path))


def each_row(table: Mapping[str, Sequence[tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """Tries rows of checks: status, parts of what was found and of its fix, what is planted."""
    rows = [(check, *row) for check, of_check in table.items() for row in of_check]
    names = ("check", "status", "said", "fix", "given")
    return pytest.mark.parametrize(
        names, rows, ids=[f"{row[0]}: {row[1]}" for row in rows]
    )


def write_program(path: Path, script: str) -> Path:
    """Make a shell script a program."""
    return commands.program(path, f"#!/bin/sh\n{script}\n")


def canned(
    name: str, answer: CheckResult | BaseException | None = None, *needs: str
) -> Check:
    """A check that gives this answer, or raises it; all is well without one."""
    return Check(name, f"{name}?", _gives(ok("") if answer is None else answer), needs)


def content(stage: Stage, results: Mapping[str, CheckResult] = {}) -> Stage:
    """The stage, whose checks find all well or, by their names, something else."""
    runs = {one: _gives(results.get(one.name, ok("it is"))) for one in stage.checks}
    checks = tuple(dataclasses.replace(one, run=run) for one, run in runs.items())
    return dataclasses.replace(stage, checks=checks)


def run_checks(
    *stages: Sequence[Check], seconds: float = SECONDS
) -> dict[str, CheckResult]:
    """What checks of one's own find, in stages one after another, of which each gets half."""
    made = [
        Stage(f"stage {n}", "", tuple(one), 0.5)
        for n, one in enumerate(stages, start=1)
    ]
    return {
        one.name: one
        for one in doctor.run_checks(made, Context(time.monotonic() + seconds))
    }


def said_by(shell: str, python: str, script: str, folder: str) -> dict[str, Any]:
    """What a host says that has such a login shell and Python, as sshd starts it there."""
    order = {"seconds": 60, "token": "t", "packages": [], "families": ["cupy"]}
    order |= {"mpiexec": None, "program_seconds": 5, "script": script}
    done = subprocess.run(
        [shell, "-c", session.COMMAND],
        input=session.first_input(python, order),
        capture_output=True,
        cwd=folder,
        timeout=SECONDS,
        check=False,
    )
    (answer,) = [
        line
        for line in done.stdout.split(b"\n")
        if line.startswith(agent.MARK.encode())
    ]
    said: dict[str, Any] = json.loads(answer[len(agent.MARK) :])
    return said


def _gives(value: Any) -> Callable[..., Any]:
    """A function that returns the value, or raises it."""

    def give(*_: object, **__: object) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return give


def _outcome(give: Callable[..., Any]) -> Future[Any]:
    """What a function returned or raised."""
    future: Future[Any] = Future()
    try:
        future.set_result(give())
    except Exception as error:
        future.set_exception(error)
    return future


def _event(rank: int, **fields: Any) -> jobs.Event:
    return jobs.Event(rank, rank_job.EVENT, fields)


def _reply(name: str, said: Mapping[str, Any] | str) -> cluster.HostReply:
    if isinstance(said, str):
        return cluster.HostReply(
            None, ssh.SSHFailure(said, "it fails", "try host1", "it said so")
        )
    if "no_python" in said:
        return cluster.HostReply(None, no_python=said["no_python"])
    found = {**FACTS, "hostname": name, "machine": name, **said}
    return cluster.HostReply(found, reached=found.pop("reached", {}))
