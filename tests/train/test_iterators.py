"""The multi-node iterator gives the master's batches on every rank."""

from __future__ import annotations

import gc
import math
import weakref
from copy import copy, deepcopy

import numpy as np
import pytest
from chainer.dataset import Iterator
from chainer.datasets import TransformDataset
from chainer.iterators import SerialIterator
from chainer.serializers import load_npz, save_npz

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import (
    ResumableOrderSampler,
    create_multi_node_iterator,
    create_synchronized_iterator,
)
from tests.support.oracles.raised import Awkward, raises_on_all
from tests.support.oracles.samples import alike
from tests.support.training.trainers import every_kind, processes, serial

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("forkserver")]

PROPERTIES = [
    "epoch",
    "is_new_epoch",
    "epoch_detail",
    "previous_epoch_detail",
    "current_position",
    "repeat",
    "batch_size",
]


def of_master(comm, iterator, master=0):
    """A multi-node iterator, of `iterator` at the master and of nothing elsewhere."""
    master %= comm.size
    given = None
    if comm.rank == master:
        given = iterator
    return create_multi_node_iterator(given, comm, master)


def of_last(iterator, comm):
    return of_master(comm, iterator, -1)


synchronized = create_synchronized_iterator


def on_all_ranks(comm, value):
    """The value, once it is known to be equal on all ranks."""
    for rank, other in enumerate(comm.allgather_obj(value)):
        assert alike(value, other), f"rank {rank} has {other}, this one {value}"
    return value


def properties(comm, iterator):
    return on_all_ranks(comm, {name: getattr(iterator, name) for name in PROPERTIES})


EXAMPLES = [
    *(np.arange(4).astype(dtype) for dtype in ("f2", "?", "c16", ">f4", "M8[s]")),
    *(np.ones((n, 2), np.float16) for n in (0, 5)),
    *(np.array(1.5), np.float32(2.5), np.array([None, "a"], dtype=object)),  # 0-d
    *(np.arange(6.0).reshape(2, 3).T, np.arange(9)[::2], np.broadcast_to(1.0, (2, 2))),
    np.zeros(2, [("a", "i4"), ("b", "f8", 2)]),
    {"x": (np.ones(2), [np.zeros(1), {"y": "été"}]), "n": None, "m": (1 << 80, b"")},
    (np.ones(3, "i1"), np.ones(5, "c16")),
]


def test_any_example_arrives_as_it_is_in_aligned_memory_of_its_own(comm):
    iterator = of_master(comm, serial(EXAMPLES, repeat=False, shuffle=False), -1)
    found = [example for batch in iterator for example in on_all_ranks(comm, batch)]
    assert alike(found, EXAMPLES)
    if iterator.rank_master != comm.rank:
        for array in found[-1]:
            array += 1
            assert array.flags.aligned


@every_kind
@pytest.mark.parametrize("share", [of_last, synchronized])
def test_it_resumes_with_the_batches_of_an_uninterrupted_run(comm, kind, share, folder):
    """To the end of the next epoch and on, from any rank's file."""

    def make():
        sampler = ResumableOrderSampler(comm.rank)
        return share(kind(np.arange(25), order_sampler=sampler), comm)

    with make() as first, make() as second:
        for _ in range(9):  # into the second epoch
            next(first)
        save_npz(folder / f"{comm.rank}.npz", first)
        before = properties(comm, first)
        rest = [on_all_ranks(comm, next(first)) for _ in range(20)]
        load_npz(folder / "0.npz", second)  # whose rank may have none of the examples
        assert properties(comm, second) == before
        assert alike([on_all_ranks(comm, next(second)) for _ in range(20)], rest)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", ["there", "here"])
def test_an_error_in_making_a_batch_or_on_its_way_is_raised_on_all_ranks(comm, where):
    iterator = of_master(comm, serial([0, Awkward(where)], 1, shuffle=False))
    assert next(iterator) == [0]
    fails_here = (comm.rank == 0) == (where == "there")
    error = PeerError
    if fails_here:
        error = ValueError
    with pytest.raises(error, match="does not "):
        next(iterator)
    if where == "there":  # else a rank has not heard of it
        properties(comm, iterator)
    iterator.reset()
    assert on_all_ranks(comm, next(iterator)) == [0]


def test_on_one_rank_an_example_needs_no_pickle(naive):
    with naive.split(naive.rank, 0) as alone:
        iterator = of_master(alone, serial([abs, lambda x: x], 2, shuffle=False))
        assert next(iterator)[1](-1) == -1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_worker_process_is_raised_on_all_ranks(naive):
    """Chainer's iterator alone would wait for the batch without end."""
    roots = TransformDataset([1.0, 4.0, -1.0, 9.0], math.sqrt)
    iterator = of_master(naive, processes(roots, 1, shuffle=False))
    assert next(iterator) == [1.0]
    assert next(iterator) == [2.0]
    wrong = naive.rank == 0
    with raises_on_all(wrong, RuntimeError, "an example raised an error in a worker"):
        next(iterator)
    iterator.finalize()
    with raises_on_all(wrong, AttributeError):
        next(iterator)


# Calls with a mistake of the last rank or of all, given whether this is the last rank, and
# what is said of it.
MISTAKES = [
    (lambda comm, _: of_last([1, 2], comm), "needs a Chainer iterator at rank_master"),
    (
        lambda comm, is_last: synchronized([1] if is_last else serial([1]), comm),
        "needs a SerialIterator, MultiprocessIterator or M",
    ),
    (
        lambda comm, _: create_multi_node_iterator(serial([1]), comm, comm.size),
        "rank_master must be from 0 to",
    ),
    (
        lambda comm, _: synchronized(of_last(serial([1]), comm), comm),
        "MultiNodeIterator, which ranks share",
    ),
    (
        lambda comm, _: of_last(synchronized(serial([1]), comm), comm),
        "SynchronizedIterator, which ranks share",
    ),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES)
def test_bad_arguments_are_told_on_all_ranks(comm, call, text):
    with pytest.raises((TypeError, ValueError, PeerError), match=text):
        call(comm, comm.rank == comm.size - 1)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_name_different_masters_or_call_different_methods_are_told(comm):
    with pytest.raises(ValueError, match="disagree on rank_master: 0 on rank"):
        create_multi_node_iterator(serial([1]), comm, int(comm.rank == 1))
    iterator = of_master(comm, serial([1, 2, 3], 1, shuffle=False))
    text = r"disagree on method: .*reset on rank 1"
    with pytest.raises(RankMismatchError, match=text):
        iterator.reset() if comm.rank == 1 else next(iterator)
    assert on_all_ranks(comm, next(iterator)) == [2]


@pytest.mark.parametrize("create", [create_multi_node_iterator, synchronized])
def test_attributes_are_forwarded_both_ways(comm, create):
    own = serial(np.arange(6), 2, shuffle=False)
    iterator = create(own, comm)
    assert isinstance(iterator, Iterator)
    assert len(iterator.dataset) == 6
    if create is synchronized or comm.rank == 0:
        assert iterator.actual_iterator is own  # Chainer 7's name
        iterator.mark = "mine"
        assert own.mark == "mine"
    else:
        with pytest.raises(RuntimeError, match="the examples are on rank 0"):
            iterator.dataset[0]
    iterator.batch_size = 4
    found = list(on_all_ranks(comm, next(iterator)))
    assert found == [0, 1, 2, 3]
    assert properties(comm, iterator)["current_position"] == 4
    with pytest.raises(AttributeError, match="nonsense"):
        iterator.nonsense  # noqa: B018


@pytest.mark.parametrize("share", [of_last, synchronized])
def test_copies_go_on_by_themselves(comm, share):
    iterator = share(serial(np.arange(25), shuffle=False), comm)
    next(iterator)
    for twin in copy(iterator), deepcopy(iterator), iterator:
        found = on_all_ranks(comm, [next(twin) for _ in range(10)])
        assert found[0] == [3, 4, 5]
        assert twin.epoch == 1
        assert twin.current_position == 8


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
