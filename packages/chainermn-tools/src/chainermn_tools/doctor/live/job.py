"""Starts the ranks that try everything, ends them in time, and collects their notes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.advice import advice, telling_line
from chainermn_tools.doctor.check import Answer, Context, failed, skipped
from chainermn_tools.doctor.live import rank, steps
from chainermn_tools.jobs import available_cores

# As few as can find one another.
USUAL_RANKS = 2
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
# Ranks of Open MPI that wait leave the core to others. Without it, 4 ranks over 3 hosts of 2 busy
# cores took 56 s for what then took them 16 s.
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@dataclass(frozen=True)
class Job:
    """What became of the ranks.

    Attributes:
        ranks: how many should have been started.
        seconds: how long they had.
        ended: how mpiexec ended.
        notes: of each process that began: for each step what it found, None while it is at it.
    """

    ranks: int
    seconds: float
    ended: jobs.CompletedProcess
    notes: tuple[dict[str, dict[str, Any] | None], ...]

    @property
    def output(self) -> str:
        """All that mpiexec and the ranks printed."""
        return f"{self.ended.stdout}\n{self.ended.stderr}"

    def found(self, step: str) -> list[dict[str, Any]]:
        """What each process found in a step, of those that came through it."""
        return [found for notes in self.notes if (found := notes.get(step)) is not None]

    def stopped_at(self) -> str | None:
        """The first step that not all ranks came through; None when they came through all."""
        return next((one for one in steps.STEPS if len(self.found(one)) < self.ranks), None)


def run(context: Context) -> Job:
    """Run the job; for ``context.once``.

    Raises:
        Unavailable: mpiexec can't be started.
    """
    launcher = context.once(facts.launcher)
    ranks = ranks_to_start(context)
    seconds = context.left()
    threads = jobs.threads_per_rank(ranks)
    environment = {**YIELDING, **os.environ, **STAY_HERE}
    hosts = {} if launcher["vendor"] is None else {HERE: ranks}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="chainermn-doctor-") as folder:
        command = jobs.rank_command(rank.__file__, folder, str(ranks), f"{seconds:.0f}")
        args = jobs.mpiexec_command(
            launcher, ranks, command, hosts=hosts, threads=threads, variables=environment
        )
        ended = jobs.run(args, seconds, env=environment)
        files = sorted(Path(folder).iterdir())
        notes = tuple(_read(file.read_text().splitlines()) for file in files)
    return Job(ranks, seconds, ended, notes)


def ranks_to_start(context: Context) -> int:
    """As many as the user wants; where hosts are to run them, as can meet and have cores here."""
    wanted = context.ranks_a_host()
    if wanted is None:
        return USUAL_RANKS
    return max(USUAL_RANKS, min(wanted, available_cores()["usable"])) if context.hosts else wanted


def busy(ranks: int) -> str:
    """How it comes that so many ranks may just be slow on this machine; empty if they may not."""
    usable = available_cores()["usable"]
    if ranks > usable:
        return f"{ranks} ranks are too many for {usable} cores"
    if os.getloadavg()[0] > usable:
        return f"there is more to do than {usable} cores can"
    return ""


def come_to(step: str, job: Job) -> Answer | None:
    """Why there is nothing to judge of a step; None when all ranks came through it."""
    stopped = job.stopped_at()
    if stopped is None or steps.STEPS.index(stopped) > steps.STEPS.index(step):
        return None
    if stopped != step:
        return skipped(f"the ranks came no further than {stopped!r}", because=stopped)
    there = len(job.found(step))
    where = f"{there} of {job.ranks} ranks came through it"
    if job.ended.returncode is None:
        if busy(job.ranks):
            return failed(
                f"it hangs, or {busy(job.ranks)}: {where} within {job.seconds:.0f} s",
                "give it more time with --timeout; else wait until others are done, or take fewer "
                "ranks",
            )
        return failed(
            f"it hangs: {where} within {job.seconds:.0f} s",
            "MPI's messages get stuck; try another way for them: export UCX_TLS=tcp,self (MPICH), "
            "or OMPI_MCA_pml=ob1 (Open MPI)",
        )
    said = telling_line(job.output)
    return failed(
        f"{where}; then the job ended with status {job.ended.returncode}: {said}",
        advice(job.output, "this should not be; please report it: chainermn doctor --report"),
    )


def _read(lines: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """A rank's notes; a line that was cut off when it was killed doesn't count."""
    notes: dict[str, dict[str, Any] | None] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        notes[record["step"]] = record.get("found")
    return notes
