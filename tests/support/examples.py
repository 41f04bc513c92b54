"""The examples: run as a job, or by all ranks of this world; and what they leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.support.jobs import Job, run
from tests.support.scripts import ROOT, imported

EXAMPLES = ROOT / "examples"
MNIST = EXAMPLES / "mnist" / "train_mnist.py"
LAYERS = EXAMPLES / "mnist" / "train_mnist_model_parallel.py"
DUAL = EXAMPLES / "mnist" / "train_mnist_dual_parallel.py"
CONV = EXAMPLES / "parallel_convolution" / "train_parallel_convolution.py"
DATES = EXAMPLES / "seq2seq" / "train_seq2seq.py"
IMAGENET = EXAMPLES / "imagenet" / "train_imagenet.py"
SECONDS = 600.0  # ends a hang, no more


def train(ranks: int, script: Path, *arguments: object, **how: Any) -> Job:
    """A job that must succeed, without warnings."""
    job = run(ranks, script, *arguments, **{"seconds": SECONDS, **how})
    assert job.returncode == 0, job
    assert "Traceback" not in job.err
    assert "Warning" not in job.err
    return job


def train_here(script: Path, *arguments: object) -> Job:
    """Run the example's `main` on all ranks of this world, or in this process if it is alone.

    The job has what all ranks said; but for Chainer's tables and bars.
    """
    from mpi4py import MPI

    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        imported(script) as module,
        mock.patch.object(sys, "argv", [str(script)]),
        mock.patch.object(MPI, "Finalize"),  # this process goes on
        # It sets how all processes are started from now on; and none is, before there is a mistake.
        mock.patch("chainermn.iterators.use_forkserver"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            module.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code  # type: ignore[assignment]
    statuses, outs, errs = zip(
        *MPI.COMM_WORLD.allgather((status, out.getvalue(), err.getvalue())), strict=True
    )
    assert len(set(statuses)) == 1, errs
    return Job(statuses[0], "".join(outs), "".join(errs), time.time())


def reported_once(job: Job, script: Path, *words: str) -> None:
    """The job ended with status 2 and one message by the script's name, which has these words."""
    assert job.returncode == 2, job
    reported = [line for line in job.err.splitlines() if line.startswith(f"{script.name}: ")]
    assert len(reported) == 1, job
    for word in words:
        assert word in reported[0]
    assert "Traceback" not in job.err
    assert "ending the job" not in job.err  # a mistake of the user is no failure of a rank


def log_of(out: Path) -> list[dict[str, Any]]:
    """What LogReport wrote, which must not be without an entry."""
    log = json.loads((out / "log").read_text())
    assert [entry["epoch"] for entry in log] == list(range(1, len(log) + 1))
    assert log
    return log


def same_bits(actual: Path, expected: Path) -> None:
    """Assert that two snapshots have the same numbers, but for the time it took."""
    # Chainer writes None as an object.
    with np.load(actual, allow_pickle=True) as one, np.load(expected, allow_pickle=True) as other:
        assert set(one.files) == set(other.files)
        keys = [key for key in one.files if "elapsed_time" not in key]
        numbers = [key for key in keys if other[key].dtype.kind in "fiub"]
        assert numbers
        for key in numbers:
            np.testing.assert_array_equal(one[key], other[key], err_msg=f"{actual.name}: {key}")


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of each array of a saved model."""
    with np.load(path) as file:
        return {name: file[name].shape for name in file.files}
