"""Programs as others wrote them give what one process computes; a mistake in one ends the job."""

from __future__ import annotations

import json
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizers import SGD

from tests.compatibility.programs import (
    aggregating_evaluator,
    duck_typed_optimizer,
    filter_parallel_convolution,
    gan_updater,
    hand_written_loop,
)
from tests.support.jobs import runner

FOLDER = Path(__file__).parent / "programs"
SECONDS = 120.0  # ends a hang, no more


def run_program(name, ranks, folder, *change):
    """Run a program, each of whose ``change`` puts a text in the place of another one."""
    text = (FOLDER / f"{name}.py").read_text()
    for before, after in change:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
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


def of_hand_written_loop(ranks):
    model = hand_written_loop.make_model(seed=0)
    optimizer = hand_written_loop.make_optimizer().setup(model)
    # The first `update()` without a loss function gives all ranks rank 0's state.
    for step in range(1, hand_written_loop.STEPS):
        parts = batches(hand_written_loop.make_examples(), ranks, 4, step)
        losses = [hand_written_loop.loss_of(model, part) for part in parts]
        step_along_mean(optimizer, losses)
    times = list(range(hand_written_loop.STEPS))
    return [{"t": times, "weights": weights(model)}] * ranks


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
    inputs = np.random.RandomState(1).uniform(-1, 1, (24, 3)).astype(np.float32)
    for step in range(6):
        parts = batches(inputs, ranks, 4, step)
        step_along_mean(
            optimizer,
            [F.mean_squared_error(model(part), part[:, :1] - 1) for part in parts],
            lambda gradients: np.sign(sum(map(np.sign, gradients))),
        )
    return [weights(model)] * ranks


def of_aggregating_evaluator(ranks):
    inputs, labels = chainer.dataset.concat_examples(
        aggregating_evaluator.make_examples()[:]
    )
    predicted = aggregating_evaluator.make_network()(inputs).array.argmax(axis=1)
    kinds = range(aggregating_evaluator.CLASSES)
    matrix = [
        [int(np.sum((labels == label) & (predicted == kind))) for kind in kinds]
        for label in kinds
    ]
    right = int(np.sum(labels == predicted)) / len(labels)
    noted = {"validation/matrix": matrix, "validation/accuracy": right}
    return [[noted] * 2] * ranks


def of_filter_parallel_convolution(ranks):
    whole = filter_parallel_convolution.make_filters()
    images = chainer.Parameter(filter_parallel_convolution.make_images())
    outputs = F.convolution_2d(images, whole, pad=1).array.tolist()
    found = []
    for part in np.array_split(whole, ranks):
        filters = chainer.Parameter(part)
        images.cleargrad()
        # Each rank adds up the whole loss, and its filters get the gradients of all.
        loss = ranks * F.sum(F.convolution_2d(images, filters, pad=1) ** 2)
        filters.cleargrad()
        loss.backward()
        gradients = {"filters": filters.grad.tolist(), "images": images.grad.tolist()}
        found.append({"outputs": outputs} | gradients)
    return found


EXPECTED = {
    name.removeprefix("of_"): function
    for name, function in list(vars().items())
    if name.startswith("of_")
}


def test_each_program_is_run():
    assert EXPECTED.keys() == {path.stem for path in FOLDER.glob("*.py")}
    assert len(EXPECTED) == 6


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_gives_what_one_process_computes(name, ranks, tmp_path):
    assert printed(run_program(name, ranks, tmp_path)) == EXPECTED[name](ranks)


UPDATES_JUDGE = (
    '        self.get_optimizer("judge").update(self.loss_of_judge, on_real, on_fake)'
)
# A program, a text of it, what stands before that by mistake, and what the job's errors say.
MISTAKES = {
    "a rank raises": (
        "gan_updater",
        UPDATES_JUDGE,
        '        1 / (self.get_optimizer("judge").communicator.rank != 1)\n',
        "rank 1 of 2: uncaught ZeroDivisionError, ending the job",
    ),
    "a rank updates its two optimizers in another order": (
        "gan_updater",
        UPDATES_JUDGE,
        '        if self.get_optimizer("judge").communicator.rank == 1:\n'
        '            self.get_optimizer("maker").update(self.loss_of_maker, on_fake)\n',
        "ranks disagree on optimizer, by creation: number",
    ),
    "a rank skips an update": (
        "hand_written_loop",
        "        optimizer.update()",
        "        if comm.rank == 1 and len(times) == 2:\n"
        "            times.append(0)\n            continue\n",
        "update on rank 0; gather_obj on rank 1",
    ),
    "a rank steps alone": (
        "duck_typed_optimizer",
        "self.starts is None:",
        "self.communicator.rank == 1 or ",
        "ranks disagree on element",
    ),
    "a rank gathers where others allgather": (
        "filter_parallel_convolution",
        "        parts = chainermn",
        "        if self.comm.rank == 1:\n"
        "            chainermn.functions.gather(self.comm, super().forward(x), 0)\n",
        "allgather on rank 0; chainermn.functions: gather on rank 1",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_ends_the_job_and_names_the_rank_or_the_difference(what, tmp_path):
    program, text, mistake, said = MISTAKES[what]
    job = run_program(program, 2, tmp_path, (text, mistake + text))
    assert job.returncode not in (0, None), job
    assert said in job.err, job
