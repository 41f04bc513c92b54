"""The one door to the doctor: a machine that is made up, and what a check says of it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chainermn_tools import doctor, jobs
from chainermn_tools.cli.doctor import doctor as command
from chainermn_tools.doctor import (
    CheckResult,
    Context,
    Stage,
    gpus,
    hosts,
    logins,
    rank_tests,
    ranks,
    run_checks,
    software,
)
from chainermn_tools.doctor.check import Check, failed, ok, skipped, warning
from chainermn_tools.doctor.logins import THIS_MACHINE, Login
from chainermn_tools.environment.packages import OTHER_PACKAGES, OUR_PACKAGES
from chainermn_tools.jobs import children
from tests.support.jobs import commands

__all__ = ["Check", "CheckResult", "Context", "Login", "Stage", "failed", "logins"]
__all__ += ["ok", "rank_tests", "run_checks", "skipped", "software", "warning"]

SECONDS = 60.0  # ends a hang, no more
MIB = 1 << 20
ALL = (doctor.LOCAL, doctor.RANKS, doctor.HOSTS)
CHECKS = {one.name: one for stage in ALL for one in stage.checks}
STAGES = {stage.name: [one.name for one in stage.checks] for stage in ALL}
COMMUNICATORS = ranks.COMMUNICATORS
# Variables by which a machine tells of itself, or a user of what is wanted.
TELLING = ("CHAINERMN_", "CUDA_VISIBLE", "SLURM_", "MPI4PY_RC_THREAD")
VERSIONS = dict.fromkeys((*OUR_PACKAGES, *OTHER_PACKAGES))
VERSIONS |= dict.fromkeys(OUR_PACKAGES, "2.0.0")
VERSIONS |= {"chainer": "7.8.1", "numpy": "2.4.6", "mpi4py": "4.1.2", "cupy": None}
MPI = {"vendor": "MPICH", "version": "5.0.2"}
ROOM = {"total_bytes": 512 * MIB, "free_bytes": 512 * MIB}
# What a machine says of which all is well.
FACTS = {
    "packages": VERSIONS,
    "imports": {"chainermn": "chainermn_facade", "finder": "registered"},
    "mpi": {
        "library": MPI,
        "launcher": {**MPI, "path": "/opt/mpiexec", "description": ["what it says"]},
        "mismatch": None,
    },
    "machine": {"shared_memory": ROOM, "cores": {"usable": 4, "machine": 8}},
    "gpus": {
        "driver": {"unavailable": "no nvidia-smi on PATH"},
        "cupy": {"unavailable": "CuPy is not installed"},
        "nccl": {"unavailable": "CuPy is not installed"},
    },
}
# What a host says when it is asked, and what a rank reports of it.
ANSWER = {"implementation": "CPython", "version": "3.11.7", "script": "1234"}
HOST_FACTS = {
    "packages": {name: one for name, one in VERSIONS.items() if one},
    "memory": {"cgroup_bytes": None},
    "shared_memory": ROOM,
}
STARTED = {"size": 2, "level": "multiple"}


def changed(facts: Mapping[str, Any], path: str, value) -> dict[str, Any]:
    """The facts with another value at such a path as ``mpi.launcher.vendor``."""
    found = deepcopy(dict(facts))
    *folders, name = path.split(".")
    inner = found
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return found


def job(
    *steps: Mapping[str, Any],
    hosts: Sequence[str] = ("a", "b"),
    status: int | None = 0,
    err: str = "",
) -> ranks.RankJob:
    """What becomes of ranks, one on each host, that report these steps; None for a hang."""
    events = [
        jobs.Event(rank, "doctor", {"step": step, "result": result})
        for rank, reported in enumerate(steps)
        for step, result in reported.items()
    ]
    output = jobs.JobOutput(status or 1, events=events, tail=err.encode())
    output.timed_out = status is None
    output.status = status or 0
    return ranks.RankJob(dict.fromkeys(hosts, 1), 30.0, output)


def steps(
    end: str = "", last: Mapping[str, Any] | None = None, host: str = "a", **facts
) -> dict[str, Any]:
    """What a rank reports to whom nothing happens until a step, which gives something else."""
    names = [*COMMUNICATORS, *map(ranks.on_gpus, COMMUNICATORS)]
    found = {
        "facts": {"host": host, **HOST_FACTS, **facts},
        "start": STARTED,
        "meet": {},
        "messages": {"problem": None},
        **{name: {"problem": None} for name in names},
        "end": {},
    }
    if not end:
        return found
    order = list(found)
    kept = {name: found[name] for name in order[: order.index(end)]}
    if last is None:
        return kept
    return {**found, end: last}


def let_programs_start(monkeypatch: pytest.MonkeyPatch):
    """Start programs as usual; afterwards too, even if a command ends in between."""
    monkeypatch.setattr(children, "_closed", False)


class Machine:
    """A machine as the doctor finds it, where faults are planted."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path):
        self.patch = patch
        self.folder = folder
        self.facts = FACTS
        for name in os.environ:
            if name.startswith(TELLING) or name.endswith("_NUM_THREADS"):
                patch.delenv(name)
        patch.setattr(gpus, "device_files", list)

    def look(self, name: str, **planted) -> CheckResult:
        """What the check of a name finds, whatever others would; see `plant`."""
        asked = {
            key: planted.pop(key)
            for key in ("ranks", "hosts", "script")
            if key in planted
        }
        self.plant(**planted)
        check = dataclasses.replace(CHECKS[name], needs=())
        stage = Stage("", "", (check,))
        (found,) = run_checks([stage], self.context(**asked))
        return found

    def context(self, hosts: str = "", **asked) -> Context:
        named = ()
        if hosts:
            named = jobs.parse_host_list(hosts)
        context = Context(time.monotonic() + SECONDS, hosts=named, **asked)
        context.facts = self.facts
        return context

    def plant(
        self,
        job: ranks.RankJob | None = None,
        logins: Mapping[str, Login] | None = None,
        gpus: Sequence[str] | None = None,
        facts: Mapping[str, Any] | None = None,
        programs: Mapping[str, str] | None = None,
        **variables: str,
    ):
        """Plant what became of ranks, what hosts say, files of GPUs, facts, programs, variables."""
        if job is not None:
            for module in (ranks, hosts):
                self.patch.setattr(module, "run_ranks", lambda *_: job)
        if logins is not None:
            found = {THIS_MACHINE: Login(answer=ANSWER), **logins}
            self.patch.setattr(hosts, "ask_all", lambda _: found)
        if gpus is not None:
            self.patch.setattr(doctor.gpus, "device_files", lambda: list(gpus))
        for path, value in (facts or {}).items():
            self.facts = changed(self.facts, path, value)
        for name, script in (programs or {}).items():
            write_program(self.folder / "bin" / name, script)
            variables["PATH"] = f"{self.folder}/bin:{os.environ['PATH']}"
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def command(self, *arguments, **planted: CheckResult) -> Result:
        """`chainermn doctor` in this process; each check finds all well, or what is planted."""
        with self.patch.context() as patch:
            for name in ("LOCAL", "RANKS", "HOSTS"):
                patch.setattr(doctor, name, content(getattr(doctor, name), planted))
            patch.setattr(Context, "facts", FACTS)
            let_programs_start(patch)
            return CliRunner().invoke(command, list(map(str, arguments)))


def write_program(path: Path, script: str) -> Path:
    """Make a shell script a program."""
    return commands.program(path, f"#!/bin/sh\n{script}\n")


def content(stage: Stage, results: Mapping[str, CheckResult] = {}) -> Stage:
    """The stage, whose checks find all well or, by their names, something else."""
    checks = [
        dataclasses.replace(one, run=_gives(results.get(one.name, ok("it is"))))
        for one in stage.checks
    ]
    return dataclasses.replace(stage, checks=tuple(checks))


def _gives(result: CheckResult) -> Callable[[Context], CheckResult]:
    return lambda _: result
