"""Ranks that srun starts on two nodes of a real Slurm."""

from __future__ import annotations

import sys

import pytest

from tests.support.hosts.slurm import EXPLAIN, PMI, SRUN, STARTS
from tests.support.jobs import runner
from tests.support.jobs.processes import soon

OTHER_PMI = {"pmi2": "pmix", "pmix": "pmi2"}[PMI]
FOUR = ("-N", 2, "-n", 4, "--overcommit")
SCRIPT = (
    runner.PRELUDE
    + runner.CHECK_GRADIENTS
    + """
import chainermn_comm
comm = chainermn_comm.create_communicator()
check_gradients(comm)
print("RANK", comm.rank, "of", comm.size, "on node", comm.inter_rank, "of", comm.inter_size)
"""
)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("slurm") / "script.py"
    path.write_text(SCRIPT)
    return path


def test_ranks_that_srun_starts_find_one_another_on_two_nodes(slurm, script):
    job = slurm.run(
        "srun", f"--mpi={PMI}", *FOUR, sys.executable, script, environment=SRUN
    )
    assert job.returncode == 0, job
    expected = [f"RANK {rank} of 4 on node {rank // 2} of 2" for rank in range(4)]
    assert sorted(job.out.splitlines()) == expected, job
    assert "mpi/pmi" not in job.err, job
    assert soon(lambda: not slurm.jobs_processes()), slurm.jobs_processes()
    assert slurm.segments() == []


@pytest.mark.full
def test_the_pmi_of_another_mpi_lets_no_rank_train_alone(slurm, script):
    """The wheel of MPICH speaks PMI 2 and no PMIx, and that of Open MPI the other way round."""
    job = slurm.run(
        "srun", f"--mpi={OTHER_PMI}", *FOUR, sys.executable, script, environment=SRUN
    )
    assert job.returncode != 0, job
    assert "RANK" not in job.out


@pytest.mark.full
def test_in_a_shell_of_several_tasks_a_process_is_alone_and_launch_starts_all(
    slurm, script
):
    """Its step holds the cores; what its shell starts is none of its tasks."""
    run = f"{sys.executable} {script}"
    does = f"{run}; srun --overlap -n 2 --mpi=none {run}; {STARTS['launch']} {script}"
    typed = (sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])")
    how = ("--mpi=none", "-N", 2, "-n", 4, "--pty", "bash", "-c")
    job = slurm.run(*typed, "srun", *how, f"{does}; true", environment=SRUN)
    lines = [line for line in job.out.splitlines() if line.startswith("RANK")]
    expected = [f"RANK {rank} of 4 on node {rank // 2} of 2" for rank in range(4)]
    assert lines[0] == "RANK 0 of 1 on node 0 of 1", job
    assert sorted(lines[1:]) == expected, job
    assert "RuntimeError: a launcher started this" in job.out, job


@pytest.mark.full
def test_a_plugin_that_slurm_lacks_is_explained_on_the_node(slurm, script, tmp_path):
    job = slurm.run("srun", "--mpi=nosuch", *FOUR, sys.executable, script)
    assert job.returncode != 0, job
    (tmp_path / "log").write_text(job.err)
    said = slurm.run(*EXPLAIN, tmp_path / "log").out
    assert said.startswith("slurm_no_such_mpi: "), said
    assert f"srun --mpi={PMI}" in said
