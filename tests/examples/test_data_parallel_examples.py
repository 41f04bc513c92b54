"""The examples of data parallelism run on any number of ranks, learn, and leave what they say."""

import numpy as np
import pytest
from PIL import Image

from tests.support.jobs.examples import (
    CIFAR,
    DATES,
    DCGAN,
    log_of,
    shapes,
    train,
    train_here,
)
from tests.support.jobs.scripts import imported


def alone_and_together(test):
    return pytest.mark.world(pytest.mark.ranks(1, 2)(test))


@pytest.mark.ci
@pytest.mark.world
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.ranks(1, 2)),
        pytest.param(("--mnbn",), marks=pytest.mark.ranks(3)),
    ],
)
def test_patches_of_photographs_are_told_apart(options, world, folder):
    out = train_here(CIFAR, "--epoch", 2, "--batchsize", 64 // world.size, *options)
    assert out.count("1600 patches to learn, 400 to test") == 1
    log = log_of(folder / "result")
    assert log[-1]["main/loss"] < 2.0 < np.log(10)
    assert log[-1]["main/accuracy"] > 0.25  # of ten classes
    assert log[-1]["validation/main/accuracy"] > 0.15
    assert {file.name for file in (folder / "result").iterdir()} == {"log", "model.npz"}
    assert shapes(folder / "result" / "model.npz")["predictor/fc/W"] == (10, 256)


def test_patches_are_of_ten_classes_and_none_is_in_both_sets():
    with imported(CIFAR) as cifar:
        learnt, held_out = cifar.load_patches()
    assert (len(learnt), len(held_out)) == (1600, 400)
    pixels = {x.tobytes() for x, _ in held_out}
    shared = [t for x, t in learnt if x.tobytes() in pixels]
    assert not shared
    x, t = learnt[0]
    assert (x.shape, x.dtype, t.dtype) == ((3, 16, 16), np.float32, np.int32)
    assert (
        np.bincount([t for part in (learnt, held_out) for _, t in part]).tolist()
        == [200] * 10
    )


@pytest.mark.full
def test_the_learning_rate_shifts_on_all_ranks(tmp_path):
    train(2, CIFAR, "--epoch", 6, "--out", tmp_path)
    assert [entry["lr"] for entry in log_of(tmp_path)] == [0.05] * 5 + [0.025]


@pytest.mark.ci
@alone_and_together
def test_the_generator_comes_near_to_digits(world, folder):
    # 57 iterations.
    out = train_here(DCGAN, "--epoch", world.size, "--picture", world.size)
    assert out.count("1797 digits") == 1
    if world.rank == 0:
        with imported(DCGAN) as dcgan:
            real = dcgan.load_digits().reshape(-1, 64)
            generator = dcgan.Generator()

            def distances():
                """From each generated image to the nearest digit, and from digits to those."""
                z = generator.draw(256, np.random.RandomState(1))
                with dcgan.chainer.using_config("train", False):
                    x = generator(z).array.reshape(-1, 64)
                between = ((x[:, None] - real) ** 2).mean(axis=2) ** 0.5
                return between.min(axis=1).mean(), between.min(axis=0).mean()

            before = distances()
            dcgan.chainer.serializers.load_npz(
                folder / "result" / "generator.npz", generator
            )
            after = distances()
        assert after[0] < 0.75 * before[0]
        assert after[1] < 0.8 * before[1]
    name = f"epoch_{world.size:02}.png"
    assert {file.name for file in (folder / "result").iterdir()} == {
        "log",
        "generator.npz",
        name,
    }
    with Image.open(folder / "result" / name) as picture:
        assert picture.size == (640, 320)
        assert len(np.unique(np.asarray(picture))) > 50  # neither one colour nor two
    assert len(log_of(folder / "result")) == world.size
    # Weights are the same on all ranks, whose random numbers differ.
    assert {"discriminator/loss", "generator/loss"} < log_of(folder / "result")[
        -1
    ].keys()


@pytest.mark.ci
@alone_and_together
def test_dates_are_learnt_from_shares(world, folder):
    small = (
        "--examples",
        480,
        "--tests",
        31,
        "--unit",
        64,
        "--batchsize",
        48 // world.size,
    )
    out = train_here(DATES, *small, "--epoch", 3)
    log = log_of(folder / "result")
    assert len(log) == 3
    assert log[-1]["main/loss"] < 1.5 < np.log(13)
    assert log[-1]["main/accuracy"] > 0.45  # of 13 characters
    for entry in log:  # a part of all ranks' dates
        assert entry["validation/exact"] * 31 == pytest.approx(
            round(entry["validation/exact"] * 31)
        )
    assert out.count("\n    ") == 5
    assert {file.name for file in (folder / "result").iterdir()} == {"log", "model.npz"}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_runs_end_as_their_readmes_say(ranks, tmp_path):
    train(ranks, CIFAR, "--out", tmp_path / "cifar", seconds=3600)
    assert log_of(tmp_path / "cifar")[-1]["validation/main/accuracy"] > 0.5
    train(ranks, DATES, "--out", tmp_path / "dates", seconds=3600)
    assert log_of(tmp_path / "dates")[-1]["validation/exact"] > 0.9
