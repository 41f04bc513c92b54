"""The examples of model parallelism run and learn."""

import datetime
import re

import pytest

from tests.support.examples import CONV, DATES, DUAL, LAYERS, log_of, shapes, train, train_here
from tests.support.jobs import Job
from tests.support.scripts import imported


def last_accuracy(job: Job) -> float:
    (found,) = re.findall(r"validation accuracy ([\d.]+) after", job.out)  # one rank tells it
    return float(found)


@pytest.mark.parametrize(("script", "ranks"), [(LAYERS, 2), (DUAL, 4)])
def test_layers_on_two_ranks_learn(script, ranks, tmp_path):
    small = ("--epoch", 3, "--unit", 60, "--batchsize", 20)
    job = train(ranks, script, *small, "--out", tmp_path)
    log = log_of(tmp_path)
    assert len(log) == 3
    assert log[-1]["main/loss"] < log[0]["main/loss"] / 2
    assert 0.8 < log[-1]["validation/main/accuracy"] <= 1
    assert last_accuracy(job) == pytest.approx(log[-1]["validation/main/accuracy"], abs=1e-4)
    assert job.out.count("epoch       main/loss") == 1
    assert job.out.count("1440 training and 357 test examples") == 1

    first, middle = (shapes(tmp_path / f"model_rank{rank}.npz") for rank in range(2))
    assert first["predictor/0/l1/W"] == (60, 64)
    assert first["predictor/1/l3/W"] == (10, 60)
    assert middle == {"0/l2/W": (60, 60), "0/l2/b": (60,)}
    assert len(list(tmp_path.glob("*.npz"))) == 2


@pytest.mark.world
@pytest.mark.sizes(2)
def test_one_copy_of_the_model_is_enough_for_dual_parallelism(folder):
    job = train_here(DUAL, "--epoch", 1, "--unit", 20)
    assert "1 copies of the model on 2 ranks each" in job.out
    assert len(log_of(folder / "result")) == 1


def test_encoder_and_decoder_on_two_ranks_learn(tmp_path):
    small = ("--examples", 100, "--tests", 30, "--unit", 16, "--batchsize", 20, "--epoch", 2)
    job = train(2, DATES, *small, "--out", tmp_path)
    log = log_of(tmp_path)
    assert len(log) == 2
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert all(0 <= entry["validation/exact"] <= 1 for entry in log)
    assert job.out.count("epoch       main/loss") == 1
    assert len(re.findall(r"^    [\d-]* \(\d{4}-\d\d-\d\d\)$", job.out, re.M)) == 5
    assert job.out.count("of 30 dates that it never saw are translated exactly") == 1
    assert shapes(tmp_path / "encoder.npz")["rnn/actual_rnn/0/w0"] == (16, 16)
    assert shapes(tmp_path / "decoder.npz")["score/W"] == (13, 16)


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
        assert dates.FIRST_DAY + datetime.timedelta(dates.DAYS) == datetime.date(2100, 1, 1)

        learnt, held_out = dates.make_corpus(dates.DAYS - 1000, 1000, seed=0)
        ours, others = (
            {dates.characters_of(target) for _, target in part} for part in (learnt, held_out)
        )
        assert len(ours) == dates.DAYS - 1000
        assert not ours & others
        sources = {dates.words_of(source) for source, _ in learnt}
        assert len(sources) == len(learnt)  # no two dates in the same words


@pytest.mark.parametrize(
    ("ranks", "channels"), [(2, (3, 2)), pytest.param(3, (2, 2, 1), marks=pytest.mark.full)]
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
    files = [tmp_path / "split" / f"model_rank{rank}of{ranks}.npz" for rank in range(ranks)]
    parts = [shapes(file) for file in files]
    assert [part["conv1/W"] for part in parts] == [(part, 1, 3, 3) for part in channels]
    assert sum(part["conv2/W"][0] for part in parts) == 10
    assert ["last/W" in part for part in parts] == [rank == 0 for rank in range(ranks)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks"),
    [(LAYERS, 2), (DUAL, 4), (CONV, 2), (DATES, 2)],
)
def test_whole_runs_reach_what_one_process_reaches(script, ranks, tmp_path):
    job = train(ranks, script, "--out", tmp_path, seconds=3600)
    if script == DATES:
        assert log_of(tmp_path)[-1]["validation/exact"] >= 0.9
    else:
        assert last_accuracy(job) >= 0.95
