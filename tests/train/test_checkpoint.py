"""The checkpointer inside a Trainer and alone: what it keeps, restores, skips and refuses."""

from __future__ import annotations

import copy
import pickle
import random
import re
import shutil
import warnings
from pathlib import Path

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_train import (
    ResumableOrderSampler,
    create_multi_node_checkpointer,
    create_multi_node_iterator,
    create_multi_node_optimizer,
    create_synchronized_iterator,
    durable,
)

pytestmark = pytest.mark.world


class Noisy(chainer.Chain):
    """Its loss draws from NumPy's generator and from Python's."""

    def __init__(self, seed):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(4, 6, initialW=chainer.initializers.Normal(0.5, rng=rng(seed)))
            self.norm = L.BatchNormalization(6)
            self.out = L.Linear(6, 1, initialW=chainer.initializers.Normal(0.5, rng=rng(seed)))

    def forward(self, x, y):
        h = chainer.functions.dropout(self.norm(self.hidden(x)), 0.3)
        loss = chainer.functions.mean_squared_error(self.out(h), y) * (1 + random.random())
        chainer.report({"loss": loss}, self)
        return loss


def rng(seed):
    return np.random.RandomState(seed)


def make_trainer(comm, out, stop=8, seed=None, sampler=None, shared=lambda iterator: iterator):
    """A trainer of this rank's examples, with state in every place that has one."""
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    x = rng(comm.rank).uniform(size=(10, 4)).astype("f4")
    dataset = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    options = {"order_sampler": sampler} if sampler else {"shuffle": True}
    iterator = shared(chainer.iterators.SerialIterator(dataset, 4, **options))
    model = Noisy(comm.rank if seed is None else seed)
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
    trainer = training.Trainer(
        training.StandardUpdater(iterator, optimizer), (stop, "iteration"), out=str(out)
    )
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(3, "iteration")))
    return trainer, model, optimizer


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Nothing here can tell whether files have reached the disk, which takes most of the time."""
    monkeypatch.setattr(durable.os, "fsync", lambda _: None)


@pytest.fixture
def folder(tmp_path, world) -> Path:
    """One folder for all ranks."""
    return world.bcast(tmp_path)


def bits(model) -> dict[str, bytes]:
    return {name: param.array.tobytes() for name, param in model.namedparams()}


def files(comm, folder: Path) -> set[str]:
    """The checkpoint files there, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {path.name for path in folder.iterdir()} - {"log"}
    comm.allgather_obj(None)
    return found


def generation(comm, *iterations: int) -> set[str]:
    ranks = [*range(comm.size), "commit"]
    return {f"run.{rank}.{iteration}" for rank in ranks for iteration in iterations}


def stop_at(iteration: int):
    """An extension that ends training as a failing script does."""

    def extension(trainer):
        if trainer.updater.iteration == iteration:
            raise InterruptedError("stopped by the test")

    extension.priority = -1000
    return extension


def run_until(trainer, iteration: int) -> None:
    trainer.extend(stop_at(iteration), name="stop")
    with pytest.raises(InterruptedError):
        trainer.run(show_loop_exception_msg=False)


@pytest.mark.parametrize("background", [False, True])
def test_resumed_training_ends_with_the_bits_of_uninterrupted_training(comm, folder, background):
    whole, expected, _ = make_trainer(comm, folder / "whole")
    whole.run()

    for begin, end in ((None, 5), (4, 7)):
        trainer, _, _ = make_trainer(comm, folder / "run")
        checkpointer = create_multi_node_checkpointer("run", comm, background=background)
        trainer.extend(checkpointer, trigger=(2, "iteration"))
        assert checkpointer.maybe_load(trainer) == (begin if not background or not begin else 2)
        run_until(trainer, end)

    trainer, model, optimizer = make_trainer(comm, folder / "run", seed=99)
    checkpointer = create_multi_node_checkpointer("run", comm, background=background)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    begin = checkpointer.maybe_load(trainer, optimizer)
    assert begin == trainer.updater.iteration == (4 if background else 6)
    random.seed(7)  # whatever is drawn before training begins
    np.random.seed(7)
    trainer.run()
    assert bits(model) == bits(expected)
    assert files(comm, folder / "run") == set()  # cleaned up after success
    assert [e["iteration"] for e in trainer.get_extension("LogReport").log] == [3, 6]


def test_iterator_with_a_generator_of_its_own(naive, folder):
    def sampler():
        return chainer.iterators.ShuffleOrderSampler(rng(5))

    whole, expected, _ = make_trainer(naive, folder / "whole", sampler=sampler())
    whole.run()
    for end in (3, None):
        trainer, model, _ = make_trainer(naive, folder / "run", sampler=sampler())
        checkpointer = create_multi_node_checkpointer("run", naive)
        trainer.extend(checkpointer, trigger=(1, "iteration"))
        assert checkpointer.maybe_load(trainer) == (None if end else 3)
        if end:
            run_until(trainer, end)
        else:
            trainer.run()
    assert bits(model) == bits(expected)


@pytest.mark.parametrize("create", [create_multi_node_iterator, create_synchronized_iterator])
def test_iterator_that_the_ranks_share(comm, folder, create):
    def shared(iterator):
        return create(iterator, comm)

    whole, expected, _ = make_trainer(comm, folder / "whole", shared=shared)
    whole.run()
    for end in (5, None):
        trainer, model, _ = make_trainer(comm, folder / "run", shared=shared)
        checkpointer = create_multi_node_checkpointer("run", comm)
        trainer.extend(checkpointer, trigger=(2, "iteration"))
        assert checkpointer.maybe_load(trainer) == (None if end else 4)
        if end:
            run_until(trainer, end)
        else:
            trainer.run()
    assert bits(model) == bits(expected)


def test_keeps_cp_interval_and_collects_each_gc_interval(comm, folder):
    trainer, _, _ = make_trainer(comm, folder, stop=20)
    checkpointer = create_multi_node_checkpointer("run", comm, 2, 3)
    kept = []
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    look = training.make_extension(priority=-300)(lambda _: kept.append(files(comm, folder)))
    trainer.extend(look, name="look")
    run_until(trainer, 9)
    expected = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (4, 5), (4, 5, 6), (4, 5, 6, 7), (7, 8)]
    assert kept[:8] == [generation(comm, *each) for each in expected]


def test_each_rank_with_a_folder_of_its_own(comm, tmp_path):
    """As on nodes without a shared file system: only rank 0 has the records."""
    trainer, _, _ = make_trainer(comm, tmp_path)
    checkpointer = create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    run_until(trainer, 5)
    names = {f"run.{comm.rank}.{iteration}" for iteration in (2, 4)}
    assert files(comm, tmp_path) == names | (
        {"run.commit.2", "run.commit.4"} if comm.rank == 0 else set()
    )
    comm.allgather_obj(None)
    if comm.rank == comm.size - 1:
        (tmp_path / f"run.{comm.rank}.4").unlink()
    resumed, _, _ = make_trainer(comm, tmp_path)
    checkpointer = create_multi_node_checkpointer("run", comm)
    assert checkpointer.maybe_load(resumed) == 2


def saved(comm, folder: Path, *iterations: int) -> None:
    """Generations whose link holds the number of the iteration and the rank."""
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
    for iteration in iterations:
        checkpointer.save(link(iteration, comm.rank), iteration)


def link(*values: float) -> chainer.Link:
    made = chainer.Link()
    made.add_persistent("values", np.array(values, "f8"))
    made.add_persistent("nothing", None)
    made.add_persistent("text", "naïve")
    return made


def loaded(comm, folder: Path) -> chainer.Link:
    target = link(0, 0)
    create_multi_node_checkpointer("run", comm, path=folder).maybe_load(target)
    return target


def test_model_with_children_called_as_what_a_trainer_has(naive, folder, monkeypatch):
    monkeypatch.chdir(folder)
    model = chainer.Chain(out=L.Linear(2, 3), updater=L.Linear(2, 3), iteration=L.Linear(2, 3))
    checkpointer = create_multi_node_checkpointer("run", naive)
    checkpointer.save(model)
    expected = bits(model)
    model.out.W.array[:] = 0
    assert create_multi_node_checkpointer("run", naive).maybe_load(model) == 1
    assert bits(model) == expected
    assert files(naive, folder / "result") == generation(naive, 1)
    naive.allgather_obj(None)


def test_without_a_trainer(comm, folder, monkeypatch):
    monkeypatch.chdir(folder)
    target = link(1, comm.rank)
    checkpointer = create_multi_node_checkpointer("run", comm)
    assert checkpointer.maybe_load(target) is None
    for _ in range(3):
        checkpointer.save(target)
        target.values[0] += 1
    assert files(comm, folder / "result") == generation(comm, 1, 2, 3)
    again = link(0, 0)
    again.nothing, again.text = 5, "x"
    checkpointer = create_multi_node_checkpointer("run", comm)
    assert checkpointer.maybe_load(again) == 3
    assert again.values.tolist() == [3, comm.rank]
    assert (again.nothing, again.text) == (None, "naïve")
    checkpointer.save(again)
    assert files(comm, folder / "result") == generation(comm, 1, 2, 3, 4)
    checkpointer.finalize()
    assert files(comm, folder / "result") == set()
    comm.allgather_obj(None)


def flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1),
    "deleted": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("of", ["0", "last", "commit"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_newest_file_makes_the_resume_fall_back(naive, folder, capfd, of, how):
    saved(naive, folder, 10, 20, 30)
    of = str(naive.size - 1) if of == "last" else of
    if naive.rank == 0:
        DAMAGES[how](folder / f"run.{of}.30")
    naive.allgather_obj(None)
    assert loaded(naive, folder).values.tolist() == [20, naive.rank]
    said = capfd.readouterr().err
    if naive.rank == 0:
        assert re.search(
            r"'run': iteration 30 skipped: .* training goes on from iteration 20", said
        )
        missing = "was never committed" if how == "deleted" else "run.commit.30 is damaged"
        assert (missing if of == "commit" else f"rank {of}: run.{of}.30 ") in said
    else:
        assert said == ""


def test_every_byte_of_a_record_counts(naive, folder):
    saved(naive, folder, 1)
    path = folder / "run.commit.1"
    if naive.rank == 0:
        whole = path.read_bytes()
        for position in range(len(whole)):
            for bit in range(8):
                damaged = bytearray(whole)
                damaged[position] ^= 1 << bit
                with pytest.raises(ValueError, match=r"commit record|checksum"):
                    durable_decode(bytes(damaged))
    naive.allgather_obj(None)


def durable_decode(data: bytes):
    from chainermn_train.commit_record import decode

    return decode(data)


def test_after_falling_back_the_run_saves_over_what_was_damaged(naive, folder):
    saved(naive, folder, 10, 20, 30)
    naive.allgather_obj(None)
    if naive.rank == 0:
        (folder / "run.0.30").write_bytes(b"")
    naive.allgather_obj(None)
    target = link(0, 0)
    checkpointer = create_multi_node_checkpointer("run", naive, 1, 2, path=folder)
    assert checkpointer.maybe_load(target) == 20
    checkpointer.save(target, 25)
    assert files(naive, folder) == generation(naive, 25, 30)  # 10 and 20 were collected
    naive.allgather_obj(None)
    checkpointer.save(target, 30)
    assert loaded(naive, folder).values.tolist() == [20, naive.rank]
    naive.allgather_obj(None)
    checkpointer.finalize()
    assert files(naive, folder) == set()


def test_everything_damaged_raises_and_removes_nothing(naive, folder):
    saved(naive, folder, 10, 20)
    naive.allgather_obj(None)
    if naive.rank == 0:
        flip(folder / "run.0.10", 0.5)
        (folder / "run.commit.20").unlink()
    naive.allgather_obj(None)
    before = files(naive, folder)
    with pytest.raises(RuntimeError, match=r"iteration 20 skipped.*iteration 10 skipped: rank 0"):
        loaded(naive, folder)
    assert files(naive, folder) == before
    naive.allgather_obj(None)


@pytest.mark.parametrize("background", [False, True])
def test_lost_records_are_no_reason_to_start_again(naive, folder, background):
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder, background=background)
    save_and_flush(checkpointer, 10)
    save_and_flush(checkpointer, 20)
    naive.allgather_obj(None)
    if naive.rank == 0:
        for path in folder.glob("run.commit.*"):
            path.unlink()
    naive.allgather_obj(None)
    before = files(naive, folder)
    with pytest.raises(RuntimeError, match="never committed"):
        loaded(naive, folder)
    assert files(naive, folder) == before
    naive.allgather_obj(None)


def test_files_of_others_that_have_the_same_name_stay(naive, folder, capfd):
    """Such as those of ChainerMN 1.x, which Chainer's own `save_npz` makes."""
    if naive.rank == 0:
        for iteration in (100, 200, 300):
            for rank in range(naive.size):
                with (folder / f"run.{rank}.{iteration}").open("wb") as file:
                    chainer.serializers.save_npz(file, link(1, 1))
        (folder / "run.0.400").write_text("precious")
    before = files(naive, folder)
    assert loaded(naive, folder).values.tolist() == [0, 0]
    assert files(naive, folder) == before
    said = capfd.readouterr().err
    assert ("run.0.400" in said and "not touched" in said) == (naive.rank == 0)
    save_and_flush(create_multi_node_checkpointer("run", naive, path=folder), 350)
    assert loaded(naive, folder).values.tolist() == [350, 350]
    assert files(naive, folder) == before | generation(naive, 350)


def test_never_committed_starts_at_0_and_is_swept(naive, folder, capfd):
    saved(naive, folder, 10)
    naive.allgather_obj(None)
    if naive.rank == 0:
        (folder / "run.commit.10").unlink()
        for name in ("run.commit.10.tmp", f"run.{naive.size + 3}.20.tmp", "run.0.20.new"):
            (folder / name).write_bytes(b"half")
        shutil.copy(folder / "run.0.10", folder / "run.7.10")
        for name in ("other.0.10", "run.0.10.bak", "run.x.1", "run2.0.1.tmp"):
            (folder / name).write_bytes(b"of others")
    naive.allgather_obj(None)
    assert loaded(naive, folder).values.tolist() == [0, 0]
    assert files(naive, folder) == {"other.0.10", "run.0.10.bak", "run.x.1", "run2.0.1.tmp"}
    if naive.rank == 0:
        assert "goes on from iteration 0" in capfd.readouterr().err


def test_nothing_there_says_nothing(comm, folder, capfd):
    target = link(4, 4)
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder / "new")
    assert checkpointer.maybe_load(target) is None
    assert target.values.tolist() == [4, 4]
    checkpointer.finalize()
    assert capfd.readouterr().err == ""


@pytest.mark.sizes(2, 3, 4)
def test_another_number_of_ranks_is_told(naive, folder):
    half = naive.split(naive.rank % 2, naive.rank)
    if naive.rank % 2 == 0:
        saved(half, folder, 10)
    naive.allgather_obj(None)
    words = rf"iteration 10 was written by {(naive.size + 1) // 2} ranks, this job has {naive.size}"
    with pytest.raises(RuntimeError, match=words):
        loaded(naive, folder)
    half.finalize()


def test_another_model_is_told_on_all_ranks(naive, folder):
    saved(naive, folder, 10)
    other = link(1, 2, 3) if naive.rank == 0 else link(0, 0)
    with pytest.raises((ValueError, RuntimeError), match=r"'values' has shape \(2,\)"):
        create_multi_node_checkpointer("run", naive, path=folder).maybe_load(other)
    other = link(0, 0)
    other.add_persistent("more", 1)
    with pytest.raises(ValueError, match=r"lacks.*more.*made differently"):
        create_multi_node_checkpointer("run", naive, path=folder).maybe_load(other)


def test_object_that_needs_pickle_is_refused_on_all_ranks(comm, folder):
    target = link(1, 2)
    if comm.rank == 0:
        target.add_persistent("strange", np.array([{1}, None]))
    with pytest.raises((TypeError, RuntimeError), match=r"'strange'.*only pickle"):
        create_multi_node_checkpointer("run", comm, path=folder / "new").save(target)
    assert not (folder / "new").exists() or files(comm, folder / "new") == set()
    target = link(1, 2)
    target.add_persistent("other_order", np.ones(2, ">f4"))
    create_multi_node_checkpointer("fits", comm, path=folder / "new").save(target)
    with pytest.raises(TypeError, match="not int"):
        create_multi_node_checkpointer("run", comm, path=folder / "new").save(3)


def test_pickle_in_a_file_is_not_loaded(naive, folder):
    """Even where somebody forges a record."""
    from chainermn_train.commit_record import CommitRecord

    saved(naive, folder, 1)
    path = folder / f"run.{naive.rank}.1"
    with path.open("wb") as file:
        trap = np.array([Trap()], dtype=object)
        np.savez(file, values=trap, nothing=trap, text=trap)
    with path.open("rb") as file:
        contents = naive.allgather_obj(durable.contents_of(file))
    if naive.rank == 0:
        (folder / "run.commit.1").write_bytes(CommitRecord("run", 1, contents).encode())
    naive.allgather_obj(None)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        loaded(naive, folder)


class Trap:
    def __reduce__(self):
        return (pytest.exit, ("unpickled",))


def test_name_of_the_extension_is_not_that_of_the_run(naive, folder):
    trainer, _, _ = make_trainer(naive, folder)
    checkpointer = create_multi_node_checkpointer("run", naive)
    trainer.extend(checkpointer, name="checkpoints", trigger=(2, "iteration"))
    trainer.extend(checkpointer, name="checkpoints", trigger=(5, "iteration"))
    assert trainer.get_extension("checkpoints_1") is checkpointer
    run_until(trainer, 6)
    assert files(naive, folder) == generation(naive, 2, 4, 5, 6)


def test_used_again_after_it_is_finalized(naive, folder):
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder, background=True)
    for _ in range(2):
        save_and_flush(checkpointer, 3)
        assert files(naive, folder) == generation(naive, 3)
        checkpointer.finalize()
        assert files(naive, folder) == set()


def test_iterations_that_differ_or_go_back(naive, folder):
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
    checkpointer.save(link(1, 1), 10)
    with pytest.raises(ValueError, match=r"iteration 9 would never be used.*maybe_load"):
        checkpointer.save(link(1, 1), 9)
    saved(naive, folder / "before", 10)
    with pytest.raises(ValueError, match="call maybe_load"):
        saved(naive, folder / "before", 1)
    if naive.size > 1:
        with pytest.raises(ValueError, match="11 on rank 0, 12 on rank 1"):
            checkpointer.save(link(1, 1), 11 + (naive.rank > 0))
    with pytest.raises((ValueError, RuntimeError), match="not negative"):
        checkpointer.save(link(1, 1), -1)
    checkpointer.save(link(5, 5), 10)  # again: it takes the place of the first
    assert files(naive, folder) == generation(naive, 10) | {"before"}
    assert loaded(naive, folder).values.tolist() == [5, 5]


@pytest.mark.parametrize("background", [False, True])
def test_triggers_that_fire_at_once_save_once(comm, folder, monkeypatch, background):
    written = []
    real = durable.os.replace

    def replace(source, target):
        written.append(target.name)
        real(source, target)

    monkeypatch.setattr(durable.os, "replace", replace)
    trainer, _, _ = make_trainer(comm, folder)
    checkpointer = create_multi_node_checkpointer("run", comm, background=background)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    trainer.extend(checkpointer, name="again", trigger=(4, "iteration"))
    run_until(trainer, 5)
    assert written.count(f"run.{comm.rank}.4") == 1
    assert not any(name.endswith(".new") for name in written)


@pytest.mark.parametrize("failing", ["run.{last}.5.new", "run.commit.5"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_failed_replacement_leaves_a_whole_generation(
    naive, folder, monkeypatch, failing, background, after
):
    """The only one there is: the old one, or the new one once its record has its name."""
    checkpointer = create_multi_node_checkpointer(
        "run", naive, 1, 1, path=folder, background=background
    )
    save_and_flush(checkpointer, 5)
    name = failing.format(last=naive.size - 1)
    real = durable.os.replace

    def fail(source, target):
        if after and target.name == name:
            real(source, target)
        if target.name == name:
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "replace", fail)
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            save_and_flush(checkpointer, 5, 6)
    assert files(naive, folder) == generation(naive, 5)
    is_new = after and "commit" in failing
    assert loaded(naive, folder).values.tolist() == ([6, 6] if is_new else [5, 5])
    save_and_flush(checkpointer, 5, 7)
    assert loaded(naive, folder).values.tolist() == [7, 7]


@pytest.mark.sizes(2, 3, 4)
def test_arguments_that_differ_between_ranks(naive, folder):
    name = f"run{min(naive.rank, 1)}"
    with pytest.raises(ValueError, match=r"differ.*'run0'.* on rank 0, .*'run1'.* on rank 1"):
        create_multi_node_checkpointer(name, naive, path=folder).maybe_load(link(0, 0))
    with pytest.raises(ValueError, match="differ"):
        create_multi_node_checkpointer(name, naive, path=folder).save(link(0, 0))
    assert files(naive, folder) == set()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": ""}, ValueError, "must not be empty"),
        ({"name": "a/b"}, ValueError, "a/b"),
        ({"name": "a\n"}, ValueError, "control"),
        ({"name": 3}, TypeError, "not int"),
        ({"comm": None}, TypeError, "create_communicator"),
        ({"cp_interval": 0}, ValueError, "cp_interval must be at least 1"),
        ({"gc_interval": 1.5}, TypeError, "gc_interval"),
        ({"path": 3}, TypeError, "int"),
    ],
)
def test_wrong_arguments(naive, arguments, error, words):
    with pytest.raises(error, match=words):
        create_multi_node_checkpointer(**{"name": "run", "comm": naive, **arguments})


def save_and_flush(checkpointer, iteration: int, value: float | None = None) -> None:
    value = iteration if value is None else value
    checkpointer.save(link(value, value), iteration)
    checkpointer.flush()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_disk_error_of_one_rank_is_raised_on_all(
    comm, folder, monkeypatch, tmp_path, background, function
):
    path = tmp_path if comm.rank == comm.size - 1 else folder
    checkpointer = create_multi_node_checkpointer("run", comm, path=path, background=background)
    save_and_flush(checkpointer, 1)
    comm.allgather_obj(None)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(durable.os, function, fail)
        with pytest.raises((OSError, RuntimeError), match="No space left") as caught:
            save_and_flush(checkpointer, 2)
    assert isinstance(caught.value, OSError) == (comm.rank == comm.size - 1)
    assert not any(name.endswith((".2", ".tmp")) for name in files(comm, path))
    save_and_flush(checkpointer, 3)  # all go on together
    target = link(0, 0)
    assert create_multi_node_checkpointer("run", comm, path=path).maybe_load(target) == 3


def test_background_keeps_what_was_there_at_the_save(comm, folder):
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder, background=True)
    big = link(*range(200_000))
    big.add_persistent("transposed", np.arange(6.0).reshape(2, 3).T)
    big.add_persistent("empty", np.empty((0, 3), "f4"))
    for iteration in (1, 2):
        big.values[:] = iteration
        checkpointer.save(big, iteration)
        big.values[:] = -1
    assert "run.commit.1" in files(comm, folder)
    assert "run.commit.2" not in files(comm, folder)
    checkpointer.flush()
    for array in (big.values, big.transposed):
        array[:] = 0
    assert create_multi_node_checkpointer("run", comm, path=folder).maybe_load(big) == 2
    assert (big.values == 2).all()
    np.testing.assert_array_equal(big.transposed, np.arange(6.0).reshape(2, 3).T)


def test_error_in_the_background_ends_training_on_all_ranks(comm, folder, monkeypatch):
    trainer, _, _ = make_trainer(comm, folder, stop=4)
    checkpointer = create_multi_node_checkpointer("run", comm, background=True)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    real = durable.os.replace

    def fail(source, target):
        if f"run.{comm.size - 1}.4" in str(target):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(durable.os, "replace", fail)
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        trainer.run()
    assert generation(comm, 2) <= files(comm, folder)
    assert "run.commit.4" not in files(comm, folder)


def test_rank_that_fails_alone_waits_for_nobody(naive, folder):
    """As a trainer does it; the others may be anywhere, and its checkpoints must stay."""
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder, background=True)
    save_and_flush(checkpointer, 2)
    checkpointer.save(link(3, 3), 3)
    if naive.rank == 0:
        checkpointer.on_error(None, InterruptedError(), None)
        checkpointer.finalize()
        assert (folder / "run.0.3").exists()
    assert generation(naive, 2) <= files(naive, folder)


def test_interrupt_from_the_keyboard_keeps_the_checkpoints(naive, folder):
    trainer, _, _ = make_trainer(naive, folder)

    @training.make_extension(priority=-1000)
    def interrupt(trainer):
        if trainer.updater.iteration == 4:
            raise KeyboardInterrupt

    trainer.extend(create_multi_node_checkpointer("run", naive), trigger=(2, "iteration"))
    trainer.extend(interrupt, name="interrupt")
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert files(naive, folder) == generation(naive, 2, 4)


def test_success_within_an_except_block_still_cleans_up(naive, folder):
    try:
        raise LookupError
    except LookupError:
        trainer, _, _ = make_trainer(naive, folder)
        trainer.extend(create_multi_node_checkpointer("run", naive), trigger=(2, "iteration"))
        trainer.run()
    assert files(naive, folder) == set()


def test_broadcast_is_spared_where_parameters_are_equal(comm, folder, monkeypatch):
    """And then an update without a loss function, after the resume, steps at once."""
    model = Noisy(comm.rank)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    x, y = np.ones((2, 4), "f4"), np.ones((2, 1), "f4")
    optimizer.update(model, x, y)
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
    checkpointer.save(Both(model, optimizer), 1)
    broadcasts = []
    real = type(comm).bcast_data

    def bcast_data(self, model):
        broadcasts.append(model)
        real(self, model)

    monkeypatch.setattr(type(comm), "bcast_data", bcast_data)
    for equal in (True, False):
        again = Noisy(comm.rank + 5)
        resumed = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(again)
        checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
        checkpointer.maybe_load(Both(again, resumed), resumed)
        again.cleargrads()
        broadcasts.clear()
        resumed.update()
        assert len(broadcasts) == (0 if equal else 1)
        assert resumed.t == (2 if equal else 1)
        if comm.size == 1:
            break
        model.out.b.array += comm.rank  # no longer equal on all ranks
        create_multi_node_checkpointer("run", comm, path=folder).save(Both(model, optimizer), 2)


class Both(chainer.Link):
    """A model and its optimizer as one object to save."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.parts = {"model": model, "optimizer": optimizer}

    def serialize(self, serializer):
        for name, part in self.parts.items():
            part.serialize(serializer[name])


def test_lazy_links_are_loaded_initialised(naive, folder):
    def make():
        model = chainer.Sequential(L.Linear(None, 3))
        optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), naive).setup(model)
        return model, optimizer

    model, optimizer = make()
    for _ in range(2):
        optimizer.update(lambda: chainer.functions.sum(model(np.ones((2, 4), "f4"))))
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
    checkpointer.save(Both(model, optimizer))
    again, resumed = make()
    checkpointer.maybe_load(Both(again, resumed), resumed)
    assert bits(again) == bits(model)
    for each, of in ((optimizer, model), (resumed, again)):
        each.update(lambda of=of: chainer.functions.sum(of(np.ones((2, 4), "f4"))))
    assert resumed.t == optimizer.t == 2
    assert bits(again) == bits(model)


def test_maybe_load_from_another_folder_this_time(naive, folder):
    saved(naive, folder / "old", 10)
    target = link(0, 0)
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder / "new")
    assert checkpointer.maybe_load(target, path=str(folder / "old")) == 10
    checkpointer.save(target)
    assert files(naive, folder / "new") == generation(naive, 11)
    assert files(naive, folder / "old") == generation(naive, 10)


def test_model_can_be_taken_out_with_chainers_own_loader(naive, folder):
    trainer, model, _ = make_trainer(naive, folder)
    trainer.extend(create_multi_node_checkpointer("run", naive), trigger=(2, "iteration"))
    run_until(trainer, 4)
    alone = Noisy(50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chainer.serializers.load_npz(
            folder / f"run.{naive.rank}.4", alone, path="updater/model:main/"
        )
    assert bits(alone) == bits(model)


@pytest.mark.parametrize("background", [False, True])
def test_two_checkpointers_that_would_write_the_same_files(naive, folder, background):
    first = create_multi_node_checkpointer("run", naive, path=folder, background=background)
    second = create_multi_node_checkpointer("run", naive, path=folder / "x" / "..")
    (folder / "x").mkdir(exist_ok=True)
    first.save(link(1, 1), 1)
    assert second.maybe_load(link(0, 0)) == (None if background else 1)  # only reads
    with pytest.raises(ValueError, match=r"'run' in .*another name or folder"):
        second.save(link(2, 2), 2)
    first.flush()
    assert loaded(naive, folder).values.tolist() == [1, 1]
    first.finalize()
    second.save(link(2, 2), 2)
    assert loaded(naive, folder).values.tolist() == [2, 2]


def test_copies_and_pickles_are_refused(naive, folder):
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
    save_and_flush(checkpointer, 1)
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled: it holds a communicator"):
            twin(checkpointer)


@pytest.mark.parametrize("target", [None, 3, "model"])
def test_nothing_to_load_into_is_told(naive, folder, target):
    with pytest.raises((TypeError, RuntimeError), match=f"not {type(target).__name__}"):
        create_multi_node_checkpointer("run", naive, path=folder).maybe_load(target)


def test_another_precision_is_told(naive, folder):
    saved(naive, folder, 1)
    other = link(0, 0)
    other.values = other.values.astype("f2")
    with pytest.raises(ValueError, match=r"'values' has dtype float64 .* and float16 here"):
        create_multi_node_checkpointer("run", naive, path=folder).maybe_load(other)


def test_two_runs_in_one_folder(naive, folder):
    names = ("run", "run.0", "run.commit", "r.n", "räksmörgås [1]*")
    checkpointers = [create_multi_node_checkpointer(n, naive, path=folder) for n in names]
    for number, checkpointer in enumerate(checkpointers):
        checkpointer.save(link(number, 0), 5)
    for number, name in enumerate(names):
        target = link(9, 9)
        create_multi_node_checkpointer(name, naive, path=folder).maybe_load(target)
        assert target.values.tolist() == [number, 0]
    for checkpointer in checkpointers:
        checkpointer.finalize()
    assert files(naive, folder) == set()


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("first", ["save", "maybe_load"])
def test_shuffling_ahead_of_time_is_warned_of_once(naive, folder, resumable, first):
    sampler = ResumableOrderSampler(1) if resumable else None

    def processes(actual):
        return chainer.iterators.MultiprocessIterator(
            actual.dataset, 4, shuffle=None if resumable else True, order_sampler=sampler
        )

    trainer, _, _ = make_trainer(naive, folder, shared=processes)
    checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(checkpointer, first)(trainer.updater)
        checkpointer.save(trainer.updater)
    said = [str(each.message) for each in caught if "ResumableOrderSampler" in str(each.message)]
    assert len(said) == (naive.rank == 0 and not resumable)
