"""The examples run on any number of ranks that they take, learn, and leave what they say."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.random import RandomState
from PIL import Image

from tests.support.jobs.examples import (
    CIFAR,
    CONV,
    DATES,
    DATES_APART,
    DCGAN,
    DUAL,
    LAYERS,
    MNIST,
    SHARDED,
    log_of,
    shapes,
    train,
    train_here,
)
from tests.support.jobs.scripts import imported
from tests.support.plugins.pairwise import in_full

LOSS = "main/loss"
RIGHT = "main/accuracy"
HELD_OUT = "validation/main/accuracy"
EXACT = "validation/exact"
DIGITS = "1440 digits to learn, 357 to test; batch "
TWO_PARTS = ("--epoch", 3, "--unit", 60, "--batchsize", 20)
FEW_DATES = ("--epoch", 3, "--unit", 64, "--examples", 480)
SAMPLE = re.compile(r"^    [\d-]* \(\d{4}-\d\d-\d\d\)$", re.M)
FIRST = "model_rank0.npz"
SECOND = "model_rank1.npz"


@dataclass(frozen=True)
class Row:
    """A short run in a world.

    Attributes:
        ranks: of the worlds of the first two tiers.
        batch: examples a step, of all ranks together; 0 if the options say it.
        files: what is left beside the log, with the shape of one of its arrays.
        bounds: of the last entry of the log, both exclusive.
        said: how often the output has these words.
        epochs: how many entries the log has.
        only_there: whether other numbers of ranks are refused.
    """

    script: Path
    options: tuple[object, ...]
    ranks: tuple[int, ...]
    files: dict[str, tuple[str, tuple[int, ...]]]
    bounds: dict[str, tuple[float, float]]
    said: dict[str, int] = field(default_factory=dict)
    batch: int = 0
    epochs: int = 3
    only_there: bool = False


ROWS = {
    "mnist": Row(
        MNIST,
        ("--epoch", 3, "--unit", 60),
        (1, 2, 3, 4),
        {"model.npz": ("predictor/l1/W", (60, 64))},
        {LOSS: (0, 1), HELD_OUT: (0.8, 1.01)},
        {DIGITS: 1, "communicator hierarchical, ranks ": 1, "validation accuracy ": 1},
        batch=40,
    ),
    "layers": Row(
        LAYERS,
        TWO_PARTS,
        (2,),
        {
            FIRST: ("predictor/0/linear/W", (60, 64)),
            SECOND: ("0/linear/W", (60, 60)),
        },
        {LOSS: (0, 1), HELD_OUT: (0.8, 1.01)},
        {DIGITS: 1},
        only_there=True,
    ),
    "layers and copies": Row(
        DUAL,
        TWO_PARTS,
        (2, 4),
        {FIRST: ("predictor/1/W", (10, 60)), SECOND: ("0/linear/b", (60,))},
        {LOSS: (0, 1), HELD_OUT: (0.8, 1.01)},
        {DIGITS: 1, "copies of the model, each on 2 ranks": 1},
        only_there=True,
    ),
    "shards and copies": Row(
        SHARDED,
        TWO_PARTS,
        (2, 4),
        {
            FIRST: ("predictor/l1/W", (30, 64)),
            SECOND: ("predictor/l2/W", (10, 30)),
        },
        {LOSS: (0, 1.6), HELD_OUT: (0.8, 1.01)},
        {DIGITS: 1, "copies of the model, each on 2 ranks": 1},
        only_there=True,
    ),
    "channels": Row(
        CONV,
        ("--epoch", 1, "--batchsize", 30, "--channels", 8),
        (1, 2, 3, 4),
        {},
        {HELD_OUT: (0.7, 1.01)},
        epochs=1,
    ),
    "photographs": Row(
        CIFAR,
        ("--epoch", 2),
        (1, 2),
        {"model.npz": ("predictor/fc/W", (10, 256))},
        {LOSS: (0, 2), RIGHT: (0.25, 1), HELD_OUT: (0.15, 1)},  # of ten classes
        {"1600 patches to learn, 400 to test": 1},
        batch=64,
        epochs=2,
    ),
    "photographs, normalized over ranks": Row(
        CIFAR,
        ("--epoch", 2, "--mnbn"),
        (3,),
        {"model.npz": ("predictor/fc/W", (10, 256))},
        {LOSS: (0, 2), RIGHT: (0.25, 1), HELD_OUT: (0.15, 1)},
        batch=64,
        epochs=2,
    ),
    "dates": Row(
        DATES,
        (*FEW_DATES, "--tests", 31),
        (1, 2),
        {"model.npz": ("score/W", (13, 64))},
        {LOSS: (0, 1.5), RIGHT: (0.45, 1), EXACT: (-1, 1)},  # of 13 characters
        batch=48,
    ),
    "dates, encoder and decoder apart": Row(
        DATES_APART,
        (*FEW_DATES, "--tests", 30, "--batchsize", 48),
        (2,),
        {
            "encoder.npz": ("rnn/actual_rnn/0/w0", (64, 64)),
            "decoder.npz": ("score/W", (13, 64)),
        },
        {LOSS: (0, 1.5), EXACT: (-1, 1)},
        only_there=True,
    ),
}


def marked(name):
    row = ROWS[name]
    if row.only_there:
        mark = pytest.mark.sizes
    else:
        mark = pytest.mark.ranks
    marks = [mark(*row.ranks)]
    if row.script not in (MNIST, CONV):
        marks.append(pytest.mark.ci)
    return pytest.param(name, marks=marks)


@pytest.mark.world
@pytest.mark.parametrize("name", [marked(name) for name in ROWS])
def test_an_example_learns_and_leaves_what_it_says(name, world, folder):
    row = ROWS[name]
    options = row.options
    if row.batch:
        options += ("--batchsize", row.batch // world.size)
    out = train_here(row.script, *options)
    result = folder / "result"
    log = log_of(result)
    assert len(log) == row.epochs
    for key, (least, most) in row.bounds.items():
        assert least < log[-1][key] < most, key
    for words, times in row.said.items():
        assert out.count(words) == times, words
    left = {file.name for file in result.iterdir()} - {"log", "curves.png"}
    if row.script == CONV:
        parts = {f"model_rank{r}of{world.size}.npz" for r in range(world.size)}
        assert left == parts
    else:
        assert left == row.files.keys()
    for file, (array, shape) in row.files.items():
        assert shapes(result / file)[array] == shape
    if EXACT in row.bounds:
        assert len(SAMPLE.findall(out)) == 5


@pytest.mark.world
@pytest.mark.sizes(1, 3)
@pytest.mark.parametrize("script", [LAYERS, DUAL, SHARDED, DATES_APART])
def test_another_number_of_ranks_is_refused_on_all(script, folder):
    with pytest.raises(ValueError, match="use mpiexec -n"):
        train_here(script)
    assert not list(folder.iterdir())


@pytest.mark.ci
@pytest.mark.world
@pytest.mark.ranks(1, 2)
def test_the_generator_comes_near_to_digits(world, folder):
    # 57 iterations.
    out = train_here(DCGAN, "--epoch", world.size, "--picture", world.size)
    assert out.count("1797 digits") == 1
    result = folder / "result"
    assert {"discriminator/loss", "generator/loss"} < log_of(result)[-1].keys()
    name = f"epoch_{world.size:02}.png"
    assert {file.name for file in result.iterdir()} == {"log", "generator.npz", name}
    with Image.open(result / name) as picture:
        assert picture.size == (640, 320)
    with imported(DCGAN) as dcgan:
        digits = dcgan.load_digits().reshape(-1, 64)
        generator = dcgan.Generator()
        before = distance(dcgan.chainer, generator, digits)
        dcgan.chainer.serializers.load_npz(result / "generator.npz", generator)
        assert distance(dcgan.chainer, generator, digits) < 0.8 * before


def distance(chainer, generator, digits):
    """The mean distance from digits to the nearest of the images that it makes."""
    z = generator.draw(256, RandomState(1))
    with chainer.using_config("train", False):
        images = generator(z).array.reshape(-1, 64)
    between = ((images[:, None] - digits) ** 2).mean(axis=2) ** 0.5
    return between.min(axis=0).mean()


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "channels"), [(2, (3, 2)), *in_full((3, (2, 2, 1)))])
def test_split_channels_give_what_one_process_gives(ranks, channels, tmp_path):
    small = ("--epoch", 1, "--batchsize", 120, "--channels", 5)
    split = tmp_path / "split"
    train(ranks, CONV, *small, "--out", split)
    train_here(CONV, *small, "--out", tmp_path / "alone")
    for one, other in zip(log_of(tmp_path / "alone"), log_of(split), strict=True):
        assert one.pop("elapsed_time")
        assert other.pop("elapsed_time")
        assert other == pytest.approx(one, rel=1e-4)
    parts = [shapes(split / f"model_rank{r}of{ranks}.npz") for r in range(ranks)]
    expected = [(part, 1, 3, 3) for part in channels]
    assert [part["conv1/W"] for part in parts] == expected


@pytest.mark.ci
def test_dates_in_words_are_the_dates():
    with imported(DATES.with_name("dates.py")) as dates:
        for date, day_first, words in (
            ((1987, 3, 21), True, "the twenty first of march nineteen eighty seven"),
            ((1900, 1, 30), False, "january thirtieth nineteen hundred"),
            ((2005, 12, 31), True, "the thirty first of december twenty oh five"),
            ((2010, 5, 20), False, "may twentieth twenty ten"),
        ):
            found = " ".join(dates.in_words(datetime.date(*date), day_first))
            assert found == words
        learnt, held_out = dates.make_corpus(dates.DAYS - 1000, 1000, seed=0)
        ours = {dates.characters_of(target) for _, target in learnt}
        assert len(ours) == dates.DAYS - 1000
        assert not ours & {dates.characters_of(target) for _, target in held_out}


@pytest.mark.ci
def test_no_patch_of_photographs_is_in_both_sets():
    with imported(CIFAR) as cifar:
        learnt, held_out = cifar.load_patches()
    pixels = {x.tobytes() for x, _ in held_out}
    assert not [t for x, t in learnt if x.tobytes() in pixels]
    labels = [t for part in (learnt, held_out) for _, t in part]
    assert np.bincount(labels).tolist() == [200] * 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks", "key", "least"),
    [
        (LAYERS, 2, HELD_OUT, 0.95),
        (DUAL, 4, HELD_OUT, 0.95),
        (SHARDED, 4, HELD_OUT, 0.94),
        (CONV, 2, HELD_OUT, 0.95),
        (DATES_APART, 2, EXACT, 0.9),
        *[(DATES, ranks, EXACT, 0.9) for ranks in (1, 2, 4)],
        *[(CIFAR, ranks, HELD_OUT, 0.5) for ranks in (1, 2, 4)],
    ],
)
def test_whole_runs_end_as_their_readmes_say(script, ranks, key, least, tmp_path):
    train(ranks, script, "--out", tmp_path, seconds=3600)
    log = log_of(tmp_path)
    assert log[-1][key] > least
    if script == CIFAR:
        assert log[0]["lr"] > log[-1]["lr"]  # it shifts on all ranks
