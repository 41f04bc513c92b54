"""Snapshots that ranks with the same state share: who writes, who loads, and what is refused."""

from __future__ import annotations

import copy
import pickle
import zipfile
from pathlib import Path

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_train import create_multi_node_optimizer, multi_node_snapshot
from tests.support.checkpoints import bits

pytestmark = pytest.mark.world


def same_trainer(comm, out, stop=4, examples=6, shuffle=False, log=True):
    """A trainer with state that is the same on all ranks; rank 0 may also log."""
    x = np.linspace(0, 1, examples * 2, dtype="f4").reshape(examples, 2)
    np.random.seed(comm.rank)
    model = L.Classifier(
        L.Linear(2, 1), lossfun=lambda y, t: chainer.functions.mean_squared_error(y, t)
    )
    model.compute_accuracy = False
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
    dataset = chainer.datasets.TupleDataset(x, x[:, :1])
    iterator = chainer.iterators.SerialIterator(dataset, 2, shuffle=shuffle)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (stop, "iteration"), out=str(out))
    if log and comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    return trainer, model


def snapshots(comm, folder: Path) -> set[str]:
    """The files there, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {path.name for path in folder.iterdir()} - {"log"} if folder.exists() else set()
    comm.allgather_obj(None)
    return found


def run(comm, out, stop, sets, autoload=True, **options):
    trainer, model = same_trainer(comm, out, stop)
    snapshot = extensions.snapshot(autoload=autoload, **options)
    trainer.extend(multi_node_snapshot(comm, snapshot, sets), trigger=(2, "iteration"))
    trainer.run()
    return trainer, model


def names(*numbers: str) -> set[str]:
    return {f"snapshot_iter_{number}" for number in numbers}


def test_resumed_training_ends_with_the_bits_of_uninterrupted_training(comm, folder):
    _, expected = run(comm, folder / "whole", 8, [0])
    run(comm, folder / "run", 4, [0])
    both = ("0", "1") if comm.size > 1 else ("0",)
    assert snapshots(comm, folder / "run") == names(*(f"{i}.{s}" for i in (2, 4) for s in both))
    trainer, model = run(comm, folder / "run", 8, [0])
    assert bits(model) == bits(expected)
    if comm.rank == 0:
        log = trainer.get_extension("LogReport").log
        assert [each["iteration"] for each in log] == list(range(1, 9))


def test_one_file_where_all_have_the_same_state(comm, folder):
    def trainer_of(stop):
        trainer, _ = same_trainer(comm, folder, stop, log=False)
        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [])
        trainer.extend(snapshot, trigger=(2, "iteration"))
        trainer.run()

    trainer_of(4)
    assert snapshots(comm, folder) == names("2", "4")
    trainer_of(6)
    assert snapshots(comm, folder) == names("2", "4", "6")


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    ("sets", "first", "files"),
    [
        ([], [0, 0, 0], [""]),
        ([0], [0, 1, 1], [".0", ".1"]),
        ([0, 1], [0, 1, 2], [".0", ".1", ".2"]),
        ([[0, 2], [1]], [0, 1, 0], [".0", ".1"]),
        ([range(0, 3, 2)], [0, 1, 0], [".0", ".1"]),
        ([{2, 1}], [0, 1, 1], [".0", ".1"]),
    ],
    ids=str,
)
def test_each_set_has_the_state_of_its_first_rank(naive, folder, sets, first, files):
    """Sets are those documented; `first`: of each rank's set."""

    def extension(target):
        snapshot = extensions.snapshot(target=target, autoload=True)
        return multi_node_snapshot(naive, snapshot, iter(sets))  # any iterable

    def link(value):
        made = chainer.Link()
        made.add_persistent("value", np.array([value], "f8"))
        made.add_persistent("nothing", None)
        return made

    trainer, _ = same_trainer(naive, folder, 2)
    trainer.extend(extension(link(naive.rank * 10)), trigger=(2, "iteration"))
    trainer.run()
    assert snapshots(naive, folder) == names(*(f"2{each}" for each in files))
    target = link(-1)
    extension(target).initialize(trainer)
    assert target.value.tolist() == [first[naive.rank] * 10]
    assert target.nothing is None


@pytest.mark.sizes(2, 3, 4)
def test_fewer_and_more_ranks_go_on(naive, folder):
    """State that belongs to no rank; test_snapshot_sizes.py has more ranks, as jobs."""

    def train(size, out, stop):
        part, weights = naive.split(int(naive.rank < size), naive.rank), None
        if naive.rank < size:
            trainer, model = run(part, out, stop, [0])
            assert len(trainer.get_extension("LogReport").log) == stop if part.rank == 0 else True
            weights = [param.array for _, param in sorted(model.namedparams())]
        part.finalize()
        naive.allgather_obj(None)
        return weights

    whole = naive.bcast_obj(train(1, folder / "whole", 8))
    for begin, end in ((2, naive.size), (naive.size, 1)):
        out = folder / f"{begin} {end}"
        train(begin, out, 4)
        found = train(end, out, 8)
        assert snapshots(naive, out) >= names("4.0", "8.0")
        for mine, expected in zip(found or (), whole, strict=found is not None):
            np.testing.assert_allclose(mine, expected, rtol=1e-6)


@pytest.mark.sizes(2, 3, 4)
def test_state_of_a_rank_is_told(naive, folder):
    """A place in a rank's examples: with another number of ranks it has others."""

    def load(comm, examples):
        trainer, _ = same_trainer(comm, folder, 2, examples, shuffle=True)
        trainer.extend(
            multi_node_snapshot(comm, extensions.snapshot(autoload=True), [0]),
            trigger=(2, "iteration"),
        )
        return trainer

    load(naive, 12 // naive.size).run()
    half = naive.split(naive.rank, 0)
    with pytest.raises(
        ValueError, match=r"ranks, doesn't fit this job with 1: iterator 'main' has 12 ex"
    ):
        load(half, 12).run()
    half.finalize()
    naive.allgather_obj(None)


def test_newest_that_all_sets_have_is_loaded(naive, folder, capfd):
    run(naive, folder, 6, [0])
    last = min(naive.size - 1, 1)
    if naive.rank == 0:
        (folder / f"snapshot_iter_6.{last}").unlink()
        if last:
            (folder / "tmpsnapshot_iter_8.0xyz").mkdir()  # left by a killed writer
    naive.allgather_obj(None)
    trainer, _ = same_trainer(naive, folder)
    snapshot = multi_node_snapshot(naive, extensions.snapshot(autoload=True), [0])
    snapshot.initialize(trainer)
    assert trainer.updater.iteration == 4
    assert not any(name.startswith("tmp") for name in snapshots(naive, folder))
    if naive.rank == 0 and last:
        assert "snapshot_iter_6 skipped" in capfd.readouterr().err


@pytest.mark.sizes(2, 3, 4)
def test_sets_without_a_snapshot_are_told(naive, folder):
    run(naive, folder, 2, [0])
    if naive.rank == 0:
        (folder / "snapshot_iter_2.1").unlink()
    naive.allgather_obj(None)
    with pytest.raises(RuntimeError, match=r"set 1 \(read by rank 1\) has none"):
        run(naive, folder, 4, [0])


def flip(path: Path) -> None:
    """Change a byte of the largest array; the file also has some that mean nothing."""
    with zipfile.ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda each: each.compress_size)
    data = bytearray(path.read_bytes())
    begin = member.header_offset
    header = 30 + sum(
        int.from_bytes(data[begin + at : begin + at + 2], "little") for at in (26, 28)
    )
    data[begin + header + member.compress_size // 2] ^= 1
    path.write_bytes(data)


def another(path: Path) -> None:
    with path.open("wb") as file:  # to a path, NumPy would append its suffix
        chainer.serializers.save_npz(file, L.Linear(2, 2))


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "emptied": lambda path: path.write_bytes(b""),
    "a byte": flip,
    "another's": another,
}


@pytest.mark.parametrize(
    ("of", "how"),
    [
        *(("last", how) for how in DAMAGES),
        ("first", "truncated"),
        *(pytest.param("first", how, marks=pytest.mark.full) for how in [*DAMAGES][1:]),
    ],
)
def test_damaged_newest_snapshot_is_passed_over_by_all_ranks(naive, folder, capfd, how, of):
    run(naive, folder, 6, [0])
    number = 0 if of == "first" else min(naive.size - 1, 1)
    if naive.rank == 0:
        DAMAGES[how](folder / f"snapshot_iter_6.{number}")
    naive.allgather_obj(None)
    trainer, _ = same_trainer(naive, folder)
    multi_node_snapshot(naive, extensions.snapshot(autoload=True), [0]).initialize(trainer)
    assert trainer.updater.iteration == 4
    said = capfd.readouterr().err
    if naive.rank == 0:
        assert said.count("\n") == 1
        assert f"snapshot_iter_6 skipped: {folder}/snapshot_iter_6.{number} " in said
        assert "; loading snapshot_iter_4\n" in said
    else:
        assert said == ""


def test_snapshots_that_are_all_damaged_are_an_error_on_all_ranks(naive, folder):
    run(naive, folder, 4, [0])
    if naive.rank == 0:
        for iteration in (2, 4):
            DAMAGES["truncated"](folder / f"snapshot_iter_{iteration}.0")
    before = snapshots(naive, folder)
    with pytest.raises(RuntimeError, match=r"4 skipped: .*iter_4\.0 can't be .*iter_2 skipped"):
        run(naive, folder, 6, [0])
    assert snapshots(naive, folder) == before


def test_snapshot_of_one_process_is_not_unpickled(naive, folder):
    class Trap:
        def __reduce__(self):
            return (pytest.exit, ("unpickled",))

    if naive.rank == 0:
        with (folder / "snapshot_iter_2").open("wb") as file:
            np.savez(file, a=np.array([Trap()], dtype=object))
    naive.allgather_obj(None)
    with pytest.raises((ValueError, RuntimeError), match="can't be read"):
        run(naive, folder, 4, [])


@pytest.mark.parametrize("writer", ["ThreadWriter", "ThreadQueueWriter", "SimpleWriter"])
def test_writers_and_n_retains(naive, folder, writer):
    made = getattr(extensions.snapshot_writers, writer)()
    run(naive, folder, 8, [0], writer=made, n_retains=2)
    both = ("0", "1") if naive.size > 1 else ("0",)
    kept = names(*(f"{i}.{s}" for i in (6, 8) for s in both))
    found = snapshots(naive, folder)
    assert kept <= found
    if writer == "SimpleWriter":
        assert found == kept
    trainer, _ = run(naive, folder, 10, [0])
    assert trainer.updater.iteration == 10


def test_condition_and_callable_file_name(naive, folder):
    trainer, _ = same_trainer(naive, folder)
    snapshot = extensions.snapshot(
        filename=lambda trainer: f"at{trainer.updater.iteration}",
        condition=lambda: naive.rank == 0 and trainer.updater.iteration > 2,
    )
    trainer.extend(multi_node_snapshot(naive, snapshot, [0]), trigger=(1, "iteration"))
    trainer.run()
    assert snapshots(naive, folder) == {"at3.0", "at4.0"}


def test_error_of_a_writer_is_raised_on_all_ranks(naive, folder):
    def fail(path, state):
        raise OSError(28, "No space left on device")

    with pytest.raises((OSError, RuntimeError), match="No space left"):
        run(naive, folder, 4, [0], savefun=fail)


def test_wrong_sets(naive):
    for sets, error, words in [
        ([99], ValueError, r"\[99\] must name some of the ranks 0 to"),
        ([-1], ValueError, "must name"),
        ([[]], ValueError, "must name"),
        ([0, [0]], ValueError, "named twice"),
        (["a"], TypeError, "'a'"),
        ([None], TypeError, "None"),
    ]:
        with pytest.raises(error, match=words):
            multi_node_snapshot(naive, extensions.snapshot(), sets)


def test_wrong_snapshots(naive):
    with pytest.raises(TypeError, match="not LogReport"):
        multi_node_snapshot(naive, extensions.LogReport(), [])
    with pytest.raises(ValueError, match="snapshot_on_error"):
        multi_node_snapshot(naive, extensions.snapshot(snapshot_on_error=True), [])
    with pytest.raises(TypeError, match="create_communicator"):
        multi_node_snapshot(None, extensions.snapshot(), [])  # type: ignore[arg-type]


@pytest.mark.sizes(2, 3, 4)
def test_sets_that_differ_between_ranks(naive, folder):
    trainer, _ = same_trainer(naive, folder)
    sets = [0] if naive.rank == 0 else []
    with pytest.raises(ValueError, match="differ between ranks"):
        multi_node_snapshot(naive, extensions.snapshot(), sets).initialize(trainer)


@pytest.mark.parametrize("sets", [[], [0]])
@pytest.mark.parametrize("fewer_on", ["all", "last"])
def test_another_division_of_the_data_is_told_on_all_ranks(naive, folder, sets, fewer_on):
    """Without shuffling, an iterator's state would seem to fit any number of examples."""

    def make(stop, examples):
        trainer, _ = same_trainer(naive, folder, stop, examples)
        snapshot = multi_node_snapshot(naive, extensions.snapshot(autoload=True), sets)
        trainer.extend(snapshot, trigger=(2, "iteration"))
        return trainer

    make(2, 8).run()
    here = 4 if fewer_on == "all" or naive.rank == naive.size - 1 else 8
    with pytest.raises((ValueError, RuntimeError), match=r"'main' has 4 examples.* had 8 there"):
        make(4, here).run(show_loop_exception_msg=False)
    make(4, 8).run()


def test_copies_share_the_communicator_and_pickling_is_refused(naive, folder):
    extension = multi_node_snapshot(naive, extensions.snapshot(), [0])
    for twin in (copy.copy(extension), copy.deepcopy(extension)):
        trainer, _ = same_trainer(naive, folder, stop=2)
        trainer.extend(twin, trigger=(2, "iteration"))
        trainer.run()
    assert snapshots(naive, folder) == names(*(f"2.{each}" for each in range(min(naive.size, 2))))
    with pytest.raises(TypeError, match="communicator"):
        pickle.dumps(extension)
