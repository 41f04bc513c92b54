"""The scripts of the manual's page on clusters, run as they stand there, on the example."""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs.blocks import blocks
from tests.support.examples import MNIST
from tests.support.slurm import PMI

pytestmark = pytest.mark.full
SCRIPTS = [one.text for one in blocks("docs/clusters.md") if "#SBATCH" in one.text]


@pytest.mark.parametrize("text", SCRIPTS, ids=["launch", "requeue", "array"])
def test_a_script_of_the_page_runs(slurm, text):
    options = re.findall(r"^#SBATCH (.*)$", text, re.M)
    here = text.replace("/path/.venv", sys.prefix).replace("train.py", f"{MNIST} --epoch 3")
    here = here.replace("--mpi=pmi2", f"--mpi={PMI}")
    # One may not ask for more time than the partition gives; the nodes have two cores.
    words = [word for line in options for word in line.split() if "--time=24" not in word]
    job = slurm.submit(here.removeprefix("#!/bin/bash\n"), *words)
    assert job.wait() == "COMPLETED", job.output()
    assert set(job.states()) == {"COMPLETED"}
    accuracies = re.findall(r"validation accuracy (\S+);", job.output())
    assert len(accuracies) == (3 if "--array" in text else 1), job.output()
    assert all(float(one) > 0.5 for one in accuracies)
