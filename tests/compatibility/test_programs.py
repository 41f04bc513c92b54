"""Programs as others wrote them give what one process computes."""

from __future__ import annotations

import json
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizers import SGD
from numpy.random import RandomState

from tests.compatibility.programs import (
    duck_typed_optimizer,
    gan_updater,
)
from tests.support.jobs import runner

FOLDER = Path(__file__).parent / "programs"
SECONDS = 120.0  # ends a hang, no more


def run_program(name, ranks, folder):
    text = (FOLDER / f"{name}.py").read_text()
    return runner.run_text(ranks, text, folder, seconds=SECONDS)


def printed(job):
    assert job.returncode == 0, job
    return json.loads(job.out.splitlines()[-1])


# What one process computes of the same examples. Plain Chainer steps along the mean of
# the gradients that ranks would have.


def batches(examples, ranks, size, step):
    """The examples that each rank has in a step, where they are dealt in order."""
    length = len(examples) // ranks
    start = step * size % length
    return [
        examples[rank * length + start : rank * length + start + size]
        for rank in range(ranks)
    ]


def mean(gradients):
    return sum(gradients[1:], gradients[0]) / len(gradients)


def step_along_mean(
    optimizer,
    losses,
    mean=mean,
):
    """Step along the mean of these losses' gradients, a loss for each rank."""
    params = list(optimizer.target.params())
    found = []
    for loss in losses:
        optimizer.target.cleargrads()
        loss.backward()
        found.append([param.grad.copy() for param in params])
    for param, gradients in zip(params, zip(*found, strict=True), strict=True):
        param.grad = mean(gradients)
    optimizer.update()


def weights(*models):
    return [param.array.tolist() for model in models for param in model.params()]


def of_gan_updater(ranks):
    maker, judge = gan_updater.make_models()
    of_maker = gan_updater.make_optimizer().setup(maker)
    of_judge = gan_updater.make_optimizer().setup(judge)
    updater = gan_updater.GanUpdater
    for step in range(6):
        on_real = []
        on_fake = []
        for batch in batches(gan_updater.make_examples(), ranks, 4, step):
            real, noise = chainer.dataset.concat_examples(batch)
            on_fake.append(judge(maker(noise)))
            on_real.append(judge(real))
        pairs = zip(on_real, on_fake, strict=True)
        step_along_mean(
            of_judge, [updater.loss_of_judge(None, *pair) for pair in pairs]
        )
        step_along_mean(
            of_maker, [updater.loss_of_maker(None, each) for each in on_fake]
        )
    return [weights(maker, judge)] * ranks


def of_duck_typed_optimizer(ranks):
    model = duck_typed_optimizer.make_model()
    optimizer = duck_typed_optimizer.make_optimizer().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
    starts = []
    for step in range(8):
        parts = batches(duck_typed_optimizer.make_examples(), ranks, 4, step)
        step_along_mean(
            optimizer, [model(*chainer.dataset.concat_examples(part)) for part in parts]
        )
        if step % 2 == 0:
            starts = [param.array.copy() for param in model.params()]
        else:
            for param, start in zip(model.params(), starts, strict=True):
                param.array = (param.array + start) / 2
        optimizer.lr /= 2
    return [{"lr": optimizer.lr, "weights": weights(model)}] * ranks


def of_communicator_subclass(ranks):
    np.random.seed(0)
    model = L.Linear(3, 1)
    optimizer = SGD(lr=0.125).setup(model)
    inputs = RandomState(1).uniform(-1, 1, (24, 3)).astype(np.float32)
    for step in range(6):
        parts = batches(inputs, ranks, 4, step)

        def vote(gradients):
            return np.sign(sum(map(np.sign, gradients)))

        step_along_mean(
            optimizer,
            [F.mean_squared_error(model(part), part[:, :1] - 1) for part in parts],
            vote,
        )
    return [weights(model)] * ranks


EXPECTED = {
    name.removeprefix("of_"): function
    for name, function in list(vars().items())
    if name.startswith("of_")
}


def test_each_program_is_run():
    assert EXPECTED.keys() == {path.stem for path in FOLDER.glob("*.py")}
    assert len(EXPECTED) == 3


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_gives_what_one_process_computes(name, ranks, tmp_path):
    found = printed(run_program(name, ranks, tmp_path))
    assert found == EXPECTED[name](ranks)
