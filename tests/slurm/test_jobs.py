"""Jobs of a real Slurm on two nodes: how they end, what they leave, and how they go on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from tests.support.hosts.slurm import STARTS
from tests.support.jobs import elastic, runner
from tests.support.jobs.examples import MNIST, log_of, train
from tests.support.jobs.processes import soon

pytestmark = pytest.mark.full
FOUR = ("--nodes=2", "--ntasks=4", "--overcommit")
ELASTIC = Path(elastic.__file__)
FOREVER = 10**6
QUICK = 300
WARNED_SECONDS = 600.0  # for two starts, on a busy machine
EITHER = pytest.mark.parametrize("start", STARTS)


def accuracy(text):
    return float(re.findall(r"validation accuracy (\S+);", text)[-1])


def elastic_words(folder, out, stop):
    words = (ELASTIC, elastic.digits(folder), out, stop, "at once", -1, 0)
    return shlex.join(map(str, words))


def assert_nothing_left(slurm):
    assert soon(lambda: not slurm.jobs_processes()), slurm.jobs_processes()
    assert soon(lambda: not slurm.segments()), slurm.segments()


def alone(epochs, out):
    """The accuracy of the example on one machine."""
    return accuracy(train(4, MNIST, "--epoch", epochs, "--out", out).out)


@EITHER
def test_the_example_ends_with_the_accuracy_of_one_machine(slurm, tmp_path, start):
    text = f"{STARTS[start]} {MNIST} --epoch 5 --out {tmp_path}"
    job = slurm.submit(text, *FOUR)
    assert job.wait() == "COMPLETED", job.output()
    assert "ranks 4, nodes 2" in job.output()
    assert accuracy(job.output()) == alone(5, tmp_path / "alone") > 0.8
    assert_nothing_left(slurm)


def test_tasks_of_an_array_do_not_meet(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        runner.PRELUDE
        + runner.CHECK_GRADIENTS
        + "import os, chainermn_comm\n"
        + "comm = chainermn_comm.create_communicator()\n"
        + "check_gradients(comm)\n"
        + 'print(comm.allgather_obj(os.environ["SLURM_ARRAY_TASK_ID"]))\n'
    )
    job = slurm.submit(f"{STARTS['srun']} {script}", *FOUR, "--array=0-2")
    assert job.wait() == "COMPLETED", job.output()
    assert set(job.states()) == {"COMPLETED"}
    each = [str([str(task)] * 4) for task in range(3) for _ in range(4)]
    assert job.output().splitlines() == each
    assert_nothing_left(slurm)


def test_a_warned_job_saves_is_requeued_and_ends_as_if_undisturbed(slurm, tmp_path):
    """Slurm looks twice a minute, and warns up to half a minute early: 60 to 90 s after the start.

    Until then the first start trains; a later one only five epochs more, in time.
    """
    out = tmp_path / "run"
    text = (
        '[ "$SLURM_RESTART_COUNT" ] && scontrol update job "$SLURM_JOB_ID" TimeLimit=20\n'
        f"epochs=$(grep -c epoch {out}/log || echo {FOREVER})\n"
        f"{STARTS['srun']} {MNIST} --epoch $((epochs + 5)) --out {out} --resume\n"
        "status=$?; echo STATUS $status\n"
        '[ $status = 75 ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60; exit $status'
    )
    job = slurm.submit(text, *FOUR, "--time=3", "--signal=USR1@90", "--requeue")
    assert job.wait(WARNED_SECONDS) == "COMPLETED", job.output()
    found = re.findall(r"^STATUS (\d+)", job.output(), re.M)
    assert found == ["75", "0"], job.output()
    assert job.output().count("; saved iteration ") == 1
    assert [path.name for path in out.rglob("*") if ".tmp" in path.name] == []
    epochs = len(log_of(out))
    # It goes on from there: the table begins with what it was, times included.
    starts = job.output().split("STATUS 75\n")
    before, after = (re.findall(r"^\d+ {2,}.*$", each, re.M) for each in starts)
    assert after[:-5] == before
    assert len(after) == epochs
    assert abs(accuracy(job.output()) - alone(epochs, tmp_path / "alone")) < 0.01
    assert_nothing_left(slurm)


@EITHER
def test_a_cancelled_job_leaves_nothing_and_no_half_checkpoint(slurm, tmp_path, start):
    """Its last checkpoint is whole: another job goes on from there."""
    out = tmp_path / "run"
    job = slurm.submit(
        f"{STARTS[start]} {elastic_words(tmp_path, out, FOREVER)}", *FOUR
    )
    job.await_output("SAVED 20\n")
    job.cancel()
    assert job.wait() == "CANCELLED"
    assert_nothing_left(slurm)
    saved = max(int(each) for each in re.findall(r"^SAVED (\d+)", job.output(), re.M))
    found = [path.name for path in out.rglob("*") if ".tmp" in path.name]
    assert found == []
    again = slurm.submit(
        f"{STARTS[start]} {elastic_words(tmp_path, out, saved + 20)}", *FOUR
    )
    assert again.wait() == "COMPLETED", again.output()
    begin = int(re.findall(r"^BEGIN (\d+)", again.output(), re.M)[0])
    assert begin >= saved, again.output()


@pytest.mark.parametrize("start", ["srun", "launch"])  # an mpiexec alone names no node
def test_a_node_that_goes_down_ends_the_job_and_is_named(slurm, tmp_path, start):
    words = elastic_words(tmp_path, tmp_path / "run", FOREVER)
    job = slurm.submit(f"{STARTS[start]} {words}", *FOUR, "--no-requeue")
    job.await_output("SAVED 20\n")
    try:
        slurm.stop_node("beta")
        assert job.wait() in ("NODE_FAIL", "FAILED"), job.output()
    finally:
        slurm.start_node("beta")
        slurm.await_nodes("idle", "alpha", "beta")
    assert "beta" in job.output(), job.output()
    assert_nothing_left(slurm)


def test_a_job_whose_node_went_down_is_requeued_and_goes_on(slurm, tmp_path):
    """And ends with the parameters of an undisturbed run in one process."""
    out = tmp_path / "run"
    words = elastic_words(tmp_path, out, QUICK)
    job = slurm.submit(f"{STARTS['srun']} {words}", *FOUR, "--requeue")
    job.await_output("SAVED 20\n")
    slurm.stop_node("beta")
    slurm.await_nodes("down*", "beta")
    slurm.start_node("beta")
    assert job.wait() == "COMPLETED", job.output()
    begins = [int(each) for each in re.findall(r"^BEGIN (\d+)", job.output(), re.M)]
    assert len(begins) == 2
    assert begins[1] >= 20
    once = runner.run(
        1, ELASTIC, elastic.digits(tmp_path), tmp_path / "one", QUICK, "at once", -1, 0
    )
    ends = [
        json.loads(re.findall(r"^END (.*)$", each, re.M)[0])
        for each in (job.output(), once.out)
    ]
    assert_allclose(ends[0][0], ends[1][0], rtol=0, atol=1e-10)
    assert_nothing_left(slurm)


def test_the_time_limit_is_named(slurm, tmp_path):
    words = elastic_words(tmp_path, tmp_path / "run", FOREVER)
    job = slurm.submit(f"{STARTS['srun']} {words}", *FOUR, "--time=1")
    assert job.wait() == "TIMEOUT", job.output()
    assert "TIME LIMIT" in job.output()
    assert_nothing_left(slurm)
