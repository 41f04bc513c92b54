"""The examples of model parallelism run and learn."""

import datetime
import re

import pytest

from tests.support.jobs.examples import (
    CONV,
    DATES,
    DATES_APART,
    DUAL,
    LAYERS,
    log_of,
    shapes,
    train,
    train_here,
)
from tests.support.jobs.scripts import imported


@pytest.mark.ci
@pytest.mark.world
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LAYERS, marks=pytest.mark.sizes(2)),
        pytest.param(DUAL, marks=[pytest.mark.sizes(2, 4), pytest.mark.ranks(2, 4)]),
    ],
)
def test_layers_on_two_ranks_learn(script, world, folder):
    out = train_here(script, "--epoch", 3, "--unit", 60, "--batchsize", 20)
    result = folder / "result"
    log = log_of(result)
    assert len(log) == 3
    assert log[-1]["main/loss"] < log[0]["main/loss"] / 2
    assert 0.8 < log[-1]["validation/main/accuracy"] <= 1
    assert out.count("1440 digits to learn, 357 to test; batch 20") == 1
    assert (
        script == LAYERS
        or f"{world.size // 2} copies of the model, each on 2 ranks" in out
    )

    first, middle = (shapes(result / f"model_rank{rank}.npz") for rank in range(2))
    assert first["predictor/0/linear/W"] == (60, 64)
    assert first["predictor/1/W"] == (10, 60)
    assert middle == {"0/linear/W": (60, 60), "0/linear/b": (60,)}
    assert len(list(result.glob("*.npz"))) == 2


@pytest.mark.world
@pytest.mark.sizes(1, 3)
@pytest.mark.parametrize("script", [LAYERS, DUAL, DATES_APART])
def test_another_number_of_ranks_is_refused_on_all(script, folder):
    with pytest.raises(ValueError, match="use mpiexec -n"):
        train_here(script)
    assert not list(folder.iterdir())


@pytest.mark.ci
@pytest.mark.world
@pytest.mark.sizes(2)
def test_encoder_and_decoder_on_two_ranks_learn(folder):
    small = (
        "--examples",
        480,
        "--tests",
        30,
        "--unit",
        64,
        "--batchsize",
        48,
        "--epoch",
        3,
    )
    out = train_here(DATES_APART, *small)
    result = folder / "result"
    log = log_of(result)
    assert len(log) == 3
    assert log[-1]["main/loss"] < 1.5  # log(13) is guessing
    assert all(0 <= entry["validation/exact"] <= 1 for entry in log)
    assert len(re.findall(r"^    [\d-]* \(\d{4}-\d\d-\d\d\)$", out, re.M)) == 5
    assert shapes(result / "encoder.npz")["rnn/actual_rnn/0/w0"] == (64, 64)
    assert shapes(result / "decoder.npz")["score/W"] == (13, 64)


@pytest.mark.ci
def test_dates_in_words_are_the_dates():
    with imported(DATES.with_name("dates.py")) as dates:
        for date, day_first, words in (
            ((1987, 3, 21), True, "the twenty first of march nineteen eighty seven"),
            ((1987, 3, 21), False, "march twenty first nineteen eighty seven"),
            ((1900, 1, 30), False, "january thirtieth nineteen hundred"),
            ((2005, 12, 31), True, "the thirty first of december twenty oh five"),
            ((2010, 5, 20), False, "may twentieth twenty ten"),
            ((2019, 6, 1), False, "june first twenty nineteen"),
            ((2040, 8, 12), False, "august twelfth twenty forty"),
        ):
            assert " ".join(dates.in_words(datetime.date(*date), day_first)) == words
        assert dates.FIRST_DAY + datetime.timedelta(dates.DAYS) == datetime.date(
            2100, 1, 1
        )

        learnt, held_out = dates.make_corpus(dates.DAYS - 1000, 1000, seed=0)
        ours, others = (
            {dates.characters_of(target) for _, target in part}
            for part in (learnt, held_out)
        )
        assert len(ours) == dates.DAYS - 1000
        assert not ours & others
        sources = {dates.words_of(source) for source, _ in learnt}
        assert len(sources) == len(learnt)  # no two dates in the same words


@pytest.mark.world
@pytest.mark.ranks(1, 2, 3, 4)
def test_channels_on_any_number_of_ranks_learn(world, folder):
    train_here(CONV, "--epoch", 1, "--batchsize", 30, "--channels", 8)
    result = folder / "result"
    assert log_of(result)[-1]["validation/main/accuracy"] > 0.7  # of ten digits
    assert len(list(result.glob(f"model_rank?of{world.size}.npz"))) == world.size


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "channels"),
    [(2, (3, 2)), pytest.param(3, (2, 2, 1), marks=pytest.mark.full)],
)
def test_split_channels_give_what_one_process_gives(ranks, channels, tmp_path):
    small = ("--epoch", 1, "--batchsize", 120, "--channels", 5)
    train(ranks, CONV, *small, "--out", tmp_path / "split")
    train_here(CONV, *small, "--out", tmp_path / "alone")
    alone, split = (log_of(tmp_path / name) for name in ("alone", "split"))
    for one, other in zip(alone, split, strict=True):
        assert one.pop("elapsed_time")
        assert other.pop("elapsed_time")
        assert other == pytest.approx(one, rel=1e-4)
    files = [
        tmp_path / "split" / f"model_rank{rank}of{ranks}.npz" for rank in range(ranks)
    ]
    parts = [shapes(file) for file in files]
    assert [part["conv1/W"] for part in parts] == [(part, 1, 3, 3) for part in channels]
    assert sum(part["conv2/W"][0] for part in parts) == 10
    assert ["last/W" in part for part in parts] == [rank == 0 for rank in range(ranks)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks"),
    [(LAYERS, 2), (DUAL, 4), (CONV, 2), (DATES_APART, 2)],
)
def test_whole_runs_reach_what_one_process_reaches(script, ranks, tmp_path):
    train(ranks, script, "--out", tmp_path, seconds=3600)
    last = log_of(tmp_path)[-1]
    assert last.get("validation/exact", 1) >= 0.9
    assert last.get("validation/main/accuracy", 1) >= 0.95
