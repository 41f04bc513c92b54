"""The MNIST example: that it learns, what it leaves behind, and how it resumes."""

import re
import sys

import pytest
from PIL import Image

from tests.support.jobs.examples import (
    MNIST,
    SECONDS,
    kill_when,
    log_of,
    same_bits,
    shapes,
    train,
    train_here,
)
from tests.support.jobs.runner import run

SMALL = ("--unit", "60", "--epoch", "3", "--batchsize", "20")
KEYS = {"epoch", "iteration", "elapsed_time", "main/loss", "main/accuracy"}
KEYS |= {"validation/main/loss", "validation/main/accuracy"}


def rows_of_table(stdout):
    """The epochs that the table has a row for."""
    assert "\x1b" not in stdout
    return [
        int(row[1]) for row in re.finditer(r"^(\d+) +[\d.e-]+ +[\d.e-]+ ", stdout, re.M)
    ]


def check_results(out, files):
    """Those of three epochs."""
    log = log_of(out)
    assert len(log) == 3
    for entry in log:
        assert entry.keys() == KEYS
    assert log[-1]["main/loss"] < log[0]["main/loss"] / 2
    assert 0.8 < log[-1]["validation/main/accuracy"] <= 1
    assert {file.name for file in out.iterdir()} == files
    model = shapes(out / "model.npz")
    assert model["predictor/l1/W"] == (60, 64)
    assert model["predictor/l3/b"] == (10,)


@pytest.mark.world
@pytest.mark.sizes(2)
def test_without_matplotlib_a_line_says_so(folder, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = train_here(MNIST, *SMALL)
    check_results(folder / "result", {"log", "model.npz"})
    assert out.count("no curves are drawn: `pip install matplotlib` for them\n") == 1


@pytest.fixture(scope="module")
def three_epochs(tmp_path_factory):
    """A job of two ranks that nothing interrupted."""
    out = tmp_path_factory.mktemp("three_epochs")
    return out, train(2, MNIST, *SMALL, "--communicator", "flat", "--out", out)


def test_two_ranks_leave_one_log_one_table_one_plot(three_epochs):
    out, job = three_epochs
    check_results(out, {"log", "model.npz", "curves.png"})
    assert job.out.count("epoch       main/loss") == 1
    assert rows_of_table(job.out) == [1, 2, 3]
    assert job.out.count("communicator flat, ranks 2") == 1
    with Image.open(out / "curves.png") as curves:
        assert 800 < curves.width < 2000
        assert 300 < curves.height < 1000


def test_an_unknown_communicator_is_told_with_those_there_are(tmp_path):
    job = run(2, MNIST, "--communicator", "bogus", cwd=tmp_path)
    assert job.returncode
    assert "unknown communicator 'bogus'; use one of: " in job.err
    assert "hierarchical" in job.err
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_same_bits_and_only_if_it_is_told_to(tmp_path):
    killed = tmp_path / "killed"
    whole = tmp_path / "whole"

    def newest():
        names = [file.suffix[1:] for file in killed.glob("mnist.commit.*")]
        return max((int(name) for name in names if name != "tmp"), default=0)

    arguments = (*SMALL, "--out", killed, "--epoch")
    seconds = {"cwd": tmp_path, "seconds": SECONDS}
    # 36 an epoch.
    kill_when(lambda: newest() >= 72, MNIST, *arguments, 100000, **seconds)
    job = run(2, MNIST, *arguments, 1, **seconds)
    assert job.returncode
    assert (
        f"has one of iteration {newest()}: call maybe_load before training" in job.err
    )
    epochs = newest() // 36 + 2
    job = train(2, MNIST, *arguments, epochs, "--resume")
    assert rows_of_table(job.out)[-2:] == [epochs - 1, epochs]
    assert not list(killed.glob("mnist.*"))
    train(2, MNIST, *arguments, epochs, "--out", whole)
    same_bits(killed / "model.npz", whole / "model.npz")
