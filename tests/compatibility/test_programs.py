"""Programs as others wrote them give what one process computes; a mistake in one ends the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.compatibility.programs import (
    aggregating_evaluator,
    duck_typed_optimizer,
    filter_parallel_convolution,
    gan_updater,
    gatherv_extension,
    hand_written_loop,
    replica_set_snapshot,
    set_up_before_wrapped,
)
from tests.support.jobs import runner

FOLDER = Path(__file__).parent / "programs"
SECONDS = 120.0  # ends a hang, no more


def run_program(
    name: str, ranks: int, folder: Path, *change: tuple[str, str], **how: Any
) -> runner.Job:
    """Run a program, each of whose ``change`` puts a text in the place of another one."""
    text = (FOLDER / f"{name}.py").read_text()
    for before, after in change:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return runner.run_text(ranks, text, folder, seconds=SECONDS, **how)


def printed(job: runner.Job) -> Any:
    assert job.returncode == 0, job
    return json.loads(job.out.splitlines()[-1])


# What one process computes of the same examples. Plain Chainer steps along the mean of
# the gradients that ranks would have.


def batches(examples: Sequence[Any], ranks: int, size: int, step: int) -> list[Any]:
    """The examples that each rank has in a step, where they are dealt in order."""
    length = len(examples) // ranks
    start = step * size % length
    return [
        examples[rank * length + start : rank * length + start + size]
        for rank in range(ranks)
    ]


def mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
    return sum(gradients[1:], gradients[0]) / len(gradients)


def step_along_mean(
    optimizer: Any,
    losses: Iterable[chainer.Variable],
    mean: Callable[[Sequence[np.ndarray]], np.ndarray] = mean,
) -> None:
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


def weights(*models: chainer.Link) -> list[Any]:
    return [param.array.tolist() for model in models for param in model.params()]


def of_gan_updater(ranks: int) -> list[Any]:
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


def of_hand_written_loop(ranks: int) -> list[Any]:
    model = hand_written_loop.make_model(seed=0)
    optimizer = hand_written_loop.make_optimizer().setup(model)
    # The first `update()` without a loss function gives all ranks rank 0's state.
    for step in range(1, hand_written_loop.STEPS):
        parts = batches(hand_written_loop.make_examples(), ranks, 4, step)
        losses = [hand_written_loop.loss_of(model, part) for part in parts]
        step_along_mean(optimizer, losses)
    times = list(range(hand_written_loop.STEPS))
    return [{"t": times, "weights": weights(model)}] * ranks


def of_duck_typed_optimizer(ranks: int) -> list[Any]:
    model = duck_typed_optimizer.make_model()
    optimizer = duck_typed_optimizer.make_optimizer().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
    starts: list[np.ndarray] = []
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


def of_optimizer_subclass(ranks: int) -> list[Any]:
    np.random.seed(0)
    models = [L.Linear(2, 2)]
    models += [models[0].copy("copy") for _ in range(1, ranks)]
    optimizers = [chainer.optimizers.NesterovAG(lr=0.2).setup(each) for each in models]
    examples = np.random.RandomState(1).uniform(-1, 1, (24, 2)).astype(np.float32)
    found = [[weights(model)] for model in models]
    for step in range(1, 4):
        parts = batches(examples, ranks, 4, step)
        for model, optimizer, part in zip(models, optimizers, parts, strict=True):
            step_along_mean(optimizer, [F.mean(model(part) ** 2)])
        if step == 3:
            for params in zip(*[model.params() for model in models], strict=True):
                array = mean([param.array for param in params])
                for param in params:
                    param.array = array.copy()
        for model, seen in zip(models, found, strict=True):
            seen.append(weights(model))
    return [{"t": 3, "count": 3, "weights": seen} for seen in found]


def of_communicator_subclass(ranks: int) -> list[Any]:
    np.random.seed(0)
    model = L.Linear(3, 1)
    optimizer = chainer.optimizers.SGD(lr=0.125).setup(model)
    inputs = np.random.RandomState(1).uniform(-1, 1, (24, 3)).astype(np.float32)
    for step in range(6):
        parts = batches(inputs, ranks, 4, step)
        step_along_mean(
            optimizer,
            [F.mean_squared_error(model(part), part[:, :1] - 1) for part in parts],
            lambda gradients: np.sign(sum(map(np.sign, gradients))),
        )
    return [weights(model)] * ranks


def of_set_up_before_wrapped(ranks: int) -> list[Any]:
    model = set_up_before_wrapped.make_model(seed=0)
    optimizer = set_up_before_wrapped.make_optimizer(model)
    for step in range(5):
        parts = batches(set_up_before_wrapped.make_examples(), ranks, 2, step)
        losses = [set_up_before_wrapped.loss_of(model, part) for part in parts]
        step_along_mean(optimizer, losses)
    return [{"t": 6, "weights": weights(model)}] * ranks


def of_aggregating_evaluator(ranks: int) -> list[Any]:
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


def of_filter_parallel_convolution(ranks: int) -> list[Any]:
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


def of_gatherv_extension(ranks: int) -> list[Any]:
    outputs = gatherv_extension.make_model()(gatherv_extension.make_examples())
    return [outputs.array.ravel().tolist()] * 2


def of_replica_set_snapshot(ranks: int) -> list[Any]:
    model = replica_set_snapshot.make_model(seed=0)
    model.compute_accuracy = False
    optimizer = replica_set_snapshot.make_optimizer().setup(model)
    for step in range(7):
        parts = batches(replica_set_snapshot.make_examples(), ranks, 2, step)
        step_along_mean(
            optimizer, [model(*chainer.dataset.concat_examples(part)) for part in parts]
        )
    found = {"ran": list(range(1, 8)), "weights": weights(model)}
    others = found | {"logged": []}
    return [found | {"logged": list(range(1, 8))}] + [others] * (ranks - 1)


EXPECTED = {
    name.removeprefix("of_"): function
    for name, function in list(vars().items())
    if name.startswith("of_")
}


def test_each_program_is_run():
    assert EXPECTED.keys() == {path.stem for path in FOLDER.glob("*.py")}
    assert len(EXPECTED) == 10


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_gives_what_one_process_computes(name, ranks, tmp_path):
    assert printed(run_program(name, ranks, tmp_path)) == EXPECTED[name](ranks)


AT_5 = "        began.append(trainer.updater.iteration)\n"
IF_RANK_1 = (
    "        if comm.rank == 1 and began[-1] == {iteration}:\n            {does}\n"
)
INTERRUPTIONS = {
    "raises": (5, "raise OSError('interrupted')", [5, 6, 7]),
    "is killed": (5, "import os; os.kill(os.getpid(), 9)", [5, 6, 7]),
    "is killed before the first snapshot": (1, "import os; os._exit(1)", None),
    "exits after the last step": (7, "raise SystemExit(4)", [7]),
}


@pytest.mark.full
@pytest.mark.parametrize("how", INTERRUPTIONS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_snapshots_of_replica_sets_resume_an_interrupted_job(ranks, how, tmp_path):
    iteration, does, ran_again = INTERRUPTIONS[how]
    planted = IF_RANK_1.format(iteration=iteration, does=does)
    job = run_program("replica_set_snapshot", ranks, tmp_path, (AT_5, AT_5 + planted))
    assert job.returncode not in (0, None), job
    expected = of_replica_set_snapshot(ranks)
    for rank in expected:
        rank["ran"] = ran_again or rank["ran"]
    assert printed(run_program("replica_set_snapshot", ranks, tmp_path)) == expected


@dataclass(frozen=True)
class Mistake:
    """A program, its texts and what stands there by mistake, and what the job's errors say."""

    program: str
    changes: tuple[tuple[str, str], ...]
    said: tuple[str, ...]


def after(program: str, line: str, more: str, *said: str) -> Mistake:
    """A mistake that stands after a line of the program."""
    return Mistake(program, ((f"{line}\n", f"{line}\n{more}\n"),), said)


def before(program: str, line: str, more: str, *said: str) -> Mistake:
    return Mistake(program, ((line, f"{more}\n{line}"),), said)


BY_ZERO = "rank 1 of 2: uncaught ZeroDivisionError, ending the job"
DIFFERENT = "uncaught RankMismatchError, ending the job"
UPDATES_JUDGE = (
    '        self.get_optimizer("judge").update(self.loss_of_judge, on_real, on_fake)'
)
MISTAKES = {
    "a rank raises between two updates": after(
        "gan_updater",
        UPDATES_JUDGE,
        '        1 / (self.get_optimizer("judge").communicator.rank != 1)',
        BY_ZERO,
    ),
    "a rank updates its two optimizers in another order": before(
        "gan_updater",
        UPDATES_JUDGE,
        '        if self.get_optimizer("judge").communicator.rank == 1:\n'
        '            self.get_optimizer("maker").update(self.loss_of_maker, on_fake)',
        DIFFERENT,
        "ranks disagree on optimizer, by creation: number",
    ),
    "a worker of a rank raises, and its batch never comes": Mistake(
        "gan_updater",
        (
            (
                "def make_optimizer():\n",
                "def fail(example):\n"
                "    1 / (multiprocessing.parent_process() is None)\n"
                "    return example\n\n\n"
                "def make_optimizer():\n",
            ),
            (
                "    iterator = chainer",
                "    if comm.rank == 1:\n"
                "        examples = chainer.datasets.TransformDataset(examples, fail)\n"
                "    iterator = chainer",
            ),
        ),
        ("ZeroDivisionError", "likely culprit: rank 1"),
    ),
    "a rank skips an update": before(
        "hand_written_loop",
        "        optimizer.update()",
        "        if comm.rank == 1 and len(times) == 2:\n"
        "            times.append(0)\n            continue",
        DIFFERENT,
        "update on rank 0; gather_obj on rank 1",
    ),
    "the wrapper acts on a rank alone": Mistake(
        "duck_typed_optimizer",
        (
            (
                "self.starts is None:",
                "self.starts is None or self.communicator.rank == 1:",
            ),
        ),
        (DIFFERENT, "ranks disagree on element", "parameter /predictor/"),
    ),
    "the subclass raises on a rank": before(
        "optimizer_subclass",
        "        if self.count % EVERY == 0:",
        "        1 / (self.communicator.rank != 1)",
        BY_ZERO,
    ),
    "the mean of gradients raises on a rank": after(
        "communicator_subclass",
        "            param.grad = np.sign(votes)",
        "            1 / (self.rank != 1)",
        BY_ZERO,
    ),
    "a rank wraps an optimizer without a model": after(
        "set_up_before_wrapped",
        "    optimizer = make_optimizer(model)",
        "    if comm.rank == 1:\n        optimizer = chainer.optimizers.MomentumSGD()",
        "rank 1 of 2: uncaught RuntimeError, ending the job",
        "call its `setup(model)` first",
    ),
    "aggregate raises": before(
        "aggregating_evaluator",
        "        right = np.trace(matrix)",
        "        results[len(results)]",
        "rank 0 of 2: uncaught IndexError, ending the job",
    ),
    "calc_local raises on a rank": before(
        "aggregating_evaluator",
        "        return self.target(inputs)",
        "        1 / (self.comm.rank != 1)",
        BY_ZERO,
    ),
    "a rank gathers where others allgather": before(
        "filter_parallel_convolution",
        "        parts = chainermn",
        "        if self.comm.rank == 1:\n"
        "            chainermn.functions.gather(self.comm, super().forward(x), 0)",
        DIFFERENT,
        "allgather on rank 0; chainermn.functions: gather on rank 1",
    ),
    "a rank raises before Gatherv": before(
        "gatherv_extension",
        "        comm.mpi_comm.Gatherv",
        "        1 / (comm.rank != 1)",
        BY_ZERO,
    ),
    "ranks name other replica sets": Mistake(
        "replica_set_snapshot",
        (("[[0]]", "[[comm.rank]]"),),
        (DIFFERENT, "replica_sets: ((0,), (1,)) on rank 0"),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_ends_the_job_and_names_the_rank_or_the_difference(what, tmp_path):
    mistake = MISTAKES[what]
    environment = {"CHAINERMN_TIMEOUT": "4"} if "never comes" in what else None
    job = run_program(
        mistake.program, 2, tmp_path, *mistake.changes, environment=environment
    )
    assert job.returncode not in (0, None), job
    for words in mistake.said:
        assert words in job.err, (words, job)
