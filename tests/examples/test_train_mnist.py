"""The MNIST example: what it leaves behind, and how it resumes."""

import re
import shutil
import socket
import sys
from pathlib import Path

import chainer
import numpy as np
import pytest
from PIL import Image

from tests.support.examples import (
    MNIST,
    log_of,
    reported_once,
    same_bits,
    shapes,
    train,
    train_here,
)
from tests.support.jobs import Job, run_command, variables
from tests.support.killing import kill_when

SMALL = ("--unit", "60", "--batchsize", "20")
KEYS = {"epoch", "iteration", "elapsed_time", "main/loss", "main/accuracy"}
KEYS |= {"validation/main/loss", "validation/main/accuracy"}


def on_two_ranks(test):
    return pytest.mark.world(pytest.mark.sizes(2)(test))


def rows_of_table(stdout: str) -> list[int]:
    """The epochs that the table has a row for, without the progress bar's cursor movements."""
    plain = re.sub(r"\x1b\[\d*[JA]", "", stdout)
    return [int(row[1]) for row in re.finditer(r"^(\d+) +[\d.e-]+ +[\d.e-]+ ", plain, re.M)]


def check_results(out: Path, job: Job, ranks: int) -> None:
    """Those of three epochs."""
    log = log_of(out)
    assert len(log) == 3
    assert all(entry.keys() == KEYS for entry in log)
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert 0.8 < log[-1]["validation/main/accuracy"] <= 1

    assert job.out.count("epoch       main/loss") == 1
    assert rows_of_table(job.out) == [1, 2, 3]
    assert "total [" in job.out
    assert job.out.count("1440 training and 357 test examples") == 1
    assert f"ranks {ranks}," in job.out
    assert job.out.count("validation accuracy ") == 1
    assert "Warning" not in job.err

    snapshots = {f"snapshot_rank{r}of{ranks}_epoch{e}.npz" for r in range(ranks) for e in (2, 3)}
    left = {"log", "model.npz", "curves.png", "cg.dot"}
    assert {f.name for f in out.iterdir()} - {"cg.png"} == snapshots | left
    assert (out / "cg.dot").read_text().startswith("digraph")
    with Image.open(out / "curves.png") as curves:
        assert 800 < curves.width < 2000
        assert 300 < curves.height < 1000
    model = shapes(out / "model.npz")
    assert (model["l1/W"], model["l3/b"]) == ((60, 64), (10,))


@pytest.fixture(scope="module")
def three_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A job of two ranks that nothing interrupted."""
    out = tmp_path_factory.mktemp("three_epochs")
    return out, train(2, MNIST, *SMALL, "--epoch", "3", "--out", out)


def test_two_ranks_leave_one_log_one_table_one_plot(three_epochs):
    check_results(*three_epochs, ranks=2)


@pytest.mark.full
def test_one_process_needs_no_mpiexec(tmp_path):
    command = [sys.executable, str(MNIST), *SMALL, "--epoch", "3"]
    job = run_command(command, variables(), 600, cwd=tmp_path)
    assert job.returncode == 0, job
    check_results(tmp_path / "result", job, ranks=1)


@pytest.mark.full
def test_killed_run_goes_on_from_the_middle_of_an_epoch_with_the_same_bits(three_epochs, tmp_path):
    whole, _ = three_epochs
    arguments = (*SMALL, "--epoch", "3", "--out", tmp_path, "--checkpoint", "5")

    def begun():  # an epoch has 36 iterations
        return list(tmp_path.glob("mnist.commit.*"))

    kill_when(begun, MNIST, *arguments, cwd=tmp_path, seconds=600)
    assert not (tmp_path / "snapshot_rank1of2_epoch3.npz").exists()
    job = train(2, MNIST, *arguments, "--resume", tmp_path)
    assert rows_of_table(job.out)[-1] == 3
    assert not list(tmp_path.glob("mnist.*"))
    same_bits(tmp_path / "model.npz", whole / "model.npz")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of three epochs in this world."""
    from mpi4py import MPI

    out = MPI.COMM_WORLD.bcast(tmp_path_factory.mktemp("results"))
    assert train_here(MNIST, *SMALL, "--epoch", "3", "--out", out).returncode == 0
    return out


@pytest.fixture
def copied(results: Path, folder: Path, world) -> Path:
    """A copy of them, for all ranks."""
    if world.rank == 0:
        shutil.copytree(results, folder, dirs_exist_ok=True)
    world.barrier()
    return folder


def resume(folder: Path, *arguments: str) -> Job:
    return train_here(MNIST, *SMALL, *arguments, "--out", folder, "--resume", folder)


@on_two_ranks
def test_double_buffering_learns(folder):
    job = train_here(MNIST, *SMALL, "--epoch", "2", "--double-buffering", "--out", folder)
    log = log_of(folder)
    assert len(log) == 2
    assert log[1]["main/loss"] < log[0]["main/loss"]
    assert log[1]["validation/main/accuracy"] > 0.6
    assert "Warning" not in job.err


@on_two_ranks
def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(results, folder):
    train_here(MNIST, *SMALL, "--epoch", "1", "--out", folder)
    resume(folder, "--epoch", "3")
    assert len(log_of(folder)) == 3
    for name in ("model.npz", *(f"snapshot_rank{rank}of2_epoch3.npz" for rank in range(2))):
        same_bits(folder / name, results / name)


@on_two_ranks
def test_new_run_forgets_the_snapshots_of_the_last_one(folder, world):
    for stale in ("snapshot_rank0of2_epoch7.npz", "mnist.0.1000", "mnist.commit.1000"):
        (folder / stale).touch()
    world.barrier()
    assert train_here(MNIST, *SMALL, "--epoch", "1", "--out", folder).returncode == 0
    found = {file.name for file in (*folder.glob("*of2_epoch*"), *folder.glob("mnist.*"))}
    assert found == {f"snapshot_rank{rank}of2_epoch1.npz" for rank in range(2)}


@on_two_ranks
def test_snapshots_that_do_not_serve_leave_the_results_alone(copied):
    before = {file: file.read_bytes() for file in copied.iterdir()}
    reported_once(
        resume(copied, "--epoch", "3"), MNIST, "--resume", "has 3 epochs already", "--epoch"
    )
    reported_once(resume(copied, "--unit", "61"), MNIST, "--resume", "does not fit this run")
    assert {file: file.read_bytes() for file in copied.iterdir()} == before


@on_two_ranks
def test_resume_falls_back_to_the_newest_epoch_that_is_whole_on_all_ranks(results, copied, world):
    cut, missing = (copied / f"snapshot_rank1of2_epoch{epoch}.npz" for epoch in (3, 4))
    if world.rank == 0:
        cut.write_bytes(cut.read_bytes()[:1000])
        (copied / "snapshot_rank0of2_epoch4.npz").touch()  # as when a disk was full
    world.barrier()
    job = resume(copied, "--epoch", "3")
    told = [line for line in job.err.splitlines() if line.startswith("train_mnist.py: ")]
    assert len(told) == 2, job
    for words in ("epoch 4 skipped", "rank 0: snapshot_rank0of2_epoch4", "rank 1: has none"):
        assert words in told[0]
    assert f"epoch 3 skipped: rank 1: {cut.name} is damaged" in told[1]
    assert not missing.exists()
    same_bits(copied / "model.npz", results / "model.npz")  # an epoch more than the second


@on_two_ranks
def test_damage_everywhere_is_told(copied, world):
    if world.rank == 0:
        for epoch in (2, 3):
            file = copied / f"snapshot_rank1of2_epoch{epoch}.npz"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1  # within the weights: the directory is intact
            file.write_bytes(content)
    world.barrier()
    damaged = "epoch 3 skipped: rank 1: snapshot_rank1of2_epoch3.npz is damaged: "
    none = "holds no snapshot that all 2 rank(s) share", "epoch 2 skipped: rank 1:"
    reported_once(resume(copied, "--epoch", "4"), MNIST, *none, damaged)


@on_two_ranks
def test_mnist_is_asked_for_once_and_its_absence_told(data_sets, monkeypatch):
    nobody = "http://127.0.0.1:9"
    for name, value in (("http_proxy", nobody), ("https_proxy", nobody), ("no_proxy", "")):
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.upper(), value)
    job = train_here(MNIST, "--dataset", "mnist")
    reported_once(job, MNIST, "--dataset mnist", "could not download", "--dataset digits")


@on_two_ranks
@pytest.mark.parametrize("tests", [1, 2])
def test_mnist_in_the_cache_is_shared_by_no_more_ranks_than_examples(data_sets, world, tests):
    if world.rank == 0:
        data_sets.mkdir(parents=True)
        pixels = np.arange(6 * 784).reshape(6, 784).astype(np.uint8)
        np.savez(data_sets / "train.npz", x=pixels, y=np.arange(6))
        np.savez(data_sets / "test.npz", x=pixels[:tests], y=np.arange(tests))
    world.barrier()
    job = train_here(MNIST, "--dataset", "mnist", "--epoch", "2")
    if tests == 1:
        reported_once(job, MNIST, "2 ranks are too many for 6 training and 1 test examples")
    else:
        assert len(log_of(Path("result"))) == 2
        assert "batch 3 a rank" in job.out  # the default is less where ranks have less


@pytest.fixture
def data_sets(folder, monkeypatch):
    """Where Chainer looks for MNIST: a folder that isn't there yet."""
    before = chainer.dataset.get_dataset_root(), socket.getdefaulttimeout()
    chainer.dataset.set_dataset_root(str(folder))
    yield folder / "pfnet" / "chainer" / "mnist"
    chainer.dataset.set_dataset_root(before[0])
    socket.setdefaulttimeout(before[1])
