"""The examples: run as a job, by all ranks of this world, or killed; and what they leave behind."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil  # type: ignore[import-untyped]
from numpy.testing import assert_array_equal

from tests.support.jobs.runner import Job, run
from tests.support.jobs.scripts import ROOT, imported

EXAMPLES = ROOT / "examples"
MNIST = EXAMPLES / "mnist" / "train_mnist.py"
LAYERS = EXAMPLES / "mnist" / "train_mnist_model_parallel.py"
DUAL = EXAMPLES / "mnist" / "train_mnist_dual_parallel.py"
SHARDED = EXAMPLES / "mnist" / "train_mnist_sharded.py"
CIFAR = EXAMPLES / "cifar" / "train_cifar.py"
DCGAN = EXAMPLES / "dcgan" / "train_dcgan.py"
CONV = EXAMPLES / "parallel_convolution" / "train_parallel_convolution.py"
DATES = EXAMPLES / "seq2seq" / "train_seq2seq.py"
DATES_APART = EXAMPLES / "seq2seq" / "train_seq2seq_model_parallel.py"
IMAGENET = EXAMPLES / "imagenet" / "train_imagenet.py"
SECONDS = 600.0  # ends a hang, no more


def train(ranks: int, script: Path, *arguments, **how) -> Job:
    """A job that must succeed, without warnings."""
    job = run(ranks, script, *arguments, **{"seconds": SECONDS, **how})
    assert job.returncode == 0, job
    assert "Traceback" not in job.err
    assert "Warning" not in job.err
    return job


def train_here(script: Path, *arguments) -> str:
    """Run the example's `main` on all ranks of this world, or in this process if it is alone.

    Returns:
        What all ranks printed; but for Chainer's tables.
    """
    from mpi4py import MPI

    out = io.StringIO()
    with (
        imported(script) as module,
        mock.patch.object(sys, "argv", [str(script), *map(str, arguments)]),
        redirect_stdout(out),
    ):
        module.main()
    return "".join(MPI.COMM_WORLD.allgather(out.getvalue()))


def log_of(out: Path) -> list[dict[str, Any]]:
    """What LogReport wrote, which must not be without an entry."""
    log = json.loads((out / "log").read_text())
    assert [entry["epoch"] for entry in log] == list(range(1, len(log) + 1))
    assert log
    return log


def same_bits(actual: Path, expected: Path):
    """Assert that two saved models have the same numbers, but for the time it took."""
    # Chainer writes None as an object.
    with (
        np.load(actual, allow_pickle=True) as one,
        np.load(expected, allow_pickle=True) as other,
    ):
        assert set(one.files) == set(other.files)
        keys = [key for key in one.files if "elapsed_time" not in key]
        numbers = [key for key in keys if other[key].dtype.kind in "fiub"]
        assert numbers
        for key in numbers:
            assert_array_equal(one[key], other[key], err_msg=f"{actual.name}: {key}")


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of each array of a saved model."""
    with np.load(path) as file:
        return {name: file[name].shape for name in file.files}


def kill_when(
    condition: Callable[[], object],
    script: Path,
    *arguments,
    cwd: Path,
    seconds: float,
):
    """Kill the last of two ranks as soon as the condition holds, and wait for the job's end.

    Raises:
        AssertionError: the job ended before that, or `seconds` were over.
    """
    killed: list[psutil.Process] = []

    def kill(launcher: int, _):
        if not killed and condition():
            ranks = _ranks(launcher, script)
            assert len(ranks) == 2
            ranks[-1].kill()
            killed.extend(ranks)

    job = run(2, script, *arguments, cwd=cwd, seconds=seconds, meanwhile=kill)
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert killed, job
    assert job.returncode is not None, job


def _ranks(launcher: int, script: Path) -> list[psutil.Process]:
    """The ranks under the launcher, and not what they started themselves."""
    found = []
    for one in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # what a rank started may end
            if one.cmdline()[1:2] == [str(script)]:
                found.append(one)
    return found
