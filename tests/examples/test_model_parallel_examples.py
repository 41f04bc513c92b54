"""The examples of model parallelism run, learn, and tell a wrong number of ranks once."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import Job, run

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL_PARALLEL = EXAMPLES / "mnist" / "train_mnist_model_parallel.py"
DUAL_PARALLEL = EXAMPLES / "mnist" / "train_mnist_dual_parallel.py"
SEQ2SEQ = EXAMPLES / "seq2seq" / "train_seq2seq.py"
CONVOLUTION = EXAMPLES / "parallel_convolution" / "train_parallel_convolution.py"
SECONDS = 300  # ends a hang, no more
SECONDS_WHOLE = 3600
SMALL_CORPUS = ("--examples", "200", "--tests", "30", "--unit", "16", "--batchsize", "20")


def train(ranks: int, script: Path, out: Path, *arguments: object, seconds: float = SECONDS) -> Job:
    job = run(ranks, script, "--out", out, *arguments, seconds=seconds)
    assert job.returncode == 0, job
    assert "Traceback" not in job.err
    assert "Warning" not in job.err
    return job


def log_of(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "log").read_text())


def last_accuracy(job: Job) -> float:
    (found,) = re.findall(r"validation accuracy ([\d.]+) after", job.out)  # one rank tells it
    return float(found)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with np.load(path) as file:
        return {name: file[name].shape for name in file.files}


@pytest.mark.parametrize(("script", "ranks"), [(MODEL_PARALLEL, 2), (DUAL_PARALLEL, 4)])
def test_layers_on_two_ranks_learn(script, ranks, tmp_path):
    job = train(ranks, script, tmp_path, "--epoch", 3, "--unit", 60, "--batchsize", 20)
    log = log_of(tmp_path)
    assert [entry["epoch"] for entry in log] == [1, 2, 3]
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


def test_one_copy_of_the_model_is_enough_for_dual_parallelism(tmp_path):
    job = train(2, DUAL_PARALLEL, tmp_path, "--epoch", 1, "--unit", 20)
    assert "1 copies of the model on 2 ranks each" in job.out


def test_encoder_and_decoder_on_two_ranks_learn(tmp_path):
    job = train(2, SEQ2SEQ, tmp_path, *SMALL_CORPUS, "--epoch", 3)
    log = log_of(tmp_path)
    assert [entry["epoch"] for entry in log] == [1, 2, 3]
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert all(0 <= entry["validation/exact"] <= 1 for entry in log)
    assert job.out.count("epoch       main/loss") == 1
    assert len(re.findall(r"^    [\d-]* \(\d{4}-\d\d-\d\d\)$", job.out, re.M)) == 5
    assert job.out.count("of 30 dates that it never saw are translated exactly") == 1
    assert shapes(tmp_path / "encoder.npz")["rnn/actual_rnn/0/w0"] == (16, 16)
    assert shapes(tmp_path / "decoder.npz")["score/W"] == (13, 16)


def test_dates_in_words_are_the_dates(monkeypatch):
    dates = module(monkeypatch, SEQ2SEQ.with_name("dates.py"))
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
    targets = [[dates.characters_of(target) for _, target in part] for part in (learnt, held_out)]
    assert len(set(targets[0])) == dates.DAYS - 1000
    assert not set(targets[0]) & set(targets[1])
    sources = {dates.words_of(source) for source, _ in learnt}
    assert len(sources) == len(learnt)  # no two dates in the same words


def module(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, found)
    spec.loader.exec_module(found)
    return found


def test_split_channels_give_what_one_process_gives(tmp_path):
    arguments = ("--epoch", 2, "--batchsize", 120, "--channels", 4)
    for ranks in (1, 3):  # which have 2, 1 and 1 channels of the first layer
        train(ranks, CONVOLUTION, tmp_path / str(ranks), *arguments)
    alone, split = (log_of(tmp_path / str(ranks)) for ranks in (1, 3))
    for one, other in zip(alone, split, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"elapsed_time"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4), key
    parts = [shapes(tmp_path / "3" / f"model_rank{rank}of3.npz") for rank in range(3)]
    assert [part["conv1/W"] for part in parts] == [(2, 1, 3, 3), (1, 1, 3, 3), (1, 1, 3, 3)]
    assert [part["conv2/W"][0] for part in parts] == [3, 3, 2]
    assert ["last/W" in part for part in parts] == [True, False, False]


@pytest.mark.parametrize(
    ("script", "ranks", "arguments", "words"),
    [
        (MODEL_PARALLEL, 1, (), "the model lies on 2 ranks, not 1"),
        (MODEL_PARALLEL, 3, (), "the model lies on 2 ranks, not 3"),
        (DUAL_PARALLEL, 3, (), "each copy of the model lies on 2 ranks: a multiple is needed, not"),
        (DUAL_PARALLEL, 4, ("--batchsize", 721), "a rank has 720 training examples"),
        (SEQ2SEQ, 1, (), "encoder and decoder need a rank each: mpiexec -n 2"),
        (SEQ2SEQ, 3, (), "encoder and decoder need a rank each: mpiexec -n 2"),
        (SEQ2SEQ, 2, ("--examples", 73000), "there are 73049 dates in all"),
        (SEQ2SEQ, 2, ("--epoch", 0), "0 is not positive"),
        (CONVOLUTION, 3, ("--channels", 2), "3 ranks are too many for --channels 2"),
        (SEQ2SEQ, 2, ("--examples", 50, "--batchsize", 51), "a rank has 50 training examples"),
        (CONVOLUTION, 2, ("--batchsize", 0), "0 is not positive"),
        (CONVOLUTION, 2, ("--batchsize", 1441), "a rank has 1440 training examples"),
        (SEQ2SEQ, 2, ("--communicator", "fast"), "unknown communicator 'fast'"),
        (SEQ2SEQ, 2, ("--out", "/dev/null/x"), "--out /dev/null/x: cannot write there"),
        (CONVOLUTION, 2, ("--communicator", "pure_nccl"), "on CPUs use one of"),
        (CONVOLUTION, 2, ("--gpu",), "--gpu: "),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_mistake_is_told_once_and_ends_the_job(script, ranks, arguments, words, tmp_path):
    job = run(ranks, script, *arguments, cwd=tmp_path, seconds=SECONDS)
    assert job.returncode == 2, job
    told = [line for line in job.err.splitlines() if line.startswith(f"{script.name}: ")]
    assert len(told) == 1, job
    assert words in told[0]
    assert "Traceback" not in job.err
    assert "ending the job" not in job.err  # a mistake of the user is no failure of a rank


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks"), [(MODEL_PARALLEL, 2), (DUAL_PARALLEL, 4), (CONVOLUTION, 2)]
)
def test_whole_runs_on_digits_reach_what_one_process_reaches(script, ranks, tmp_path):
    assert last_accuracy(train(ranks, script, tmp_path, seconds=SECONDS_WHOLE)) >= 0.95


@pytest.mark.full
def test_whole_run_translates_dates_that_it_never_saw(tmp_path):
    train(2, SEQ2SEQ, tmp_path, seconds=SECONDS_WHOLE)
    assert log_of(tmp_path)[-1]["validation/exact"] >= 0.9
