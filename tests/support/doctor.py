"""The one door to the doctor: a machine that is made up, and what the check of a name says of it.

A fact is planted as the system would tell it where that is quick: by programs on PATH, variables
and installed packages. What must be replaced inside the doctor is replaced here and nowhere else.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chainermn_tools import doctor, jobs
from chainermn_tools.cli.doctor import doctor as command
from chainermn_tools.doctor import Finding, Layer, facts
from chainermn_tools.doctor.check import Answer, Check, Context, check, failed, ok, skipped, warning
from chainermn_tools.doctor.here import gpus, machine, memory
from chainermn_tools.doctor.hosts import bootstrap, remote, ssh
from chainermn_tools.doctor.hosts import round as questions
from chainermn_tools.doctor.live import rank, steps
from chainermn_tools.environment import machine as environment
from chainermn_tools.environment import packages, probe
from chainermn_tools.jobs import Host, cores, parse_host_list, process
from tests.support import commands

__all__ = ["Answer", "Check", "Finding", "check", "failed", "ok", "skipped", "warning"]

SECONDS = 60.0  # ends a hang, no more
MIB = 1 << 20
ALL = (doctor.HERE, doctor.LIVE, doctor.HOSTS)
CHECKS = {one.name: one for layer in ALL for one in layer.checks}
QUESTIONS = [(one.name, one.question) for one in CHECKS.values()]
LAYERS = {layer.name: [one.name for one in layer.checks] for layer in ALL}
COMMUNICATORS, STEPS = steps.COMMUNICATORS, steps.STEPS
Unavailable, call_in_subprocess = jobs.Unavailable, probe.call_in_subprocess
# What the user may ask for, as `Context` has it.
ASKED = {"ranks", "hosts", "hostfile", "script"}
# Variables by which a machine tells of itself, or a user of what is wanted.
TELLING = ("CHAINERMN_", "CUDA_VISIBLE", "IBV_", "MV2_", "RDMAV_", "SLURM_")
TELLING += ("HYDRA_", "OMPI_MCA_plm", "PRTE_MCA_plm", "MPI4PY_RC_THREAD")
# This machine, for the hosts that connect to it.
HERE = questions.HERE
HYDRA = "HYDRA build details:\n    Version: 5.0.2\n"
# What a host says of which all is well.
FACTS: dict[str, Any] = {
    "python": {"version": "3.11.7", "implementation": "CPython"},
    "packages": {"numpy": "2.4.6", "chainermn-comm": "2.0.0"},
    "mpiexec": {"same path": {"path": "/opt/bin/mpiexec", "text": HYDRA}},
    "variables": {"PATH": "/bin"},
    "script": {"there": True, "digest": "1234"},
    "shm": {"total_bytes": 512 * MIB, "free_bytes": 512 * MIB},
    "port": 40_000,
}


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
        self._facts: dict[Any, Any] = {}
        self._hosts: Sequence[str] = ()
        for name in os.environ:
            if name.startswith(TELLING) or name.endswith("_NUM_THREADS"):
                patch.delenv(name)

    # What it is asked

    def look(self, name: str, **given: Any) -> Finding:
        """What the check of a name finds; see `ask`."""
        return self.ask(name, **given)[name]

    def ask(self, *names: str, seconds: float = SECONDS, **given: Any) -> dict[str, Finding]:
        """What checks of these names find, side by side and whatever others would.

        `given` are ranks, hosts, hostfile and script as a user names them, and what `plant` takes.
        """
        asked = {name: given.pop(name) for name in ASKED & given.keys()}
        self.plant(**given)
        checks = tuple(dataclasses.replace(CHECKS[name], needs=()) for name in names)
        found = doctor.examine([Layer("", "", checks, 1.0)], self._context(seconds, **asked))
        return {one.name: one for one in found}

    def hostfile(self, text: str, vendor: str | None) -> Finding:
        """What the check of hostfiles finds in one, for mpiexec of this vendor."""
        path = self.folder / "hosts"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return self.look("hostfile", hostfile=str(path), mpi=vendor)

    def live(self) -> dict[str, Finding]:
        """What all checks of ranks on this machine find, where those before them are content."""
        found = doctor.examine([content(doctor.HERE), doctor.LIVE], self._context())
        return {one.name: one for one in found if one.layer == "live"}

    def command(self, *arguments: object, **planted: Answer) -> Result:
        """`chainermn doctor` in this process; each check finds all well, or what is planted."""
        answers = {name.replace("_", " "): answer for name, answer in planted.items()}
        if unknown := answers.keys() - CHECKS.keys():
            raise KeyError(f"no such checks: {unknown}")
        with self._patch.context() as patch:
            for name in ("HERE", "LIVE", "HOSTS"):
                patch.setattr(doctor, name, content(getattr(doctor, name), answers))
            patch.setattr(process, "_closed", False)  # and again afterwards
            return CliRunner().invoke(command, list(map(str, arguments)))

    def _context(
        self, seconds: float = SECONDS, hosts: str | Sequence[str] | None = None, **asked: Any
    ) -> Context:
        hosts = self._hosts if hosts is None else hosts
        named = (
            parse_host_list(hosts) if isinstance(hosts, str) else [Host(one, None) for one in hosts]
        )
        deadline = time.monotonic() + seconds
        return Context(deadline, hosts=tuple(named), answers=dict(self._facts), **asked)

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
        self.returns(**{"os.statvfs": SimpleNamespace(f_frsize=MIB, f_blocks=total, f_bavail=free)})
        (self.folder / "shm").mkdir()
        for name, nbytes in files.items():
            (self.folder / "shm" / name).write_bytes(b"x" * nbytes)
        self._patch.setattr(memory, "FOLDER", self.folder / "shm")

    def cores(self, usable: int, load: float = 0.0) -> None:
        """So many cores, and so many processes that want them."""
        self._patch.setattr(cores, "cpu_quota", lambda _: None)
        allowed = set(range(usable))
        self.returns(**{"os.sched_getaffinity": allowed, "os.getloadavg": (load, 0.0, 0.0)})

    def ptrace_scope(self, scope: int) -> None:
        """What Yama forbids."""
        self._patch.setattr(environment, "ptrace_scope", lambda: scope)

    def forks(self, method: str, release: str, *cards: str) -> None:
        """How multiprocessing starts processes, the kernel's release, and InfiniBand cards."""
        self.returns(**{"multiprocessing.get_start_method": method, "platform.release": release})
        for card in cards:
            (self.folder / "infiniband" / card).mkdir(parents=True)
        self._patch.setattr(machine, "INFINIBAND", self.folder / "infiniband")

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
        for fact, vendor in ((facts.library, library), (facts.launcher, *(launcher or [library]))):
            shown = {"standard": "4.1", "description": ["what it says"], "path": "/opt/bin/mpiexec"}
            known = {"vendor": vendor, "version": vendor and "5.0.2", **shown}
            self._facts[fact] = _gives(vendor if isinstance(vendor, Exception) else known)

    def packages(self, **versions: str | None) -> None:
        """The versions of distributions; all others are missing. With one of CuPy is its module."""
        known = dict.fromkeys((*packages.OURS, *packages.OTHERS, *packages.FAMILIES))
        self._facts[facts.versions] = _gives({**known, **versions})
        if any(name.startswith("cupy-") for name in versions):
            (self.folder / "site" / "cupy").mkdir(parents=True)
            self._patch.syspath_prepend(str(self.folder / "site"))

    def children(self, **answers: Any) -> None:
        """What processes answer that import what may hang or crash, by the function's name."""
        real = probe.call_in_subprocess

        def child(function: Callable[[], Any], *more: Any) -> Any:
            name = function.__name__
            return _gives(answers[name])() if name in answers else real(function, *more)

        self._patch.setattr(probe, "call_in_subprocess", child)

    # Ranks

    def mpiexec(self, script: str) -> Path:
        """A shell script in place of mpiexec, which takes options of MPICH's."""
        self.mpi()
        path = self.program("mpiexec", script)
        self._facts[facts.launcher] = _gives({**self._facts[facts.launcher](), "path": str(path)})
        return path

    def job(
        self,
        *notes: Mapping[str, Any] | str,
        said: Sequence[Mapping[str, Any]] = (),
        status: int | None = 0,
        out: str = "",
        err: str = "",
    ) -> None:
        """Make up what becomes of a job, and what it prints; its status is None if it hangs.

        Each process here has notes: what it found in each step, None for the one that it is at.
        """
        real = jobs.run
        lines = [f"junk\n{remote.MARK}{json.dumps(one)}\n" for one in said]
        ended = jobs.CompletedProcess(status, "\n".join([out, *lines]), err)

        def run(words: Sequence[str], *more: Any, **options: Any) -> jobs.CompletedProcess:
            if os.path.basename(words[0]) != "mpiexec":
                return real(words, *more, **options)
            self.started.append(list(words))
            for number, one in enumerate(notes):
                Path(words[-3], str(number)).write_text(_noted(one))
            return ended

        self._patch.setattr(jobs, "run", run)

    def exchange(self) -> tuple[list[tuple[Any, ...]], list[str]]:
        """The pairs of hosts and the communicators that the last job was to try."""
        order = json.loads(self.started[-1][-1])
        return [tuple(pair) for pair in order["pairs"]], order["communicators"]

    # Hosts

    def replies(self, here: Mapping[str, Any] = {}, **said: Mapping[str, Any] | str) -> None:
        """Hosts that were asked; each is as it should be but for the facts that are given.

        `reached` is what came of connecting to others. One that gives a word gave no answer, for a
        reason of this kind. This machine, `here`, may differ, too.
        """
        mine = {**FACTS, "hostname": "here", "machine": "here", **here}
        answers = {name: _reply(name, one) for name, one in said.items()}
        self._facts[questions.ask] = _gives(questions.Round(mine, answers))
        self._hosts = tuple(said)

    def ssh(self, script: str) -> None:
        """A program in place of ssh, its last words a host and a command; asked anew each time."""
        self.plant(HYDRA_LAUNCHER_EXEC=str(write_program(self.folder / "ssh", script)))

    def quick_here(self) -> None:
        """Let this machine's own answer take no time."""
        said = {**FACTS, "hostname": "here", "machine": "here"}
        text = shlex.quote(f"{remote.MARK}{json.dumps(said)}")
        path = write_program(self.folder / "python", f"printf '\\n%s\\n' {text}")
        self._patch.setattr(sys, "executable", str(path))


def each_row(table: Mapping[str, Sequence[tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """Tries rows of checks: status, parts of what was found and of its fix, what is planted."""
    rows = [(check, *row) for check, of_check in table.items() for row in of_check]
    names = ("check", "status", "said", "fix", "given")
    return pytest.mark.parametrize(names, rows, ids=[f"{row[0]}: {row[1]}" for row in rows])


def write_program(path: Path, script: str) -> Path:
    """Make a shell script a program."""
    return commands.program(path, f"#!/bin/sh\n{script}\n")


def canned(name: str, answer: Answer | BaseException | None = None, *needs: str) -> Check:
    """A check that gives this answer, or raises it; all is well without one."""
    return Check(name, f"{name}?", _gives(ok("") if answer is None else answer), needs)


def content(layer: Layer, answers: Mapping[str, Answer] = {}) -> Layer:
    """The layer, whose checks find all well or, by their names, something else."""
    looks = {one: _gives(answers.get(one.name, ok("it is"))) for one in layer.checks}
    checks = tuple(dataclasses.replace(one, look=look) for one, look in looks.items())
    return dataclasses.replace(layer, checks=checks)


def examine(*layers: Sequence[Check], seconds: float = SECONDS) -> dict[str, Finding]:
    """What checks of one's own find, in layers one after another, of which each gets half."""
    made = [Layer(f"layer {n}", "", tuple(one), 0.5) for n, one in enumerate(layers, start=1)]
    return {one.name: one for one in doctor.examine(made, Context(time.monotonic() + seconds))}


def turns(*ranks: int) -> str:
    """What two ranks print in their turn."""
    return "".join(f"{rank.TURN} {one} 2 here\n" for one in ranks)


def said_by(shell: str, python: str, script: str, folder: str) -> dict[str, Any]:
    """What a host says that has such a login shell and Python, as sshd starts it there."""
    order = {"seconds": 60, "token": "t", "packages": [], "families": ["cupy"]}
    order |= {"mpiexec": None, "program_seconds": 5}
    done = subprocess.run(
        [shell, "-c", bootstrap.COMMAND],
        input=bootstrap.first_lines(python, script, order).encode(),
        capture_output=True,
        cwd=folder,
        timeout=SECONDS,
        check=False,
    )
    (answer,) = [line for line in done.stdout.split(b"\n") if line.startswith(remote.MARK.encode())]
    said: dict[str, Any] = json.loads(answer[len(remote.MARK) :])
    return said if "python" in said else bootstrap.without_python(said)


def _gives(value: Any) -> Callable[..., Any]:
    """A function that returns the value, or raises it."""

    def give(*_: object, **__: object) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return give


def _noted(notes: Mapping[str, Any] | str) -> str:
    if isinstance(notes, str):
        return notes
    records: list[dict[str, Any]] = [{"step": step, "state": "begun"} for step in notes]
    done = [(step, found) for step, found in notes.items() if found is not None]
    records += [{"step": step, "state": "done", "found": found} for step, found in done]
    return "".join(json.dumps(record) + "\n" for record in records)


def _reply(name: str, said: Mapping[str, Any] | str) -> questions.Reply:
    if isinstance(said, str):
        return questions.Reply(None, ssh.Trouble(said, "it said so"))  # type: ignore[arg-type]
    found = {**FACTS, "hostname": name, "machine": name, **said}
    return questions.Reply(found, reached=found.pop("reached", {}))
