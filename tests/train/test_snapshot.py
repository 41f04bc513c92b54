"""Snapshots that ranks with the same state share: who writes, who loads, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import Link
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from chainer.optimizers import Adam
from chainer.training import StandardUpdater, Trainer, extensions
from numpy.testing import assert_allclose

from chainermn_comm import PeerError, Sharding
from chainermn_train import (
    DistributedOrderSampler,
    create_multi_node_optimizer,
    multi_node_snapshot,
)
from tests.support.training.checkpoints import bits, files, on_rank_0, run_until

pytestmark = pytest.mark.world


def make(
    comm,
    out,
    stop=4,
    sets=(0,),
    *,
    examples=6,
    sampler=None,
    autoload=True,
    **options,
):
    """A trainer whose state is the same on all ranks, its model, and its snapshots."""
    x = np.linspace(0, 1, examples * 2, dtype="f4").reshape(examples, 2)
    np.random.seed(comm.rank)
    model = L.Classifier(L.Linear(2, 1), lossfun=chainer.functions.mean_squared_error)
    model.compute_accuracy = False
    adam = Adam()
    optimizer = create_multi_node_optimizer(adam, comm).setup(model)
    dataset = TupleDataset(x, x[:, :1])
    shuffle = False
    if sampler:
        shuffle = None
    iterator = SerialIterator(dataset, 2, shuffle=shuffle, order_sampler=sampler)
    updater = StandardUpdater(iterator, optimizer)
    trainer = Trainer(updater, (stop, "iteration"), out=str(out))
    if comm.rank == 0 and sets:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    taken = extensions.snapshot(autoload=autoload, **options)
    snapshot = multi_node_snapshot(comm, taken, sets)
    trainer.extend(snapshot, trigger=(2, "iteration"))
    return trainer, model, snapshot


def run(*arguments, **options):
    trainer, model, _ = make(*arguments, **options)
    trainer.run(show_loop_exception_msg=False)
    return trainer, model


def names(iterations, sets):
    return {f"snapshot_iter_{it}.{number}" for it in iterations for number in sets}


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    ("sets", "first"),
    [
        ([], [0, 0, 0]),
        ([0], [0, 1, 1]),
        ([[0, 2], [1]], [0, 1, 0]),
        ([{2, 1}], [0, 1, 1]),
    ],
    ids=str,
)
def test_each_set_has_the_state_of_its_first_rank(naive, folder, sets, first):
    """Sets are those documented; `first`: of each rank's set."""
    target = Link()
    target.add_persistent("value", np.array([naive.rank * 10], "f8"))
    target.add_persistent("nothing", None)
    # Any iterable.
    trainer, _, snapshot = make(naive, folder, 2, iter(sets), target=target)
    trainer.run()
    assert files(naive, folder) == names([2], range(len(set(first))))
    target.value[:] = -1
    target.nothing = 1
    snapshot.initialize(trainer)
    assert target.value.tolist() == [first[naive.rank] * 10]
    assert target.nothing is None


@pytest.mark.sizes(2, 3, 4, 8)
def test_fewer_and_more_ranks_go_on(naive, folder):
    """State that belongs to no rank; means of 2^n equal numbers are exact, and so are the bits."""

    def train(size, out, stop):
        weights = None
        with naive.split(int(naive.rank < size), naive.rank) as part:
            if naive.rank < size:
                _, model = run(part, out, stop)
                weights = [param.array for _, param in sorted(model.namedparams())]
        return naive.bcast_obj(weights)

    whole = train(1, folder / "whole", 8)
    for begin, end in ((2, naive.size), (naive.size, 1)):
        out = folder / f"{begin} {end}"
        train(begin, out, 4)
        rtol = 0
        if naive.size == 3:
            rtol = 1e-6
        for mine, expected in zip(train(end, out, 8), whole, strict=True):
            assert_allclose(mine, expected, rtol=rtol)
        assert files(naive, out) >= names([4, 8], [0])


def test_ranks_of_one_set_go_on_with_their_parts_of_a_shared_order(naive, folder):
    def end_of(out, stop):
        sampler = DistributedOrderSampler(naive, 1)
        return bits(run(naive, out, stop, [], examples=24, sampler=sampler)[1])

    whole = end_of(folder / "whole", 20)
    end_of(folder / "run", 2)
    assert end_of(folder / "run", 20) == whole


FOUND = [
    "plain",
    "{{x}}_{.updater.iteration}",
    "s_{.updater.epoch_detail:.2f}",
    "{.updater.epoch_detail:.3e}",
    "(a+b)_{.updater.iteration:06d}.[x]$",
    "{.updater.iteration:>8}",
    "e{0.updater.epoch}_of_3_i{0.updater.iteration}.npz",
    "i{0.updater.iteration}_e{0.updater.epoch}",
]


@pytest.mark.parametrize("filename", FOUND)
def test_the_newest_is_found_whatever_its_name(naive, folder, filename):
    """Newest by number: 10 comes after 8."""
    run(naive, folder, 10, filename=filename)
    trainer, _, snapshot = make(naive, folder, filename=filename)
    snapshot.initialize(trainer)
    assert trainer.updater.iteration == 10


@pytest.mark.parametrize("filename", ["{.updater.iteration:x}", "{.out}"])
def test_a_name_that_is_no_number_any_more_is_an_error_on_all_ranks(
    naive, folder, filename
):
    with pytest.raises((ValueError, PeerError), match="autoload"):
        run(naive, folder, 12, filename=filename)
    run(naive, folder / "other", 12, filename="{.updater.iteration:x}", autoload=False)
    assert any(name.startswith("a.") for name in files(naive, folder / "other"))


def test_the_newest_that_is_whole_is_loaded_and_of_the_same_sets(naive, folder, capfd):
    run(naive, folder, 6)
    on_rank_0(naive, lambda: (folder / "snapshot_iter_6.0").write_bytes(b"PK"))
    trainer, _, snapshot = make(naive, folder)
    snapshot.initialize(trainer)
    assert trainer.updater.iteration == 4
    if naive.rank == 0:
        said = capfd.readouterr().err
        assert "snapshot_iter_6.* is incomplete: " in said
        assert said.endswith("; training goes on from snapshot_iter_4\n")
    if naive.size > 1:
        trainer, _, snapshot = make(naive, folder, sets=[])
        words = "was taken of 2 replica sets, not 1"
        with pytest.raises(ValueError, match=words):
            snapshot.initialize(trainer)


@pytest.mark.parametrize(
    "writer", ["ThreadWriter", "ThreadQueueWriter", "SimpleWriter"]
)
def test_writers_and_n_retains(naive, folder, writer):
    made = getattr(extensions.snapshot_writers, writer)()
    run(naive, folder, 8, writer=made, n_retains=2)
    found = files(naive, folder)
    kept = names([6, 8], range(min(naive.size, 2)))
    assert found == kept if writer == "SimpleWriter" else found >= kept
    trainer, _ = run(naive, folder, 10)
    assert trainer.updater.iteration == 10


def test_condition_and_callable_file_name(naive, folder):

    def is_due():
        return naive.rank == 0 and trainer.updater.iteration > 2

    trainer, *_ = make(
        *(naive, folder, 6),
        filename=lambda trainer: f"at{trainer.updater.iteration}",
        condition=is_due,
        autoload=False,
    )
    trainer.run()
    assert files(naive, folder) == {"at4.0", "at6.0"}


def test_wrong_arguments(naive):
    snapshot = extensions.snapshot()
    unfindable = extensions.snapshot(filename=lambda _: "name", autoload=True)
    limits = rf"\[99\]\] must name ranks from 0 to {naive.size - 1}, each in one set"
    for comm, extension, sets, error, words in [
        (naive, snapshot, [99], ValueError, limits),
        (naive, snapshot, [[]], ValueError, "must name"),
        (naive, snapshot, [0, [0]], ValueError, "must name"),
        (naive, unfindable, [], ValueError, "autoload"),
        (naive, snapshot, ["a"], TypeError, "'str'"),
        (naive, extensions.LogReport(), [], TypeError, "not LogReport"),
        (None, snapshot, [], TypeError, "create_communicator"),
    ]:
        with pytest.raises(error, match=words):
            multi_node_snapshot(comm, extension, sets)


def test_a_snapshot_on_errors_is_warned_of_and_not_taken(naive, folder):
    warned = pytest.warns(RuntimeWarning, match="can't be taken on an error")
    if naive.rank == 0:
        warning = warned
    else:
        warning = nullcontext()
    with warning:
        trainer, *_ = make(naive, folder, snapshot_on_error=True)
    run_until(trainer, 3)
    assert files(naive, folder) == names([2], range(min(naive.size, 2)))


@pytest.mark.sizes(2, 3, 4)
def test_sets_that_differ_between_ranks(naive, folder):
    sets = []
    if naive.rank == 0:
        sets = [0]
    trainer, _, snapshot = make(naive, folder, sets=sets)
    with pytest.raises(ValueError, match="disagree on replica_sets: "):
        snapshot.initialize(trainer)


def test_ranks_that_hold_different_parts_are_no_set(naive, folder):
    target = L.Linear(2, 1)
    target.b.shardings = (Sharding("shard", naive),)
    for sets in ([], range(naive.size)):
        trainer, _, snapshot = make(naive, folder, sets=sets, target=target)
        refused = nullcontext()
        if not sets and naive.size > 1:
            refused = pytest.raises(ValueError, match=r"parts of /b: .*checkpointer")
        for call in snapshot.initialize, snapshot:
            with refused:
                call(trainer)


def test_another_division_of_the_data_is_told_on_all_ranks(naive, folder):
    """Without shuffling, an iterator's state would seem to fit any number of examples."""
    run(naive, folder, 2, examples=8)
    here = 8
    if naive.rank == naive.size - 1:
        here = 4
    with pytest.raises(
        (ValueError, RuntimeError), match=r"'main' has 4 examples.* had 8 there"
    ):
        run(naive, folder, 4, examples=here)
