"""A mistake of the user's is told once by all ranks together, and ends an example with status 2."""

from pathlib import Path
from typing import Any

import chainer
import pytest

from tests.support.examples import (
    CONV,
    DATES,
    DUAL,
    IMAGENET,
    LAYERS,
    MNIST,
    reported_once,
    train_here,
)
from tests.support.jobs import run


def case(script: Path, ranks: int, arguments: str, *words: str) -> Any:
    how = {"id": f"{script.stem} {arguments}", "marks": pytest.mark.sizes(ranks)}
    return pytest.param(script, arguments.split(), words, **how)


# And how many images are in each.
FOLDERS = {"images/train/cat": 10, "images/val/cat": 2, "empty/train": 0, "killed": 0}
FOLDERS |= {"unlike/train/cat": 1, "unlike/val/dog": 1}


@pytest.mark.world
@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        case(MNIST, 2, "--batchsize 0", "--batchsize", "0 is not positive"),
        case(MNIST, 2, "--batchsize -3", "-3 is not positive"),
        case(MNIST, 2, "--batchsize 721", "--batchsize 721", "a rank has 720 training examples"),
        case(MNIST, 2, "--epoch 0", "--epoch", "0 is not positive"),
        case(MNIST, 2, "--communicator bogus", "bogus", "naive", "flat"),
        case(MNIST, 2, "--resume nowhere", "--resume nowhere", "No such file"),
        case(MNIST, 2, "--resume .", "--resume .", "holds no snapshot"),
        case(MNIST, 2, "--out /dev/null/x", "--out", "cannot write there", "Not a directory"),
        case(MNIST, 2, "--gpu", "--gpu: "),
        case(LAYERS, 1, "", "the model lies on 2 ranks, not 1"),
        case(LAYERS, 3, "", "the model lies on 2 ranks, not 3"),
        case(DUAL, 3, "", "each copy of the model lies on 2 ranks: a multiple is needed"),
        case(DUAL, 4, "--batchsize 721", "a rank has 720 training examples"),
        case(DATES, 1, "", "encoder and decoder need a rank each: mpiexec -n 2"),
        case(DATES, 3, "", "encoder and decoder need a rank each: mpiexec -n 2"),
        case(DATES, 2, "--examples 73000", "there are 73049 dates in all"),
        case(DATES, 2, "--epoch 0", "0 is not positive"),
        case(DATES, 2, "--examples 50 --batchsize 51", "a rank has 50 training examples"),
        case(DATES, 2, "--communicator fast", "unknown communicator 'fast'"),
        case(DATES, 2, "--out /dev/null/x", "--out /dev/null/x: cannot write there"),
        case(CONV, 3, "--channels 2", "3 ranks are too many for --channels 2"),
        case(CONV, 2, "--batchsize 0", "0 is not positive"),
        case(CONV, 2, "--batchsize 1441", "a rank has 1440 training examples"),
        case(CONV, 2, "--communicator pure_nccl", "on CPUs use one of"),
        case(CONV, 2, "--gpu", "--gpu: "),
        case(IMAGENET, 2, "images --epoch 0", "0 is not positive"),
        case(IMAGENET, 2, "images --batchsize 6", "a rank has 5 training examples"),
        case(IMAGENET, 2, "images --communicator fast", "unknown communicator 'fast'"),
        case(IMAGENET, 2, "images --out /dev/null/x", "/dev/null/x: cannot write there"),
        case(IMAGENET, 2, "images --gpu", "--gpu: "),
        case(IMAGENET, 2, "images --out killed", "go on with it by --resume"),
        case(IMAGENET, 2, "empty", "has no images in it"),
        case(IMAGENET, 2, "none", "is no folder"),
        case(IMAGENET, 2, "unlike", "train has classes"),
    ],
)
def test_mistake_is_reported_once_and_ends_the_job(
    script, arguments, words, world, folder, monkeypatch
):
    monkeypatch.setattr(chainer.backends.cuda, "available", False)  # even where there are GPUs
    if world.rank == 0:
        for name, images in FOLDERS.items():
            (folder / name).mkdir(parents=True)
            for i in range(images):
                (folder / name / f"{i}.png").touch()
        (folder / "killed" / "imagenet.commit.4").touch()
    world.barrier()
    reported_once(train_here(script, *arguments), script, *words)
    assert not list((folder / "result").glob("*"))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("--epoch 0", marks=pytest.mark.full),  # by argparse
        pytest.param("--communicator bogus", marks=pytest.mark.full),  # by each rank for itself
        "--batchsize 721",  # by all ranks together
    ],
)
def test_a_job_ends_by_a_mistake_as_by_no_failure(arguments, tmp_path):
    reported_once(run(2, MNIST, *arguments.split(), cwd=tmp_path, seconds=600), MNIST)
