"""The multi-node iterator gives the master's batches on every rank."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
from chainer import training
from chainer.dataset import Iterator
from chainer.datasets import TransformDataset
from chainer.iterators import SerialIterator, ShuffleOrderSampler
from chainer.optimizers import SGD
from chainer.serializers import (
    DictionarySerializer,
    NpzDeserializer,
    load_npz,
    save_npz,
)
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import (
    create_multi_node_evaluator,
    create_multi_node_iterator,
    create_multi_node_optimizer,
    create_synchronized_iterator,
)
from tests.support.oracles.alike import alike
from tests.support.oracles.pickles import Awkward
from tests.support.training.iterators import every_kind, processes, serial
from tests.support.training.linear import ScaledMean
from tests.support.training.trainers import logged

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("forkserver")]

POSITION = [
    "epoch",
    "is_new_epoch",
    "epoch_detail",
    "previous_epoch_detail",
    "current_position",
]
PROPERTIES = [*POSITION, "repeat", "batch_size"]


def of_master(comm, iterator, master=0):
    """A multi-node iterator, of `iterator` at the master and of nothing elsewhere."""
    return create_multi_node_iterator(
        iterator if comm.rank == master else None, comm, master
    )


def on_all_ranks(comm, value):
    """The value, once it is known to be equal on all ranks."""
    for rank, other in enumerate(comm.allgather_obj(value)):
        assert alike(value, other), f"rank {rank} has {other}, this one {value}"
    return value


def properties(comm, iterator):
    return on_all_ranks(comm, {name: getattr(iterator, name) for name in PROPERTIES})


EXAMPLES = [
    *(np.arange(4).astype(dtype) for dtype in ("f2", "i1", "?", "c16", ">f4", "M8[s]")),
    *(np.ones((n, 2), np.float16) for n in (1, 0, 5)),  # several shapes
    *(np.array(1.5), np.float32(2.5), np.array([None, "a"], dtype=object)),  # 0-d
    # Layouts.
    *(np.arange(6.0).reshape(2, 3).T, np.arange(9)[::2], np.broadcast_to(1.0, (2, 2))),
    np.zeros(2, [("a", "i4"), ("b", "f8", 2)]),
    {"x": (np.ones(2), [np.zeros(1), {"y": "text"}]), "n": None, "m": ()},
    *("été", b"bytes", None, 1 << 80),
    (np.ones(3, "i1"), np.ones(5, "c16")),
]


def test_any_example_arrives_as_it_is_in_aligned_memory_of_its_own(comm):
    master = comm.size - 1
    iterator = of_master(comm, serial(EXAMPLES, repeat=False, shuffle=False), master)
    found = [example for batch in iterator for example in on_all_ranks(comm, batch)]
    assert alike(found, EXAMPLES)
    for array in found[-1] if comm.rank != master else ():
        array += 1
        assert array.flags.aligned


@every_kind
@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_go_by_as_those_of_the_actual_iterator(comm, kind, shuffle):
    def order():
        seeded = ShuffleOrderSampler(np.random.RandomState(1))
        return {"order_sampler": seeded} if shuffle else {"shuffle": False}

    iterator, expected = (
        of_master(comm, kind(np.arange(7), **order())),
        serial(range(7), **order()),
    )
    for _ in range(6):
        assert properties(comm, iterator) == {
            n: getattr(expected, n) for n in PROPERTIES
        }
        assert np.array_equal(on_all_ranks(comm, iterator.next()), next(expected))
    assert iterator.epoch == 2
    iterator.finalize()
    iterator.finalize()


@every_kind
@pytest.mark.parametrize("repeat", [True, False])
def test_it_resumes_in_the_middle_of_an_epoch_from_any_ranks_file(
    comm, kind, repeat, tmp_path
):
    master = comm.size - 1

    def make():
        return of_master(comm, kind(np.arange(10), repeat=repeat), master)

    with make() as first, make() as second:
        for _ in range(2):
            next(first)
        path = tmp_path / f"{comm.rank}.npz"
        save_npz(path, first)
        before = properties(comm, first)
        rest = [next(first) for _ in range(2)]  # to the end of this epoch
        files = comm.allgather_obj(path.read_bytes())
        with np.load(path, allow_pickle=True) as mine:
            assert {"current_position", "epoch", "is_new_epoch"} <= set(mine.files)
        path.write_bytes(files[0])  # the file of a rank that is not the master
        load_npz(path, second)
        assert properties(comm, second) == before
        resumed = [on_all_ranks(comm, next(second)) for _ in range(2)]
        # The last batch of a repeating iterator goes on into the next epoch's own
        # order.
        assert alike(resumed[0], rest[0])
        assert resumed[1][0] == rest[1][0]


def test_an_error_in_making_a_batch_is_raised_on_all_ranks(comm):
    pictures = TransformDataset(
        [0, 1, 2, "no such picture"], {0: 0, 1: 1, 2: 2}.__getitem__
    )
    iterator = of_master(comm, serial(pictures, 2, repeat=False, shuffle=False))
    assert next(iterator) == [0, 1]
    expected = KeyError if comm.rank == 0 else PeerError
    text = (
        "no such picture" if comm.rank == 0 else "rank 0: KeyError: 'no such picture'"
    )
    with pytest.raises(expected, match=text):
        next(iterator)
    properties(comm, iterator)
    iterator.reset()
    assert on_all_ranks(comm, next(iterator)) == [0, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_worker_process_is_raised_on_all_ranks(naive):
    """Chainer's iterator alone would wait for the batch without end."""
    roots = TransformDataset([1.0, 4.0, 9.0, 16.0, -1.0, 25.0, 36.0, 49.0], math.sqrt)
    iterator = of_master(naive, processes(roots, 2, shuffle=False))
    assert [next(iterator), next(iterator)] == [[1.0, 2.0], [3.0, 4.0]]
    expected = RuntimeError if naive.rank == 0 else PeerError
    for _ in range(2):
        with pytest.raises(
            expected, match="an example raised an error in a worker process"
        ):
            next(iterator)
    iterator.finalize()
    with pytest.raises(AttributeError if naive.rank == 0 else PeerError):
        next(iterator)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", ["there", "here"])
def test_an_example_that_cannot_travel_is_an_error_on_all_ranks(comm, where):
    iterator = of_master(comm, serial([1, Awkward(where), 2], 1, shuffle=False))
    assert next(iterator) == [1]
    fails_here = (comm.rank == 0) == (where == "there")
    with pytest.raises(ValueError if fails_here else PeerError, match="does not "):
        next(iterator)
    assert next(iterator) == [2]  # the ranks are still in step


def test_bad_arguments_are_told_on_all_ranks(comm):
    last = comm.size - 1
    error = TypeError if comm.rank == last else PeerError
    for iterator in (None, [1, 2], iter([1]), np.arange(3)):
        with pytest.raises(error, match="needs a Chainer iterator at rank_master"):
            create_multi_node_iterator(iterator, comm, last)
    for bad, kind in (comm.size, ValueError), ("0", TypeError):
        mine = comm.rank == last
        with pytest.raises(kind if mine else PeerError, match="rank_master must be"):
            create_multi_node_iterator(serial([1]), comm, bad if mine else 0)
    for first in create_multi_node_iterator, create_synchronized_iterator:
        with pytest.raises(TypeError, match="needs a communicator"):
            first(serial([1]), None)
        for second in create_multi_node_iterator, create_synchronized_iterator:
            with pytest.raises(TypeError, match="which ranks share"):
                second(first(serial([1]), comm), comm)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_name_different_masters_or_call_different_methods_are_told(comm):
    with pytest.raises(ValueError, match="disagree on rank_master: 0 on rank"):
        create_multi_node_iterator(serial([1]), comm, int(comm.rank == 1))
    iterator = of_master(comm, serial([1, 2, 3, 4], 1, shuffle=False))
    with pytest.raises(
        RankMismatchError, match=r"disagree on method: .*reset on rank 1"
    ):
        iterator.reset() if comm.rank == 1 else next(iterator)
    assert on_all_ranks(comm, next(iterator)) == [2]
    text = "serialize, saving on rank.* 0.*; serialize, loading on rank 1"
    with pytest.raises(RankMismatchError, match=text):
        iterator.serialize(
            NpzDeserializer({}) if comm.rank == 1 else DictionarySerializer()
        )
    assert on_all_ranks(comm, next(iterator)) == [3]


@pytest.mark.parametrize(
    "create", [create_multi_node_iterator, create_synchronized_iterator]
)
def test_attributes_are_forwarded_both_ways(comm, create):
    own = serial(np.arange(6), 2, shuffle=False)
    iterator = create(own, comm)
    assert isinstance(iterator, Iterator)
    if create is create_synchronized_iterator or comm.rank == 0:
        assert iterator.dataset is own.dataset
        assert iterator.actual_iterator is own  # Chainer 7's name
        iterator.order_sampler = "mine"
        assert own.order_sampler == "mine"
        iterator.order_sampler = None
    iterator.batch_size = 4
    assert list(on_all_ranks(comm, next(iterator))) == [0, 1, 2, 3]
    found = properties(comm, iterator)
    assert (found["batch_size"], found["current_position"], found["epoch"]) == (4, 4, 0)
    assert (found["epoch_detail"], found["previous_epoch_detail"]) == (4 / 6, 0)
    with pytest.raises(AttributeError, match="nonsense"):
        iterator.nonsense  # noqa: B018


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_without_the_examples_knows_how_many_there_are(comm):
    for own in (None, serial([()] * 2)):
        iterator = create_multi_node_iterator(
            serial([5, 6, 7]) if comm.rank == 0 else own, comm
        )
        assert len(iterator.dataset) == 3
        if comm.rank:
            with pytest.raises(RuntimeError, match="the examples are on rank 0"):
                iterator.dataset[0]
        iterator.finalize()


def master_shares(iterator, comm):
    return of_master(comm, iterator, comm.size - 1)


synchronized = create_synchronized_iterator


@pytest.mark.parametrize("share", [master_shares, synchronized])
def test_copies_go_on_by_themselves_and_pickles_are_refused(comm, share):
    iterator = share(serial(np.arange(25), shuffle=False), comm)
    next(iterator)
    for twin in copy.copy(iterator), copy.deepcopy(iterator), iterator:
        assert twin.communicator is comm
        found = on_all_ranks(comm, [next(twin) for _ in range(10)])
        assert found[0] == [3, 4, 5]
        assert (twin.epoch, twin.current_position) == (1, 8)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(iterator)


def test_being_forgotten_finalizes_nothing_that_is_still_in_use(comm):
    finalized = []

    class Noting(SerialIterator):
        def finalize(self):
            finalized.append(self.batch_size)

    own = Noting(np.arange(4), 1)
    reference = weakref.ref(create_synchronized_iterator(own, comm))
    gc.collect()
    assert reference() is None
    assert finalized == []
    with create_synchronized_iterator(own, comm):
        pass
    assert finalized == [1]


@pytest.mark.parametrize("share", [master_shares, synchronized])
def test_an_evaluator_and_a_trainer_run_on_it(comm, share, tmp_path):
    """All ranks see the same batches, so their mean is that of one process."""
    examples = np.arange(10, dtype=np.float32)
    optimizer = create_multi_node_optimizer(SGD(0.1), comm).setup(ScaledMean())
    updater = training.StandardUpdater(share(serial(examples, 5), comm), optimizer)
    trainer = training.Trainer(updater, (2, "epoch"), out=str(tmp_path))
    test = share(serial(examples, 4, repeat=False, shuffle=False), comm)
    evaluator = extensions.Evaluator(test, optimizer.target)
    trainer.extend(create_multi_node_evaluator(evaluator, comm))
    losses = [entry["validation/main/loss"] for entry in logged(trainer, (1, "epoch"))]
    weights = [1 - 0.1 * 9, 1 - 0.2 * 9]
    np.testing.assert_allclose(losses, np.multiply(weights, 4.5), rtol=1e-5)
    on_all_ranks(comm, optimizer.target.w.array)
