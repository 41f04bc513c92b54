"""The job that the doctor starts on this machine: its ranks take one step after another.

    python rank_job.py FOLDER RANKS SECONDS

runs a rank. It logs its steps in FOLDER/<process>, as lines of JSON, so that what was found stays
however the rank ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainermn_tools import jobs
from chainermn_tools.doctor.check import CheckResult, Context, failed, skipped
from chainermn_tools.doctor.hints import REPORT_IT, hint_for_output, most_telling_line
from chainermn_tools.doctor.mpi import find_launcher

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# As few as can find one another.
DEFAULT_RANKS = 2
# Ranks stay on this machine even where a scheduler granted others: Hydra, Intel's, Open MPI 5, 4.
HERE = "localhost"
STAY_HERE = {
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
    "PRTE_MCA_ras": "^slurm",
    "PRTE_MCA_plm": "ssh",
    "OMPI_MCA_ras": "^slurm",
    "OMPI_MCA_plm": "rsh",
}
# Ranks of Open MPI that wait leave the core to others, without which few cores are far slower.
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# A rank that nobody ends any more ends itself so much later than it should have been.
SPARE_SECONDS = 10

# What each rank does, by the name of the check that judges it. The check's file adds it, in the
# order in which the steps are taken: what may crash a rank comes late.
STEPS: dict[str, Callable[[MPI.Intracomm], dict[str, Any]]] = {}


@dataclass(frozen=True)
class RankJob:
    """What became of the ranks.

    Attributes:
        ranks: how many should have been started.
        timeout: how many seconds they had.
        completed: how mpiexec ended.
        logs: of each process that began: for each step what it found, None if it didn't finish.
    """

    ranks: int
    timeout: float
    completed: jobs.CompletedProcess
    logs: tuple[dict[str, dict[str, Any] | None], ...]

    @property
    def output(self) -> str:
        """All that mpiexec and the ranks printed."""
        return f"{self.completed.stdout}\n{self.completed.stderr}"

    def found(self, step: str) -> list[dict[str, Any]]:
        """Return what each process found in a step, of those that finished it."""
        return [found for log in self.logs if (found := log.get(step)) is not None]

    def failure_at(self, step: str) -> CheckResult | None:
        """Return why there is nothing to judge of a step; None when all ranks finished it."""
        stopped = next((one for one in STEPS if len(self.found(one)) < self.ranks), step)
        order = list(STEPS)
        if order.index(stopped) < order.index(step):
            message = f"the ranks came no further than {stopped!r}"
            return skipped(message, blocked_by=stopped)
        finished = len(self.found(step))
        if finished == self.ranks:
            return None
        where = f"{finished} of {self.ranks} ranks came through it"
        if self.completed.returncode is not None:
            return failed(
                f"{where}; then the job ended with status {self.completed.returncode}: "
                f"{most_telling_line(self.output)}",
                hint_for_output(self.output, f"this should not be; {REPORT_IT}"),
            )
        if reason := overload_reason(self.ranks):
            return failed(
                f"it hangs, or {reason}: {where} within {self.timeout:.0f} s",
                "give it more time with --timeout; else wait until others are done, or take fewer "
                "ranks",
            )
        return failed(
            f"it hangs: {where} within {self.timeout:.0f} s",
            "MPI's messages get stuck; try another way for them: export UCX_TLS=tcp,self (MPICH), "
            "or OMPI_MCA_pml=ob1 (Open MPI)",
        )


def run_job(context: Context) -> RankJob:
    """Run the job; for ``context.cached``.

    Raises:
        Unavailable: mpiexec can't be started.
    """
    launcher = context.cached(find_launcher)
    ranks = ranks_to_start(context)
    timeout = context.remaining()
    threads = jobs.threads_per_rank(ranks)
    env = {**YIELDING, **os.environ, **STAY_HERE}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="chainermn-doctor-") as folder:
        args = jobs.mpiexec_command(
            launcher,
            ranks,
            jobs.rank_command(__file__, folder, str(ranks), f"{timeout:.0f}"),
            hosts=None if launcher["vendor"] is None else {HERE: ranks},
            threads=threads,
            variables=env,
        )
        completed = jobs.run(args, timeout, env=env)
        files = sorted(Path(folder).iterdir())
        logs = tuple(_parse_log(file.read_text().splitlines()) for file in files)
    return RankJob(ranks, timeout, completed, logs)


def ranks_to_start(context: Context) -> int:
    """Return as many as the user wants; where hosts are to run them, as can meet and have cores."""
    wanted = context.max_ranks_per_host()
    if wanted is None:
        return DEFAULT_RANKS
    usable: int = jobs.available_cores()["usable"]
    return max(DEFAULT_RANKS, min(wanted, usable)) if context.hosts else wanted


def overload_reason(ranks: int) -> str:
    """Return why so many ranks may just be slow on this machine; empty if they may not."""
    usable = jobs.available_cores()["usable"]
    if ranks > usable:
        return f"{ranks} ranks are too many for {usable} cores"
    if os.getloadavg()[0] > usable:
        return f"there is more to do than {usable} cores can"
    return ""


def _parse_log(lines: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return a rank's log; a line that was cut off when it was killed doesn't count."""
    log: dict[str, dict[str, Any] | None] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        log[record["step"]] = record.get("found")
    return log


class StepLog:
    """The file in which a rank writes how far it is."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / str(os.getpid())).open("a")

    def write(self, **record: Any) -> None:
        """Append a record: the ``step`` and its ``state``, and what was ``found`` if it is done."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def take_steps(folder: Path, ranks: int) -> None:
    """Take all steps as one of the ranks (collective)."""
    log = StepLog(folder)
    for step, probe in STEPS.items():
        log.write(step=step, state="begun")
        from mpi4py import MPI  # starts MPI, which is the first step

        found = probe(MPI.COMM_WORLD)
        log.write(step=step, state="done", found=found)
        if found.get("size", ranks) != ranks:
            return  # whether it is alone or not, it is not what was asked for


if __name__ == "__main__":
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(int(float(sys.argv[3])) + SPARE_SECONDS)
    # The module of this name, another one than this script, has its STEPS filled by the package.
    from chainermn_tools.doctor import rank_job

    rank_job.take_steps(Path(sys.argv[1]), int(sys.argv[2]))
