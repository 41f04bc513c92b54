"""The one door to the doctor: a machine that is made up, and what the check of a name says of it.

A fact is planted as the system would tell it where that is quick: by programs on PATH, variables
and installed packages. What must be replaced inside the doctor is replaced here and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chainermn_tools import doctor, program
from chainermn_tools.commands.doctor import doctor as command
from chainermn_tools.doctor import Finding, facts
from chainermn_tools.doctor.check import Answer, Check, Context, check, failed, ok, skipped, warning
from chainermn_tools.doctor.here import gpus, machine, memory
from chainermn_tools.doctor.hosts import remote, ssh
from chainermn_tools.doctor.hosts import round as questions
from chainermn_tools.doctor.live import rank, steps
from chainermn_tools.environment import machine as environment
from chainermn_tools.environment import packages, probe
from chainermn_tools.launch.hosts import Host, from_file, from_list

__all__ = ["Answer", "Check", "Finding", "check", "failed", "ok", "skipped", "warning"]

SECONDS = 60.0  # ends a hang, no more
MIB = 1 << 20
CHECKS = {one.name: one for layer in doctor.ALL for one in layer.checks}
QUESTIONS = [(one.name, one.question) for one in CHECKS.values()]
LAYERS = {layer.name: [one.name for one in layer.checks] for layer in doctor.ALL}
COMMUNICATORS, STEPS = steps.COMMUNICATORS, steps.STEPS
Unavailable, in_child = probe.Unavailable, probe.in_child
# Variables by which a machine tells of itself, or a user of what is wanted.
TELLING = ("CHAINERMN_", "CUDA_VISIBLE", "IBV_", "MV2_", "RDMAV_", "SLURM_")
TELLING += ("HYDRA_", "OMPI_MCA_plm", "PRTE_MCA_plm", "MPI4PY_RC_THREAD")
# This machine, for the hosts that connect to it.
HERE = questions.HERE
HYDRA = "HYDRA build details:\n    Version: 5.0.2\n"
SCRIPT = "/home/me/train.py"
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
        self._children: dict[str, Any] = {}
        self._hosts: tuple[Host, ...] = ()
        for name in os.environ:
            if name.startswith(TELLING) or name.endswith("_NUM_THREADS"):
                patch.delenv(name)

    # What it is asked

    def look(self, name: str, **asked: Any) -> Finding:
        """What the check of a name finds.

        `asked`: ranks, hosts (a list or as on the command line), hostfile, script, and seconds.
        """
        alone = dataclasses.replace(CHECKS[name], needs=())
        (found,) = doctor.examine([_layer("one", (alone,))], self._context(**asked))
        return found

    def layer(self, name: str, **asked: Any) -> dict[str, Finding]:
        """What all checks of a layer find, after those before it found all well."""
        number = list(LAYERS).index(name)
        before = [
            _layer(one.name, tuple(canned(other.name) for other in one.checks))
            for one in doctor.ALL[:number]
        ]
        layers = [*before, doctor.ALL[number]]
        found = doctor.examine(layers, self._context(**asked))
        return {one.name: one for one in found if one.layer == name}

    def command(self, *arguments: object, **planted: Answer) -> Result:
        """`chainermn doctor` in this process; each check finds all well, or what is planted."""
        answers = {name.replace("_", " "): answer for name, answer in planted.items()}
        assert answers.keys() <= CHECKS.keys()
        real = doctor.examine

        def examine(layers: Sequence[Any], context: Context) -> Iterator[Finding]:
            made = [
                dataclasses.replace(
                    layer,
                    checks=tuple(
                        dataclasses.replace(one, look=_gives(answers.get(one.name, ok("it is"))))
                        for one in layer.checks
                    ),
                )
                for layer in layers
            ]
            return real(made, context)

        with self._patch.context() as patch:
            patch.setattr(doctor, "examine", examine)
            patch.setattr(program, "_closed", False)  # and again afterwards
            return CliRunner().invoke(command, list(map(str, arguments)))

    def _context(self, seconds: float = SECONDS, **asked: Any) -> Context:
        hosts = asked.pop("hosts", self._hosts)
        if isinstance(hosts, str):
            hosts = from_list(hosts)
        named = tuple(one if isinstance(one, Host) else Host(one, None) for one in hosts)
        return Context(time.monotonic() + seconds, hosts=named, answers=dict(self._facts), **asked)

    # What is planted as the system would tell it

    def variables(self, **values: str | None) -> None:
        """Set variables; None unsets one."""
        for name, value in values.items():
            if value is None:
                self._patch.delenv(name, raising=False)
            else:
                self._patch.setenv(name, value)

    def program(self, name: str, script: str, alone: bool = False) -> Path:
        """A shell script as a program; `alone` on PATH but for those of the system."""
        path = self.folder / "bin" / name
        write_program(path, script)
        if alone:
            self.path(str(path.parent), "/usr/bin", "/bin")
        elif str(path.parent) not in os.environ["PATH"].split(os.pathsep):
            self.path(str(path.parent), os.environ["PATH"])
        return path

    def path(self, *folders: str) -> None:
        """Let PATH be these folders."""
        self.variables(PATH=os.pathsep.join(folders))

    def package(self, name: str, version: str, *requires: str) -> None:
        """The metadata of an installed distribution; it comes before others of this name."""
        site = self.folder / "site"
        info = site / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._first(site)

    def _first(self, site: Path) -> None:
        if str(site) not in sys.path:
            self._patch.syspath_prepend(str(site))

    def shared_memory(self, total: int, free: int, **files: int) -> None:
        """/dev/shm of so many MiB, with files of so many bytes."""
        size = SimpleNamespace(f_frsize=MIB, f_blocks=total, f_bavail=free)
        self._patch.setattr(os, "statvfs", lambda _: size)
        folder = self.folder / "shm"
        folder.mkdir(exist_ok=True)
        for name, nbytes in files.items():
            (folder / name).write_bytes(b"x" * nbytes)
        self._patch.setattr(memory, "FOLDER", folder)

    def cores(self, usable: int, load: float = 0.0) -> None:
        """So many cores, and so many processes that want them."""
        self._patch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
        self._patch.setattr(environment, "cpu_quota", lambda _: None)
        self._patch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    def ptrace_scope(self, scope: int) -> None:
        """What Yama forbids."""
        self._patch.setattr(environment, "ptrace_scope", lambda: scope)

    def forks(self, method: str, release: str, *cards: str) -> None:
        """How multiprocessing starts processes, the kernel's release, and InfiniBand cards."""
        self._patch.setattr(multiprocessing, "get_start_method", lambda _: method)
        self._patch.setattr(platform, "release", lambda: release)
        folder = self.folder / "infiniband"
        for card in cards:
            (folder / card).mkdir(parents=True)
        self._patch.setattr(machine, "INFINIBAND", folder)

    def gpu_files(self, *names: str) -> None:
        """What the driver shows of GPUs: files of /dev, and folders of its own below /proc."""
        dev, proc = self.folder / "dev", self.folder / "proc"
        for folder in (dev, proc):
            folder.mkdir(exist_ok=True)
        for name in names:
            ((dev if name.startswith("nvidia") else proc) / name).touch()
        self._patch.setattr(gpus, "DRIVER_FOLDERS", (dev, proc))

    # What is planted as facts, since the system tells it slowly

    def mpi(self, library: object = "MPICH", launcher: object = "MPICH") -> None:
        """The vendors of mpi4py's MPI and of mpiexec; an exception where there is none."""
        for fact, vendor in ((facts.library, library), (facts.launcher, launcher)):
            shown = {"standard": "4.1", "description": ["what it says"], "path": "/opt/bin/mpiexec"}
            known = {"vendor": vendor, "version": vendor and "5.0.2", **shown}
            self._facts[fact] = _gives(vendor if isinstance(vendor, Exception) else known)

    def packages(self, **versions: str | None) -> None:
        """The versions of distributions, with ``_`` for each hyphen; all others are missing.

        Where there is one of CuPy there is a module, too.
        """
        known = dict.fromkeys((*packages.OURS, *packages.OTHERS, *packages.FAMILIES))
        self._facts[facts.versions] = _gives(
            {**known, **{name.replace("_", "-"): value for name, value in versions.items()}}
        )
        if any(name.startswith("cupy_") for name in versions):
            (self.folder / "site" / "cupy").mkdir(parents=True, exist_ok=True)
            (self.folder / "site" / "cupy" / "__init__.py").touch()
            self._first(self.folder / "site")

    def children(self, **answers: Any) -> None:
        """What processes answer that import what may hang or crash, by the function's name."""
        self._children.update(answers)
        real = probe.in_child

        def child(function: Callable[[], Any], *more: Any) -> Any:
            if function.__name__ not in self._children:
                return real(function, *more)
            return _gives(self._children[function.__name__])()

        self._patch.setattr(probe, "in_child", child)

    # Ranks

    def mpiexec(self, script: str) -> Path:
        """A shell script in place of mpiexec, which takes options of MPICH's; see `mpi` first."""
        path = self.program("mpiexec", script)
        known = {**self._facts[facts.launcher](), "path": str(path)}
        self._facts[facts.launcher] = _gives(known)
        return path

    def ranks(
        self,
        *notes: Mapping[str, Any],
        said: Sequence[Mapping[str, Any]] = (),
        status: int | None = 0,
        out: str = "",
        err: str = "",
    ) -> None:
        """Make up what becomes of a job, and what it prints; its status is None if it hangs.

        Args:
            notes: of each process here: what it found in each step, None for the one that it is at.
            said: what ranks on hosts said.
        """
        real = program.run
        lines = [f"junk\n{remote.MARK}{json.dumps(one)}\n" for one in said]
        ended = program.Ended(status, "\n".join([out, *lines]), err)

        def run(words: Sequence[str], *more: Any, **options: Any) -> program.Ended:
            if os.path.basename(words[0]) != "mpiexec":
                return real(words, *more, **options)
            self.started.append(list(words))
            for number, one in enumerate(notes):
                Path(words[-3], str(number)).write_text(_noted(one))
            return ended

        self._patch.setattr(program, "run", run)

    def exchange(self) -> tuple[list[tuple[Any, ...]], list[str]]:
        """The pairs of hosts and the communicators that the last job was to try."""
        order = json.loads(self.started[-1][-1])
        return [tuple(pair) for pair in order["pairs"]], order["communicators"]

    # Hosts

    def hosts(self, *well: str, here: Mapping[str, Any] = {}, **differing: Any) -> None:
        """Hosts that were asked; `well` are those that are as they should be.

        Others differ in the facts that are given (`reached`: what came of connecting to others), or
        gave no answer for a reason of this kind; and so may this machine, `here`.
        """
        answers = {name: differing.get(name, {}) for name in dict.fromkeys((*well, *differing))}
        replies = {name: _reply(name, said) for name, said in answers.items()}
        mine = {**FACTS, "hostname": "here", "machine": "here", **here}
        self._facts[questions.ask] = _gives(questions.Round(mine, replies))
        self._hosts = tuple(Host(name, None) for name in replies)

    def ask(
        self, *hosts: str, checks: Sequence[str], script: str | None = None, **asked: Any
    ) -> dict[str, Finding]:
        """What checks find of hosts that are really asked, all of them once."""
        made = tuple(dataclasses.replace(CHECKS[name], needs=()) for name in checks)
        context = self._context(hosts=hosts, script=script, **asked)
        return {one.name: one for one in doctor.examine([_layer("hosts", made)], context)}

    def ssh(self, script: str) -> Path:
        """A program in place of ssh, its last words a host and a command; asked anew each time."""
        path = self.folder / "ssh"
        write_program(path, script)
        self.variables(HYDRA_LAUNCHER_EXEC=str(path))
        self.mpi()
        return path

    def quick_here(self) -> None:
        """Let this machine's own answer take no time."""
        said = {**FACTS, "hostname": "here", "machine": "here"}
        text = shlex.quote(f"{remote.MARK}{json.dumps(said)}")
        path = self.folder / "python"
        write_program(path, f"printf '\\n%s\\n' {text}")
        self._patch.setattr(sys, "executable", str(path))


def write_program(path: Path, script: str) -> None:
    """Make a shell script a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def canned(name: str, answer: Answer | BaseException | None = None, *needs: str) -> Check:
    """A check that gives this answer, or raises it; all is well without one."""
    return Check(name, f"{name}?", _gives(ok("") if answer is None else answer), needs)


def examine(
    *layers: Sequence[Check], seconds: float = SECONDS, share: float = 0.5
) -> dict[str, Finding]:
    """What checks of one's own find, in layers one after another, of which each gets a share."""
    made = [_layer(f"layer {n}", tuple(one), share) for n, one in enumerate(layers, start=1)]
    context = Context(time.monotonic() + seconds)
    return {one.name: one for one in doctor.examine(made, context)}


def over_hosts(
    timeout: float, hosts: str = "", hostfile: str | None = None, n: int | None = None, **asked: Any
) -> list[Finding]:
    """What the layer over hosts finds, as where nothing is wrong with this machine."""
    named: tuple[Host, ...] = from_list(hosts) if hosts else ()
    with contextlib.suppress(ValueError):
        if hostfile and not hosts:
            named = from_file(Path(hostfile).read_text(), "")
    context = Context(time.monotonic() + timeout, ranks=n, hosts=named, hostfile=hostfile, **asked)
    live = _layer("live", (canned(steps.START),), share=0.1)
    found = doctor.examine((live, doctor.HOSTS), context)
    return [one for one in found if one.layer != "live"]


def turns(*ranks: int) -> str:
    """What two ranks print in their turn."""
    return "".join(f"{rank.TURN} {one} 2 here\n" for one in ranks)


def _layer(name: str, checks: tuple[Check, ...], share: float = 1.0) -> doctor.Layer:
    return doctor.Layer(name, name, checks, share)


def _gives(value: Any) -> Callable[..., Any]:
    """A function that returns the value, or raises it."""

    def give(*_: object) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return give


def _noted(notes: Mapping[str, Any] | str) -> str:
    if isinstance(notes, str):
        return notes
    records = [{"step": step, "state": "begun"} for step in notes]
    records += [
        {"step": step, "state": "done", "found": found}
        for step, found in notes.items()
        if found is not None
    ]
    return "".join(json.dumps(record) + "\n" for record in records)


def _reply(name: str, said: Mapping[str, Any] | str) -> questions.Reply:
    if isinstance(said, str):
        return questions.Reply(None, ssh.Trouble(said, "it said so"))  # type: ignore[arg-type]
    found = {**FACTS, "hostname": name, "machine": name, **said}
    return questions.Reply(found, reached=found.pop("reached", {}))
