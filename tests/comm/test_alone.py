"""A rank that is alone in its MPI, or has none, says so and names the way out."""

import subprocess
import sys

import pytest

from tests.support.hosts.slurm import PMI
from tests.support.jobs import runner

CREATE = (
    "import os, sys\n"
    "if 'task' in sys.argv: os.environ['SLURM_TASK_PID'] = str(os.getpid())\n"
    "import chainermn_comm\n"
    "given = None\n"
    "if 'self' in sys.argv:\n"
    "    from mpi4py import MPI\n"
    "    given = MPI.COMM_SELF\n"
    "print(chainermn_comm.create_communicator('naive', given).size)\n"
)
# What `srun --mpi=none`, and `mpiexec` of another MPI, give to a process. Foreign to
# either MPI is MVAPICH's; the MPI that runs here would take its own variables for a
# launcher's.
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
# What is more in a shell of `srun --pty`, whose process is the task.
SHELL = {**SLURM, "SLURM_PTY_PORT": "40000", "SLURM_TASK_PID": "1"}
FOREIGN = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}


def create(environment, *words, script=CREATE):
    """Create a communicator in a process that a shell starts: its parent is no rank."""
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", script, *words]
    variables = runner.variables(environment)
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("environment", "words", "who"),
    [
        (SLURM, [], "as rank 1 of 4"),
        (SHELL, ["task"], "as rank 1 of 4"),  # a task of srun itself
        (FOREIGN, [], "as rank 0 of 2"),
    ],
)
def test_it_raises_and_names_the_way_out(environment, words, who):
    done = create(environment, *words)
    assert done.returncode == 1
    assert "RuntimeError: a launcher started this " + who in done.stderr
    assert f"or srun --mpi={PMI};" in done.stderr
    assert "chainermn doctor" in done.stderr


def test_it_only_warns_where_the_user_wants_that():
    done = create({**SLURM, "CHAINERMN_ALLOW_ALONE": "1"})
    assert done.returncode == 0
    assert done.stdout == "1\n"
    assert "UserWarning: a launcher started this as rank 1 of 4" in done.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (SLURM, ["self"]),  # on purpose
        (SHELL, []),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, []),  # as in a batch script
        # As salloc leaves it.
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, []),
        ({}, []),
    ],
)
def test_one_process_that_was_meant_to_be_alone_is(environment, words):
    done = create(environment, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n", done.stderr
    assert "launcher" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 1), ({"CHAINERMN_ALLOW_ALONE": "1"}, 0), ({"PMI_RANK": "0"}, 0)],
)
def test_a_process_without_a_launcher_says_once_that_it_is_the_only_rank(
    environment, count
):
    done = create(environment, script=CREATE + CREATE)
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr
    assert done.stderr.count("is the only rank, since no mpiexec started it") == count


def test_without_an_mpi_library_the_ways_to_get_one_are_named():
    done = create({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert done.returncode == 1
    assert "RuntimeError: no MPI library can be loaded: pip install" in done.stderr
    assert "module load" in done.stderr


STARTS = """\
import os, subprocess, sys
from mpi4py import MPI
done = subprocess.run([sys.executable, "-c", sys.argv[1]], timeout=60, check=True)
"""


def test_a_program_that_a_rank_starts_is_meant_to_be_alone():
    """It inherits the launcher's variables, here Slurm's."""
    done = create(SLURM, CREATE, script=STARTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n", done.stderr
