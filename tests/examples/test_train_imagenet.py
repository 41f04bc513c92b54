"""The ImageNet example: what it leaves behind, and that it goes on after having been killed."""

import numpy as np
import pytest

from tests.support.jobs.examples import IMAGENET, SECONDS, kill_when, log_of, train
from tests.support.jobs.scripts import imported
from tests.support.plugins.pairwise import in_full

pytestmark = pytest.mark.ci

SMALL = ("--batchsize", "10", "--loaderjob", "1", "--size", "16")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """20 images of each class to learn, and 5 to test."""
    folder = tmp_path_factory.mktemp("imagenet")
    with imported(IMAGENET.with_name("make_images.py")) as module:
        module.main([str(folder), "--train", "20", "--val", "5"])
    return folder


def check(job, out, epochs, ranks=2):
    said = (
        f"100 images of 5 classes to learn, 25 to test; ranks {ranks}, batch 10 a rank"
    )
    assert job.out.count(said) == 1
    log = log_of(out)
    assert len(log) == epochs
    for entry in log:
        for name in ("main", "validation/main"):
            assert 0 < entry[f"{name}/loss"] < 10
            assert 0 <= entry[f"{name}/accuracy"] <= 1
        # The mean over all images, of both ranks.
        right = entry["validation/main/accuracy"] * 25
        assert right == pytest.approx(round(right))
    # Checkpoints are gone when all is done.
    assert {file.name for file in out.iterdir()} == {"log", "model.npz"}
    with np.load(out / "model.npz") as model:
        assert model["predictor/top/b"].shape == (5,)


@pytest.mark.parametrize("ranks", [2, *in_full(1, 3, 4)])
def test_any_number_of_ranks_learns(ranks, images, tmp_path):
    job = train(ranks, IMAGENET, images, *SMALL, "--epoch", ranks + 2, cwd=tmp_path)
    check(job, tmp_path / "result", ranks + 2, ranks)
    # Of five.
    assert max(entry["main/accuracy"] for entry in log_of(tmp_path / "result")) > 0.4


@pytest.mark.full
def test_16_bits_over_another_communicator(images, tmp_path):
    how = ("--epoch", "1", "--fp16", "--communicator", "flat")
    job = train(2, IMAGENET, images, *SMALL, *how, cwd=tmp_path)
    check(
        job,
        tmp_path / "result",
        epochs=1,
    )
    with np.load(tmp_path / "result" / "model.npz") as model:
        assert model["predictor/top/b"].dtype == np.float16


@pytest.mark.full
def test_a_killed_job_goes_on(images, tmp_path):
    out = tmp_path / "result"

    def begun():
        numbers = [file.suffix[1:] for file in out.glob("imagenet.commit.*")]
        # It is being written.
        return [int(number) for number in numbers if number != "tmp"]

    endless = (IMAGENET, images, *SMALL, "--checkpoint", "2", "--epoch", "100000")
    kill_when(begun, *endless, cwd=tmp_path, seconds=SECONDS)
    first = max(begun())
    epochs = first // 5 + 2  # 5 iterations an epoch
    job = train(
        2, IMAGENET, images, *SMALL, "--resume", "--epoch", str(epochs), cwd=tmp_path
    )
    check(job, out, epochs)
    assert job.out.count("going on from iteration ") == 1
    begin = int(job.out.split("going on from iteration ")[1].split()[0])
    assert begin >= first - 2
