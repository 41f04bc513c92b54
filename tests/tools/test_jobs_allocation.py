"""The hosts that schedulers give to a job, as their variables say."""

import pytest

from chainermn_tools.jobs.allocation import Host, find_allocation
from tests.support.jobs import commands

SLURM = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}


@pytest.fixture(autouse=True)
def scontrol(tmp_path, monkeypatch):
    """A stand-in for Slurm's program, which names the nodes of one list."""
    script = (
        '#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n'
    )
    monkeypatch.setenv("PATH", commands.with_program(tmp_path, "scontrol", script))


def test_slurm_gives_its_tasks_if_their_number_was_asked_for():
    found = find_allocation(SLURM | {"SLURM_NTASKS": "10"})
    assert found == ("Slurm", (Host("n1", 4), Host("n2", 4), Host("n3", 2)))
    # Else they are what fits, such as the cores.
    hosts = (Host("n1", None), Host("n2", None), Host("n3", None))
    assert find_allocation(SLURM) == ("Slurm", hosts)


def test_other_schedulers_name_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a.lab\na.lab\nb.lab:1\n")
    hosts = (Host("a.lab", 2), Host("b.lab", 1))
    assert find_allocation({"PBS_NODEFILE": str(file)}) == ("PBS", hosts)
    assert find_allocation({"LSB_DJOB_RANKFILE": str(file)}) == ("LSF", hosts)
    assert find_allocation({"JOB_ID": "1", "PBS_NODEFILE": ""}) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_NODELIST": "n[1-"},
        SLURM | {"SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2),"},
        {"PBS_NODEFILE": "/no such file"},
    ],
)
def test_what_cannot_be_read_is_said(variables):
    with pytest.raises(ValueError, match=r"hosts can't be read: .*; give --hosts"):
        find_allocation(variables)
