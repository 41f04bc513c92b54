"""An extension made `on_rank` runs on one rank, and the others neither do it nor wait."""

from __future__ import annotations

import pytest
from chainer import training
from chainer.iterators import SerialIterator
from chainer.serializers import load_npz
from chainer.training import Extension, extensions

from chainermn_train import create_multi_node_evaluator
from chainermn_train.extensions import AllreducePersistent, on_rank
from tests.support.training.small_models import ScaledMean

pytestmark = pytest.mark.world


class Recorder(Extension):
    """Records what the trainer does with it."""

    trigger = (2, "iteration")
    priority = training.PRIORITY_EDITOR
    default_name = "recorder"

    def __init__(self):
        self.calls = []
        self.state = 0

    def __call__(self, trainer):
        self.calls.append((trainer.updater.iteration, self.name))
        self.state += 1

    def initialize(self, trainer):
        self.calls.append("initialize")

    def finalize(self):
        self.calls.append("finalize")

    def on_error(self, trainer, exc, tb):
        self.calls.append(type(exc))

    def serialize(self, serializer):
        self.state = serializer("state", self.state)


@pytest.mark.parametrize("rank", [0, -1])
def test_it_runs_on_that_rank_as_it_would_by_itself(comm, trainer_for, rank):
    rank %= comm.size
    recorder = Recorder()

    def fails(trainer):
        raise ZeroDivisionError

    trainer = trainer_for(comm, (4, "iteration"), on_rank(recorder, comm, rank))
    trainer.extend(fails, trigger=(3, "iteration"))
    with pytest.raises(ZeroDivisionError):
        trainer.run(show_loop_exception_msg=False)
    calls = []
    if comm.rank == rank:
        calls = ["initialize", (2, "recorder"), ZeroDivisionError, "finalize"]
    assert recorder.calls == calls


def test_functions_serve_plain_or_decorated(naive, trainer_for):
    calls = []

    def plain(trainer):
        calls.append("plain")

    @training.make_extension(initializer=lambda trainer: calls.append("start"))
    def decorated(trainer):
        calls.append("decorated")

    both = [on_rank(function, naive) for function in (plain, decorated)]
    trainer = trainer_for(naive, (1, "iteration"), *both)
    trainer.run()
    assert trainer.get_extension("plain") is both[0]
    expected = ["start", "plain", "decorated"]
    seen = []
    if naive.rank == 0:
        seen = expected
    assert calls == seen


def test_a_snapshot_of_its_rank_resumes_all_ranks(comm, trainer_for, tmp_path):
    """The snapshot itself is taken on one rank; what it holds may be loaded by all."""
    recorder = Recorder()
    snapshot = extensions.snapshot(filename="taken")
    both = [on_rank(each, comm) for each in (recorder, snapshot)]
    first, second = (trainer_for(comm, (1, "epoch"), *both) for _ in range(2))
    first.run()
    assert (tmp_path / "taken").exists() == (comm.rank == 0)
    recorder.state = 0
    path = comm.bcast_obj(tmp_path / "taken")
    load_npz(path, second)
    assert second.updater.iteration == 3
    state = 0
    if comm.rank == 0:
        state = 1
    assert recorder.state == state


def test_wrong_arguments_are_named(naive):
    iterator = SerialIterator([], 1, repeat=False)
    evaluator = extensions.Evaluator(iterator, ScaledMean())
    persistent = AllreducePersistent(ScaledMean(), naive)
    for collective in create_multi_node_evaluator(evaluator, naive), persistent:
        with pytest.raises(TypeError, match="communicates, so it has to run on all ra"):
            on_rank(collective, naive)
    with pytest.raises(TypeError, match="needs an extension, not str"):
        on_rank("LogReport", naive)
    with pytest.raises(ValueError, match="rank must be from 0 to"):
        on_rank(Recorder(), naive, naive.size)
