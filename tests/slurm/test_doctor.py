"""The doctor in a job of Slurm: each fault that is planted there is named, and nothing else."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hosts.doctor_hosts import Hosts
from tests.support.hosts.slurm import PMI, SRUN, Slurm
from tests.support.jobs import commands

pytestmark = pytest.mark.full
FOUR = ("--nodes=2", "--ntasks=4")
TIMEOUT = 150
PYTHON = Path(sys.executable)
NUMPY = Path(np.__file__).parents[1] / f"numpy-{np.__version__}.dist-info" / "METADATA"
OTHER_NUMPY = NUMPY.read_text().replace(f"Version: {np.__version__}", "Version: 1.22.4")
Planted = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class At:
    """Plants something on beta for a `with` block."""

    slurm: Slurm
    hosts: Hosts
    folder: Path  # of the script

    def hidden(self, folder: Path) -> Planted:
        return self.hosts.mounted("beta", "-t", "tmpfs", "tmpfs", folder)

    def file(self, path: Path, text: str) -> Planted:
        other = commands.program(self.hosts.folder / "beta" / path.name, text)
        return self.hosts.instead("beta", path, other)


@contextlib.contextmanager
def full_shared_memory(at: At) -> Iterator[None]:
    with at.slurm.cluster.shm("beta", "64m"):
        at.slurm.cluster.run("beta", "fallocate", "-l", "62m", "/dev/shm/left behind")
        yield


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the doctor says.

    Attributes:
        check: the name of the only one that fails or warns.
        found: a pattern of what it finds.
        fix: words of what it advises.
        plant: puts the fault there for a `with` block.
        words: more of the doctor's.
        options: more of sbatch's.
        variables: of the job.
        before: what the job does before.
    """

    check: str
    found: str
    fix: str
    plant: Callable[[At], Planted] = lambda at: contextlib.nullcontext()
    words: str = ""
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    before: str = "true"


def of_beta(planted: str) -> str:
    return f"beta: .*{planted}"


FAULTS = {
    "PMI off": Fault(
        *("srun_ranks", "each of 4 ranks is rank 0 of 1", f"SLURM_MPI_TYPE={PMI}"),
        variables=(("SLURM_MPI_TYPE", "none"),),
    ),
    "PMI of another MPI": Fault(
        *("srun_ranks", "don't end well", f"SLURM_MPI_TYPE={PMI}"),
        variables=(("SLURM_MPI_TYPE", {"pmi2": "pmix", "pmix": "pmi2"}[PMI]),),
    ),
    "no such plugin": Fault(
        *("hosts_start", "mpi/nosuch", f"SLURM_MPI_TYPE={PMI}"),
        variables=(("SLURM_MPI_TYPE", "nosuch"),),
    ),
    "another Python on a node": Fault(
        *("hosts_python", of_beta("Python"), "beta"),
        lambda at: at.file(PYTHON, '#!/bin/sh\nexec /usr/bin/python3 "$@"\n'),
    ),
    "another NumPy on a node": Fault(
        *("hosts_packages", of_beta("numpy 1.22.4"), "pip install numpy=="),
        lambda at: at.file(NUMPY, OTHER_NUMPY),
    ),
    "no shared folder": Fault(
        *("script", of_beta("train me.py can't be read"), "rsync"),
        lambda at: at.hidden(at.folder),
    ),
    "too few tasks": Fault(
        "scheduler", "grants 4 tasks.*8 ranks don't fit", "-n 8", words="-n 8"
    ),
    "hosts of nobody": Fault(
        *("scheduler", "not gamma", "alpha,beta"),
        words="--hosts alpha,gamma",
    ),
    "a node's memory limit too small": Fault(
        *("hosts_memory", of_beta("200 MiB"), "sbatch --mem="),
        lambda at: at.slurm.memory_limit("beta", 200 << 20),
    ),
    "full shared memory": Fault(
        *("hosts_shared_memory", of_beta("2 MiB of 64 MiB"), "ls -lS /dev/shm"),
        full_shared_memory,
    ),
    "a node that is gone": Fault(
        *("scheduler", "beta is down", "--exclude=beta"),
        options=("--no-kill",),
        before="touch ready; until [ -e go ]; do sleep 0.1; done",
    ),
    "an end that is near": Fault(
        "scheduler", "ends in \\d+ s", "--time", options=("--time=3",)
    ),
}


@pytest.fixture(scope="module")
def at(slurm, tmp_path_factory) -> At:
    folder = tmp_path_factory.mktemp("of ours")
    (folder / "train me.py").write_text("print()\n")
    return At(slurm, Hosts(slurm.cluster, tmp_path_factory.mktemp("doctor")), folder)


def examine(at: At, fault: Fault) -> tuple[int, dict[str, Any]]:
    """The exit status of the doctor in a job, and what isn't well, by name."""
    script = f"'{at.folder}/train me.py'"
    doctor = f"{sys.executable} -m chainermn_tools doctor --json --timeout {TIMEOUT}"
    text = f"{fault.before}\n{doctor} --script {script} {fault.words} 2> errors > found\necho $?"
    job = at.slurm.submit(
        text, *FOUR, *fault.options, environment={**SRUN, **dict(fault.variables)}
    )
    if "ready" in fault.before:
        at.slurm.lose_node_of(job, "beta")
    job.wait()
    said = (job.folder / "found").read_text()
    assert said, f"{job.output()}\n{(job.folder / 'errors').read_text()}"
    found = {one["name"]: one for one in json.loads(said)["findings"]}
    return int(job.output().split()[-1]), found


def test_all_is_well_in_a_job(at):
    status, found = examine(at, Fault("", "", ""))
    assert {name: one["found"] for name, one in found.items() if one["fix"]} == {}
    assert status == 0
    assert found["hosts_start"]["details"]["ranks"] == {"alpha": 2, "beta": 2}
    assert "all 4 ranks do" in found["srun_ranks"]["found"]
    assert found["ssh"]["found"] == "1 host answered"  # the other is this one


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_alone(at, name):
    fault = FAULTS[name]
    with fault.plant(at):
        status, found = examine(at, fault)
    assert {name: one["found"] for name, one in found.items() if one["fix"]}.keys() == {
        fault.check
    }
    finding = found[fault.check]
    assert status == {"failed": 1, "warning": 3}[finding["status"]]
    assert re.search(fault.found, finding["found"], re.DOTALL), finding
    assert "alpha:" not in finding["found"]
    assert fault.fix in finding["fix"], finding
