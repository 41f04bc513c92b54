"""The MNIST example: what it leaves behind, how it resumes, and what it says of mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.jobs import Job, run
from tests.support.killing import kill_when

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "mnist" / "train_mnist.py"
SECONDS = 300  # ends a hang, no more
SMALL = ("--unit", "60", "--batchsize", "20")
KEYS = {
    "epoch",
    "iteration",
    "elapsed_time",
    "main/loss",
    "main/accuracy",
    "validation/main/loss",
    "validation/main/accuracy",
}


def train(
    *arguments: str | Path, ranks: int | None, cwd: Path | None = None, **environment: str
) -> Job:
    """Run the example with so many ranks; with None, without mpiexec.

    Its output comes without the progress bar's cursor movements.
    """
    if ranks is None:
        alone = subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        job = Job(alone.returncode, alone.stdout, alone.stderr, time.time())
    else:
        job = run(ranks, SCRIPT, *arguments, environment=environment, cwd=cwd, seconds=SECONDS)
    return replace(job, out=re.sub(r"\x1b\[\d*[JA]", "", job.out))


def succeeded(job: Job) -> Job:
    assert job.returncode == 0, job
    return job


def rows_of_table(stdout: str) -> list[int]:
    """The epochs that the table has a row for."""
    return [int(row[1]) for row in re.finditer(r"^(\d+) +[\d.e-]+ +[\d.e-]+ ", stdout, re.M)]


def check_results(out: Path, job: Job, ranks: int, epochs: int) -> None:
    log = json.loads((out / "log").read_text())
    assert [entry["epoch"] for entry in log] == list(range(1, epochs + 1))
    assert all(entry.keys() == KEYS for entry in log)
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert 0.8 < log[-1]["validation/main/accuracy"] <= 1

    assert job.out.count("epoch       main/loss") == 1
    assert rows_of_table(job.out) == list(range(1, epochs + 1))
    assert "total [" in job.out
    assert job.out.count("1440 training and 357 test examples") == 1
    assert f"ranks {ranks}," in job.out
    assert job.out.count("validation accuracy ") == 1
    assert "Warning" not in job.err

    snapshots = {f"snapshot_rank{r}of{ranks}_epoch{e}.npz" for r in range(ranks) for e in (2, 3)}
    assert {f.name for f in out.iterdir()} - {"cg.png"} == snapshots | {
        "log",
        "model.npz",
        "curves.png",
        "cg.dot",
    }
    assert (out / "cg.dot").read_text().startswith("digraph")
    width, height = size_of_png(out / "curves.png")
    assert 800 < width < 2000
    assert 300 < height < 1000
    with np.load(out / "model.npz") as model:
        assert model["l1/W"].shape == (60, 64)
        assert model["l3/b"].shape == (10,)


def size_of_png(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


@pytest.fixture(scope="module")
def three_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A run of two ranks that nothing interrupted."""
    out = tmp_path_factory.mktemp("three_epochs")
    return out, succeeded(train(*SMALL, "--epoch", "3", "--out", out, ranks=2))


def test_one_process_needs_no_mpiexec(tmp_path):
    job = succeeded(train(*SMALL, "--epoch", "3", ranks=None, cwd=tmp_path))
    check_results(tmp_path / "result", job, ranks=1, epochs=3)


def test_two_ranks_leave_one_log_one_table_one_plot(three_epochs):
    out, job = three_epochs
    check_results(out, job, ranks=2, epochs=3)


def test_double_buffering_learns(tmp_path):
    arguments = (*SMALL, "--epoch", "2", "--double-buffering", "--out", tmp_path)
    job = succeeded(train(*arguments, ranks=2))
    log = json.loads((tmp_path / "log").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2]
    assert log[1]["main/loss"] < log[0]["main/loss"]
    assert log[1]["validation/main/accuracy"] > 0.6
    assert "Warning" not in job.err


def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(three_epochs, tmp_path):
    whole, _ = three_epochs
    succeeded(train(*SMALL, "--epoch", "1", "--out", tmp_path, ranks=2))
    job = succeeded(train(*SMALL, "--epoch", "3", "--out", tmp_path, "--resume", tmp_path, ranks=2))
    check_results(tmp_path, job, ranks=2, epochs=3)
    for name in ("model.npz", "snapshot_rank0of2_epoch3.npz", "snapshot_rank1of2_epoch3.npz"):
        expected, actual = numbers(whole / name), numbers(tmp_path / name)
        assert actual.keys() == expected.keys()
        assert any(key.endswith("l2/W") for key in expected)
        for key in expected:
            np.testing.assert_array_equal(actual[key], expected[key], err_msg=f"{name}: {key}")


def test_killed_run_goes_on_from_the_middle_of_an_epoch_with_the_same_bits(three_epochs, tmp_path):
    whole, _ = three_epochs
    arguments = (*SMALL, "--epoch", "3", "--out", tmp_path, "--checkpoint", "5")
    kill_when(  # an epoch has 36 iterations
        lambda: list(tmp_path.glob("mnist.commit.*")),
        *(SCRIPT, *arguments),
        cwd=tmp_path,
        seconds=SECONDS,
    )
    assert not (tmp_path / "snapshot_rank1of2_epoch3.npz").exists()
    job = succeeded(train(*arguments, "--resume", tmp_path, ranks=2))
    assert rows_of_table(job.out)[-1] == 3
    assert not list(tmp_path.glob("mnist.*"))
    expected, actual = numbers(whole / "model.npz"), numbers(tmp_path / "model.npz")
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)


def numbers(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of a snapshot, but for the time it took."""
    with np.load(path, allow_pickle=True) as file:  # Chainer writes None as an object
        arrays = {key: file[key] for key in file.files if "elapsed_time" not in key}
    return {key: array for key, array in arrays.items() if array.dtype.kind in "fiub"}


def test_new_run_forgets_the_snapshots_of_the_last_one(three_epochs, tmp_path):
    for stale in ("snapshot_rank0of1_epoch7.npz", "snapshot_rank0of1_epoch8.npz"):
        (tmp_path / stale).write_bytes(b"")
    for stale in ("mnist.0.1000", "mnist.commit.1000"):
        (tmp_path / stale).write_bytes(b"")
    succeeded(train(*SMALL, "--epoch", "1", "--out", tmp_path, ranks=None))
    assert [f.name for f in tmp_path.glob("*of1_epoch*")] == ["snapshot_rank0of1_epoch1.npz"]
    assert not list(tmp_path.glob("mnist.*"))


def told_once(job: Job, *words: str) -> None:
    """The job failed, with one message that has these words, and no traceback."""
    assert job.returncode not in (0, None), job
    complaints = [line for line in job.err.splitlines() if line.startswith("train_mnist.py: ")]
    assert len(complaints) == 1, job
    for word in words:
        assert word in complaints[0]
    assert "Traceback" not in job.err
    assert rows_of_table(job.out) == []
    assert "ending the job" not in job.err  # a mistake of the user is no failure of a rank


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batchsize", "0"], ["--batchsize", "0 is not positive"]),
        (["--batchsize", "-3"], ["--batchsize", "-3 is not positive"]),
        (["--batchsize", "721"], ["--batchsize 721", "a rank has 720 training examples"]),
        (["--epoch", "0"], ["--epoch", "0 is not positive"]),
        (["--communicator", "bogus"], ["bogus", "naive", "flat"]),
        (["--resume", "nowhere"], ["--resume nowhere", "No such file"]),
        (["--resume", "."], ["--resume .", "holds no snapshot"]),
        (["--out", str(SCRIPT / "below")], ["--out", "cannot write there", "Not a directory"]),
    ],
    ids=lambda value: "".join(value[:2]) if value[0].startswith("--") else "",
)
def test_mistake_is_told_once_and_ends_the_job(arguments, words, tmp_path):
    told_once(train(*arguments, ranks=2, cwd=tmp_path), *words)
    left = list((tmp_path / "result").iterdir()) if (tmp_path / "result").exists() else []
    assert left == []


def test_gpu_without_a_gpu(tmp_path):
    job = train("--gpu", ranks=2, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    told_once(job, "--gpu")


def test_snapshots_that_do_not_serve_leave_the_results_alone(three_epochs):
    out, _ = three_epochs
    before = {f: f.read_bytes() for f in out.iterdir()}
    for arguments, words in (
        (["--epoch", "3"], ["has 3 epochs already", "--epoch"]),
        (["--unit", "61"], ["does not fit this run"]),
    ):
        told_once(
            train(*SMALL, *arguments, "--out", out, "--resume", out, ranks=2), "--resume", *words
        )
    assert {f: f.read_bytes() for f in out.iterdir()} == before


def test_resume_falls_back_to_the_newest_epoch_that_is_whole_on_all_ranks(three_epochs, tmp_path):
    out, _ = three_epochs
    for rank in range(2):
        for epoch in (2, 3):
            name = f"snapshot_rank{rank}of2_epoch{epoch}.npz"
            (tmp_path / name).write_bytes((out / name).read_bytes())
    (tmp_path / "log").write_bytes((out / "log").read_bytes())
    cut, missing = (tmp_path / f"snapshot_rank1of2_epoch{epoch}.npz" for epoch in (3, 4))
    cut.write_bytes(cut.read_bytes()[:1000])
    (tmp_path / "snapshot_rank0of2_epoch4.npz").write_bytes(b"")  # as when a disk was full
    arguments = (*SMALL, "--out", tmp_path, "--resume", tmp_path)
    job = succeeded(train(*arguments, "--epoch", "3", ranks=2))
    told = [line for line in job.err.splitlines() if line.startswith("train_mnist.py: ")]
    assert len(told) == 2, job
    for words in ("epoch 4 skipped", "rank 0: snapshot_rank0of2_epoch4.npz", "rank 1: has none"):
        assert words in told[0]
    assert f"epoch 3 skipped: rank 1: {cut.name} is damaged" in told[1]
    assert not missing.exists()
    model = numbers(tmp_path / "model.npz")
    for key, expected in numbers(out / "model.npz").items():  # one epoch more than the second
        np.testing.assert_array_equal(model[key], expected)


def test_damage_everywhere_is_told(three_epochs, tmp_path):
    out, _ = three_epochs
    for epoch in (2, 3):
        for rank in range(2):
            name = f"snapshot_rank{rank}of2_epoch{epoch}.npz"
            (tmp_path / name).write_bytes((out / name).read_bytes())
        one = bytearray((tmp_path / name).read_bytes())
        one[len(one) // 2] ^= 1  # within the weights: the file's directory is intact
        (tmp_path / name).write_bytes(one)
    arguments = (*SMALL, "--epoch", "4", "--out", tmp_path, "--resume", tmp_path)
    told_once(
        train(*arguments, ranks=2),
        "holds no snapshot that all 2 rank(s) share",
        "epoch 3 skipped: rank 1: snapshot_rank1of2_epoch3.npz is damaged: ",
        "epoch 2 skipped: rank 1:",
    )


def test_mnist_is_asked_for_once_and_its_absence_told(tmp_path):
    job = train(
        *("--dataset", "mnist"),
        ranks=2,
        cwd=tmp_path,
        CHAINER_DATASET_ROOT=str(tmp_path),
        http_proxy="http://127.0.0.1:9",  # nobody answers there
        HTTP_PROXY="http://127.0.0.1:9",
        no_proxy="",
        NO_PROXY="",
    )
    told_once(job, "--dataset mnist", "could not download", "--dataset digits")


def test_mnist_in_the_cache_is_used_and_shared_by_no_more_ranks_than_examples(tmp_path):
    cache = tmp_path / "pfnet" / "chainer" / "mnist"
    cache.mkdir(parents=True)
    pixels = np.arange(6 * 784).reshape(6, 784).astype(np.uint8)
    np.savez(cache / "train.npz", x=pixels, y=np.arange(6))
    arguments = ("--dataset", "mnist", "--epoch", "2")
    for tests in (1, 2):
        np.savez(cache / "test.npz", x=pixels[:tests], y=np.arange(tests))
        job = train(*arguments, ranks=2, cwd=tmp_path, CHAINER_DATASET_ROOT=str(tmp_path))
        if tests == 1:
            told_once(job, "2 ranks are too many for 6 training and 1 test examples")
        else:
            assert rows_of_table(succeeded(job).out) == [1, 2]
            assert "batch 3 a rank" in job.out  # the default is less where ranks have less
