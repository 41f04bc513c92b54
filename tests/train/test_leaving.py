"""A scheduler's warning: all ranks save at the same iteration and leave; a second one ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress

import pytest

from chainermn_train import leaving
from tests.support.jobs import runner
from tests.support.training.trainers import SimulatedTime

TRAIN = """
import os, signal, sys, time
import chainer
import chainer.links as L
import numpy as np
from chainer import training
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer

comm = create_communicator("flat")
out, stop, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = L.Classifier(L.Linear(2, 2))
optimizer = chainer.optimizers.SGD()
if sys.argv[4] == "multi-node":
    optimizer = create_multi_node_optimizer(optimizer, comm)
optimizer.setup(model)
data = chainer.datasets.TupleDataset(np.ones((8, 2), "f4"), np.zeros(8, "i4"))
iterator = chainer.iterators.SerialIterator(data, 2)
updater = training.StandardUpdater(iterator, optimizer)
trainer = training.Trainer(updater, (stop, "iteration"), out=out)

@training.make_extension(trigger=(1, "iteration"))
def pace(trainer):
    if updater.iteration == 3:
        print(f"RUNS {comm.rank} {os.getpid()}\\n", end="", flush=True)
    time.sleep(0.02)
    while how == "blocks" and updater.iteration == 3:
        time.sleep(0.1)

def full(_):
    raise OSError(28, "No space left on device")

if how == "full" and comm.rank == 1:
    os.fsync = full
trainer.extend(pace)
checkpointer = create_multi_node_checkpointer("run", comm)
begin = checkpointer.maybe_load(trainer)
print(f"BEGIN {begin} {os.environ.get('CHAINERMN_RESTARTS')}\\n", end="", flush=True)
trainer.run()
os.kill(os.getpid(), signal.SIGUSR1)  # a warning now finds a job that ends
if how == "late" and comm.rank == 0:  # which the other rank does first
    time.sleep(2)
print(f"END {signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}\\n", end="", flush=True)
"""


def pids_of(said):
    """The ranks' processes, once each has said which."""
    return {int(rank): int(pid) for rank, pid in re.findall(r"RUNS (\d+) (\d+)", said)}


def sending(number, times=1):
    """Send a signal to the last rank, once both ranks run, and again some seconds later."""
    looks = 0

    def send(_, said):
        nonlocal looks
        pids = pids_of(said()[0])
        if len(pids) == 2:
            if looks in range(0, 200 * times, 200):
                os.kill(pids[1], number)
            looks += 1

    return send


def train(out, stop=10_000, how="", kind="multi-node", **options):
    return runner.run_text(2, TRAIN, out, stop, how, kind, **options)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "number"),
    [("multi-node", signal.SIGTERM), ("plain", signal.SIGUSR1)],
)
def test_all_ranks_save_and_leave_and_the_job_goes_on(tmp_path, number, kind):
    done = train(tmp_path, kind=kind, meanwhile=sending(number))
    assert done.returncode == 75, done
    assert done.out.count("BEGIN None") == 2
    assert "END" not in done.out
    (iteration,) = re.findall(
        r"saved iteration (\d+), and all ranks leave with.* 75", done.err
    )
    files = {f"run.{rank}.{iteration}" for rank in (0, 1)}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == files | {"run.lock"}
    again = train(tmp_path, int(iteration) + 5, kind=kind)
    assert again.returncode == 0, again
    assert again.out.count(f"BEGIN {iteration} ") == 2
    assert again.out.count("END True") == 2  # whoever runs on handles signals as before


@pytest.mark.parametrize(
    ("how", "signals", "grace"),
    [
        ("full", 1, 60),
        pytest.param("blocks", 2, 60, marks=pytest.mark.ci),
        pytest.param("blocks", 1, 0.5, marks=pytest.mark.ci),
    ],
)
def test_who_can_not_save_is_ended_and_does_not_leave_as_if_it_had(
    tmp_path, how, signals, grace
):
    """By its error, by a second signal, or when the time is up."""
    done = train(
        tmp_path,
        how=how,
        environment={"CHAINERMN_GRACE": str(grace)},
        meanwhile=sending(signal.SIGTERM, signals),
        seconds=30,
    )
    assert done.returncode not in (0, 75, None), done
    assert ("No space left on device" in done.err) == (how == "full")
    assert "saved iteration" not in done.err
    assert {path.name for path in tmp_path.iterdir()} <= {"run.lock"}


def test_a_second_signal_at_once_is_the_same_one(monkeypatch):
    simulated = SimulatedTime()
    ended = []
    monkeypatch.setattr("time.monotonic", simulated)
    monkeypatch.setattr(leaving, "_end", ended.append)
    for _ in range(2):  # another training listens again
        leaving.listen()
        signal.raise_signal(signal.SIGUSR1)
        assert leaving.is_warned()
        leaving.stop_listening()
        leaving._timer.join(9)  # it ends no process that still saves its model
        assert not leaving._timer.is_alive()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)  # it can only warn, and comes too late
        assert not leaving.is_warned()
    leaving.listen()
    for seconds, signals in (0, 0), (leaving.ECHO_SECONDS, 0), (0.01, 1):
        simulated.sleep(seconds)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [signal.SIGTERM] * signals
    leaving.stop_listening()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


LAUNCH = [sys.executable, "-m", "chainermn_tools", "launch", "-n", 2]


def started_by(start, tmp_path, stop, how, meanwhile):
    """The script's outcome beneath a launcher, which warns by the signal of the prelude."""
    script = tmp_path / "train.py"
    own = "_faulthandler.unregister(_signal.SIGUSR1)\n"
    script.write_text(runner.PRELUDE + own + TRAIN)
    command = [*start, script, tmp_path / "out", stop, how, "multi-node"]
    return runner.run_command(
        [*map(str, command)], runner.variables(), 60, meanwhile=meanwhile
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "start",
    [
        [runner.MPIEXEC, "-n", 2, sys.executable],
        pytest.param(LAUNCH, marks=pytest.mark.full),
    ],
)
def test_a_warning_after_training_ends_no_rank(tmp_path, start):
    """Whether it still saves the model, say, or waits in MPI_Finalize for one that does."""

    def warn(_, said):
        if "END" in said()[0]:
            for pid in pids_of(said()[0]).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

    done = started_by(start, tmp_path, 4, "late", warn)
    assert done.returncode == 0, done
    assert done.out.count("END True") == 2


def test_launch_passes_the_signal_on(tmp_path):
    """And the ranks have left before the grace is over, after which they get another one."""
    warned = []

    def warn(launcher, said):
        if len(pids_of(said()[0])) == 2 and not warned:
            os.kill(launcher, signal.SIGTERM)
            warned.append(launcher)

    start = [*LAUNCH, "--max-restarts", 3, "--grace", 600]
    done = started_by(start, tmp_path, 100_000, "", warn)
    assert done.returncode == 75, done
    assert "all ranks have saved and left, as a signal warned of the end" in done.err
    assert done.out.count("BEGIN None 0") == 2
