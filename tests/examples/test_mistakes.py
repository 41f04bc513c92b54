"""A mistake of the user's is told once by all ranks together, and ends an example with status 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import (
    CONVOLUTION,
    DUAL_PARALLEL,
    IMAGENET,
    MNIST,
    MODEL_PARALLEL,
    SECONDS,
    SEQ2SEQ,
    told_once,
    train_here,
)
from tests.support.jobs import run


def case(script: Path, ranks: int, arguments: str, *words: str) -> Any:
    marks = [pytest.mark.sizes(ranks)]
    return pytest.param(
        script, arguments.split(), words, id=f"{script.stem} {arguments}", marks=marks
    )


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
        case(MODEL_PARALLEL, 1, "", "the model lies on 2 ranks, not 1"),
        case(MODEL_PARALLEL, 3, "", "the model lies on 2 ranks, not 3"),
        case(DUAL_PARALLEL, 3, "", "each copy of the model lies on 2 ranks: a multiple is needed"),
        case(DUAL_PARALLEL, 4, "--batchsize 721", "a rank has 720 training examples"),
        case(SEQ2SEQ, 1, "", "encoder and decoder need a rank each: mpiexec -n 2"),
        case(SEQ2SEQ, 3, "", "encoder and decoder need a rank each: mpiexec -n 2"),
        case(SEQ2SEQ, 2, "--examples 73000", "there are 73049 dates in all"),
        case(SEQ2SEQ, 2, "--epoch 0", "0 is not positive"),
        case(SEQ2SEQ, 2, "--examples 50 --batchsize 51", "a rank has 50 training examples"),
        case(SEQ2SEQ, 2, "--communicator fast", "unknown communicator 'fast'"),
        case(SEQ2SEQ, 2, "--out /dev/null/x", "--out /dev/null/x: cannot write there"),
        case(CONVOLUTION, 3, "--channels 2", "3 ranks are too many for --channels 2"),
        case(CONVOLUTION, 2, "--batchsize 0", "0 is not positive"),
        case(CONVOLUTION, 2, "--batchsize 1441", "a rank has 1440 training examples"),
        case(CONVOLUTION, 2, "--communicator pure_nccl", "on CPUs use one of"),
        case(CONVOLUTION, 2, "--gpu", "--gpu: "),
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
def test_mistake_is_told_once_and_ends_the_job(script, arguments, words, world, folder, no_gpus):
    if world.rank == 0:
        for name in ("images/train/cat", "images/val/cat", "empty/train", "unlike/train/cat"):
            (folder / name).mkdir(parents=True)
        (folder / "unlike" / "val" / "dog").mkdir(parents=True)
        for name in [f"images/train/cat/{i}.png" for i in range(10)]:
            (folder / name).touch()
        for name in ("images/val/cat/0.png", "images/val/cat/1.png", "unlike/train/cat/0.png"):
            (folder / name).touch()
        (folder / "unlike" / "val" / "dog" / "0.png").touch()
        (folder / "killed").mkdir()
        (folder / "killed" / "imagenet.commit.4").touch()
    world.barrier()
    told_once(train_here(script, *arguments), script, *words)
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
    told_once(run(2, MNIST, *arguments.split(), cwd=tmp_path, seconds=SECONDS), MNIST)
