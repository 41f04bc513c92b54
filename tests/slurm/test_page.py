"""The scripts of the manual's page on clusters, run as they stand there, on the example."""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs.blocks import blocks
from tests.support.hosts.slurm import PMI
from tests.support.jobs.examples import MNIST

pytestmark = pytest.mark.full
SCRIPTS = [one.text for one in blocks("docs/clusters.md") if "run by" in one.note]


@pytest.mark.parametrize("text", SCRIPTS, ids=["launch", "requeue", "array"])
def test_a_script_of_the_page_runs(slurm, text):
    here = text.replace("/path/.venv", sys.prefix).replace(
        "train.py", f"{MNIST} --epoch 3"
    )
    # No partition here gives a day.
    here = here.replace("--mpi=pmi2", f"--mpi={PMI}").replace(
        "--time=24:00", "--time=00:30"
    )
    here = here.removeprefix("#!/bin/bash\n")
    words = [
        word
        for line in re.findall(r"^#SBATCH (.*)$", here, re.M)
        for word in line.split()
    ]
    job = slurm.submit(here, *words)
    assert job.wait() == "COMPLETED", job.output()
    assert set(job.states()) == {"COMPLETED"}
    accuracies = re.findall(r"validation accuracy (\S+);", job.output())
    assert len(accuracies) == (3 if "--array" in text else 1), job.output()
    for one in accuracies:
        assert float(one) > 0.5
