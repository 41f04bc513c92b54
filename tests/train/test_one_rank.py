"""An extension made `on_rank` runs on one rank, and the others neither do it nor wait."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_train import create_multi_node_evaluator
from chainermn_train.extensions import AllreducePersistent, on_rank
from tests.support.linear import ScaledMean

pytestmark = pytest.mark.world

EXAMPLES = np.arange(6, dtype=np.float32)


class Recorder(training.Extension):
    """Records what the trainer does with it."""

    trigger = (2, "iteration")
    priority = training.PRIORITY_EDITOR
    default_name = "recorder"

    def __init__(self):
        self.calls = []
        self.state = 0

    def __call__(self, trainer):
        self.calls.append(trainer.updater.iteration)
        self.state += 1

    def initialize(self, trainer):
        self.calls.append("initialize")

    def finalize(self):
        self.calls.append("finalize")

    def on_error(self, trainer, exc, tb):
        self.calls.append(type(exc))

    def serialize(self, serializer):
        self.state = serializer("state", self.state)


@pytest.mark.parametrize("last", [False, True])
def test_it_runs_on_that_rank_as_it_would_by_itself(comm, trainer_for, last):
    rank = comm.size - 1 if last else 0
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, (4, "iteration"))
    recorder = Recorder()
    trainer.extend(on_rank(recorder, comm, rank))
    trainer.run()
    assert recorder.calls == (["initialize", 2, 4, "finalize"] if comm.rank == rank else [])


def test_name_trigger_and_priority_are_its_own(naive, trainer_for):
    trainer = trainer_for(naive, ScaledMean(), EXAMPLES, (4, "iteration"))
    order = []

    class Named(Recorder):
        def __call__(self, trainer):
            order.append((trainer.updater.iteration, self.name))

    for _ in range(2):
        trainer.extend(on_rank(Named(), naive))
    trainer.extend(lambda t: order.append((t.updater.iteration, "all")), priority=100, name="all")
    trainer.extend(on_rank(Named(), naive), name="mine", trigger=(4, "iteration"), priority=5)
    assert trainer.get_extension("recorder_1").actual.name == "recorder_1"
    trainer.run()
    named = [(2, "recorder"), (2, "recorder_1"), (4, "recorder"), (4, "recorder_1")]
    if naive.rank == 0:
        assert order == [
            *((1, "all"), *named[:2], (2, "all"), (3, "all")),
            *(*named[2:], (4, "all"), (4, "mine")),
        ]
    else:
        assert order == [(iteration, "all") for iteration in (1, 2, 3, 4)]


def test_others_do_not_wait(comm, trainer_for):
    """The others are done before the rank where it runs lets them know of anything."""
    order: list[int] = []

    def slow(trainer):
        if trainer.updater.iteration == 2:
            order.extend(comm.recv_obj(source, 77) for source in range(1, comm.size))

    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, (2, "iteration"))
    trainer.extend(on_rank(slow, comm), name="slow")
    trainer.run()
    if comm.rank:
        comm.send_obj(comm.rank, 0, 77)
    assert order == (list(range(1, comm.size)) if comm.rank == 0 else [])


def test_errors_are_told_to_it_on_its_rank(naive, trainer_for):
    trainer = trainer_for(naive, ScaledMean(), EXAMPLES, (3, "iteration"))
    recorder = Recorder()
    trainer.extend(on_rank(recorder, naive))

    def fails(trainer):
        raise ZeroDivisionError

    trainer.extend(fails)
    with pytest.raises(ZeroDivisionError):
        trainer.run(show_loop_exception_msg=False)
    assert recorder.calls == (
        ["initialize", ZeroDivisionError, "finalize"] if naive.rank == 0 else []
    )


def test_functions_serve_plain_or_decorated(naive, trainer_for):
    calls = []

    def plain(trainer):
        calls.append("plain")

    @training.make_extension(
        trigger=(2, "iteration"), default_name="named", initializer=lambda t: calls.append("start")
    )
    def decorated(trainer):
        calls.append("decorated")

    trainer = trainer_for(naive, ScaledMean(), EXAMPLES, (2, "iteration"))
    trainer.extend(on_rank(decorated, naive), call_before_training=True)
    trainer.extend(on_rank(plain, naive))
    trainer.extend(on_rank(lambda trainer: calls.append("lambda"), naive))
    for name in ("named", "plain", "<lambda>"):
        trainer.get_extension(name)
    trainer.run()
    every = ["plain", "lambda"]
    expected = ["start", "decorated", *every, "decorated", *every]
    assert calls == (expected if naive.rank == 0 else [])


def test_reports_are_written_once_and_by_the_rank_chosen(comm, trainer_for, tmp_path, capsys):
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, (2, "epoch"))
    trainer.extend(on_rank(extensions.LogReport(), comm))
    entries = ["epoch", "main/loss"]
    trainer.extend(on_rank(extensions.PrintReport(entries, out=sys.stdout), comm))
    trainer.run()
    assert (tmp_path / "log").exists() == (comm.rank == 0)
    said = capsys.readouterr().out
    assert (said.count("\n") == 3) == (comm.rank == 0)
    if comm.rank == 0:
        log = json.loads((tmp_path / "log").read_text())
        assert [entry["epoch"] for entry in log] == [1, 2]


def test_a_snapshot_of_its_rank_resumes_all_ranks(comm, trainer_for, tmp_path):
    """The snapshot itself is taken on one rank; what it holds may be loaded by all."""

    def build(stop):
        trainer = trainer_for(comm, ScaledMean(), EXAMPLES, stop)
        recorder = Recorder()
        trainer.extend(on_rank(recorder, comm), trigger=(1, "iteration"))
        log = extensions.LogReport(trigger=(1, "iteration"))
        trainer.extend(on_rank(log, comm))
        snapshot = extensions.snapshot(filename="at_{.updater.iteration}")
        trainer.extend(on_rank(snapshot, comm), trigger=(2, "iteration"))
        return trainer, recorder, log

    first, _, _ = build((2, "iteration"))
    first.run()
    assert (tmp_path / "at_2").exists() == (comm.rank == 0)
    content = comm.bcast_obj((tmp_path / "at_2").read_bytes() if comm.rank == 0 else None)
    (tmp_path / "copy.npz").write_bytes(content)
    second, recorder, log = build((4, "iteration"))
    chainer.serializers.load_npz(tmp_path / "copy.npz", second)
    second.run()
    assert second.updater.iteration == 4
    assert recorder.state == (4 if comm.rank == 0 else 0)
    assert [entry["iteration"] for entry in log.log] == ([1, 2, 3, 4] if comm.rank == 0 else [])


def test_each_rank_s_own_snapshot_resumes_it(comm, trainer_for, tmp_path):
    last = comm.size - 1
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, (2, "iteration"))
    trainer.extend(on_rank(Recorder(), comm, last), trigger=(1, "iteration"))
    trainer.run()
    chainer.serializers.save_npz(tmp_path / "own.npz", trainer)
    again = trainer_for(comm, ScaledMean(), EXAMPLES, (3, "iteration"))
    recorder = Recorder()
    again.extend(on_rank(recorder, comm, last), trigger=(1, "iteration"))
    chainer.serializers.load_npz(tmp_path / "own.npz", again)
    again.run()
    assert recorder.state == (3 if comm.rank == last else 0)


def test_attributes_are_those_of_the_extension(naive):
    recorder = Recorder()
    wrapped = on_rank(recorder, naive)
    wrapped.state = 5
    assert recorder.state == 5
    del wrapped.state
    assert not hasattr(wrapped, "state")
    assert "calls" in dir(wrapped)
    assert not hasattr(wrapped, "__name__")  # as the recorder
    with pytest.raises(AttributeError, match="'actual' of OneRankExtension can't be deleted"):
        del wrapped.actual


def test_copies_and_pickles_are_as_good(naive):
    wrapped = on_rank(Recorder(), naive)
    for twin in copy.copy(wrapped), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)):
        twin.initialize(None)
        assert twin.calls == (["initialize"] if naive.rank == 0 else [])
        wrapped.calls.clear()


def test_what_all_ranks_must_run_is_refused(naive):
    evaluator = extensions.Evaluator(
        chainer.iterators.SerialIterator([], 1, repeat=False), ScaledMean()
    )
    for extension in (
        create_multi_node_evaluator(evaluator, naive),
        AllreducePersistent(ScaledMean(), naive),
    ):
        with pytest.raises(TypeError, match="communicates, so it has to run on all ranks"):
            on_rank(extension, naive)


def test_wrong_arguments_are_named(naive):
    with pytest.raises(TypeError, match="on_rank needs a communicator"):
        on_rank(Recorder(), 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs an extension, not str"):
        on_rank("LogReport", naive)
    for rank in (naive.size, -1):
        with pytest.raises(ValueError, match=f"no rank {rank}; ranks go from 0"):
            on_rank(Recorder(), naive, rank)
