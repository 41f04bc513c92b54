"""The ImageNet example: what it leaves behind, and that it goes on after having been killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.jobs import Job, run
from tests.support.killing import kill_when

FOLDER = Path(__file__).parents[2] / "examples" / "imagenet"
SCRIPT = FOLDER / "train_imagenet.py"
SECONDS = 300  # ends a hang, no more
SMALL = ("--batchsize", "10", "--loaderjob", "1", "--size", "16")
CLASSES = {"china", "circle", "flower", "square", "triangle"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 images of each class to learn, and 5 to test."""
    folder = tmp_path_factory.mktemp("imagenet") / "images"
    arguments = [str(FOLDER / "make_images.py"), str(folder), "--train", "20", "--val", "5"]
    subprocess.run([sys.executable, *arguments], check=True, timeout=SECONDS)
    return folder


def train(images: Path, *arguments: str, cwd: Path) -> Job:
    return run(2, SCRIPT, images, *SMALL, *arguments, cwd=cwd, seconds=SECONDS)


def check(job: Job, out: Path, epochs: int) -> None:
    assert job.returncode == 0, job
    assert job.out.count("ranks 2; 100 images of 5 classes to learn, 25 to test") == 1
    assert "Warning" not in job.err
    log = json.loads((out / "log").read_text())
    assert [entry["epoch"] for entry in log] == list(range(1, epochs + 1))
    for entry in log:
        for name in ("main", "validation/main"):
            assert 0 < entry[f"{name}/loss"] < 10
            assert 0 <= entry[f"{name}/accuracy"] <= 1
        right = entry["validation/main/accuracy"] * 25  # the mean over all images, of both ranks
        assert right == pytest.approx(round(right))
    # Checkpoints are gone when all is done.
    assert {file.name for file in out.iterdir()} == {"log", "model.npz"}
    with np.load(out / "model.npz") as model:
        assert model["predictor/top/b"].shape == (5,)


def test_the_images_are_there_and_always_the_same(images, tmp_path):
    for part, count in (("train", 20), ("val", 5)):
        assert {each.name for each in (images / part).iterdir()} == CLASSES
        assert all(len(list(each.iterdir())) == count for each in (images / part).iterdir())
    again = tmp_path / "again"
    arguments = [str(FOLDER / "make_images.py"), str(again), "--train", "20", "--val", "5"]
    subprocess.run([sys.executable, *arguments], check=True, timeout=SECONDS)
    files = sorted(file.relative_to(images) for file in images.rglob("*.png"))
    assert len(files) == 125
    for file in files:
        assert (again / file).read_bytes() == (images / file).read_bytes()


def test_two_ranks_learn(images, tmp_path):
    job = train(images, "--epoch", "2", cwd=tmp_path)
    check(job, tmp_path / "result", epochs=2)


def test_16_bits_over_another_communicator(images, tmp_path):
    job = train(images, "--epoch", "1", "--fp16", "--communicator", "flat", cwd=tmp_path)
    check(job, tmp_path / "result", epochs=1)
    with np.load(tmp_path / "result" / "model.npz") as model:
        assert model["predictor/top/b"].dtype == np.float16


def test_a_killed_job_goes_on(images, tmp_path):
    out = tmp_path / "result"
    arguments = (images, *SMALL, "--checkpoint", "2", "--epoch", "100000")
    kill_when(
        lambda: list(out.glob("imagenet.commit.*")),
        SCRIPT,
        *arguments,
        cwd=tmp_path,
        seconds=SECONDS,
    )
    begun = max(int(file.suffix[1:]) for file in out.glob("imagenet.commit.*"))
    job = train(images, "--epoch", "1", cwd=tmp_path)
    check_mistake(job, "go on with it by --resume")
    epochs = begun // 5 + 2  # 5 iterations an epoch
    job = train(images, "--resume", "--epoch", str(epochs), cwd=tmp_path)
    check(job, out, epochs)
    assert job.out.count("going on from iteration ") == 1
    assert int(job.out.split("going on from iteration ")[1].split()[0]) >= begun - 2


def check_mistake(job: Job, text: str) -> None:
    """It is told once, by name, and the job ends with status 2."""
    assert job.returncode == 2, job
    (told,) = [line for line in job.err.splitlines() if line.startswith("train_imagenet.py: ")]
    assert text in told
    assert "Traceback" not in job.err


def test_a_folder_without_images_is_told(tmp_path):
    (tmp_path / "train").mkdir()
    for folder, text in ((tmp_path, "has no images in it"), (tmp_path / "none", "is no folder")):
        check_mistake(train(folder, cwd=tmp_path), text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--epoch", "0"), "0 is not positive"),
        (("--batchsize", "51"), "a rank has 50 training examples"),
        (("--communicator", "fast"), "unknown communicator 'fast'"),
        pytest.param(
            ("--out", "/dev/null/x"), "/dev/null/x: cannot write there", marks=pytest.mark.full
        ),
        pytest.param(("--gpu",), "--gpu: ", marks=pytest.mark.full),
    ],
)
def test_mistake_is_told_once_and_ends_the_job(images, arguments, text, tmp_path):
    check_mistake(train(images, *arguments, cwd=tmp_path), text)


def test_classes_that_differ_are_told(images, tmp_path):
    shutil.copytree(images, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "val" / "china")
    check_mistake(train(tmp_path / "images", cwd=tmp_path), "train has classes")
