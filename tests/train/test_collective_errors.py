"""What one rank finds wrong is raised on all, and is never lost on the way."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import (
    create_multi_node_evaluator,
    create_multi_node_iterator,
    create_multi_node_optimizer,
    scatter_dataset,
)
from chainermn_train.collective_errors import (
    allgather_checked,
    bcast_checked,
    values_of_first_holders,
)
from chainermn_train.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
)
from tests.support.plugins.pairwise import tiered

pytestmark = pytest.mark.world


class Interrupts:
    """Where it is told to, it raises when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index

    def __reduce_ex__(self, _):
        raise self.error


def iterator(count):
    return SerialIterator(
        np.ones((count, 3), np.float32), 1, repeat=False, shuffle=False
    )


def by_evaluator(comm, fail):
    evaluator = extensions.Evaluator(
        iterator(2), L.Linear(3, 1), eval_func=lambda _: fail()
    )
    create_multi_node_evaluator(evaluator, comm)()


def by_iterator(comm, fail):
    class Fails(SerialIterator):
        def __next__(self):
            fail()

    master = comm.size - 1
    next(create_multi_node_iterator(Fails([1], 1), comm, rank_master=master))


class Metric(GenericMultiNodeEvaluator):
    """Its two parts that a user writes fail where they are told to."""

    fail_locally = fail_together = staticmethod(lambda: None)

    def calc_local(self, x):
        self.fail_locally()
        return x

    def aggregate(self, results):
        self.fail_together()


def by_metric(comm, fail, which="fail_locally"):
    evaluator = Metric(comm, iterator(4), L.Linear(3, 1), root=comm.size - 1)
    setattr(evaluator, which, fail)
    evaluator()


by_aggregate = partial(by_metric, which="fail_together")


def by_trigger(comm, fail):
    stop = MultiNodeEarlyStoppingTrigger(
        comm, lambda _: False, max_trigger=lambda _: fail()
    )
    stop(type("Trainer", (), {"observation": {}})())


def by_persistents(comm, fail):
    AllreducePersistent(SimpleNamespace(namedlinks=lambda: fail() or []), comm)()


def by_action(comm, fail):
    allgather_checked(comm, "test", fail)


WAYS = [
    by_action,
    by_evaluator,
    by_iterator,
    by_metric,
    by_aggregate,
    by_trigger,
    by_persistents,
]


FIRST = [(by_action, SystemExit), *((way, KeyboardInterrupt) for way in WAYS)]


@pytest.mark.parametrize(("way", "error"), tiered(FIRST, WAYS, [SystemExit]))
def test_an_interrupt_of_one_rank_is_told_to_all(comm, way, error):
    last = comm.size - 1

    def fail():
        if comm.rank == last:
            raise error("planted")

    with pytest.raises(
        error if comm.rank == last else PeerError, match="planted"
    ) as raised:
        way(comm, fail)
    if comm.rank != last:
        assert f"rank {last}: {error.__name__}: planted" in str(raised.value)
    assert comm.allreduce_obj(1) == comm.size


def test_an_interrupt_in_combining_observations_is_told_to_all(comm):
    def interrupted(_):
        raise KeyboardInterrupt("planted")

    aggregator = ObservationAggregator(comm, "x", aggregator=interrupted)
    trainer = SimpleNamespace(
        observation={"x": 1.0}, updater=SimpleNamespace(iteration=1)
    )
    with pytest.raises(
        KeyboardInterrupt if comm.rank == 0 else PeerError, match="planted"
    ):
        aggregator(trainer)
    assert comm.allreduce_obj(1) == comm.size


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("as_example", [False, True])
def test_an_interrupt_in_pickling_a_part_is_told_to_all(comm, as_example):
    kind = SystemExit if as_example else KeyboardInterrupt
    error = kind("planted")
    examples = (
        [*range(comm.size - 1), Interrupts(error)] if as_example else Interrupts(error)
    )
    with pytest.raises(kind if comm.rank == 0 else PeerError, match="planted"):
        scatter_dataset(examples if comm.rank == 0 else None, comm)
    with pytest.raises(kind if comm.rank == 0 else PeerError, match="planted"):
        bcast_checked(comm, "test", lambda: Interrupts(error))
    assert comm.allreduce_obj(1) == comm.size


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("tell", [allgather_checked, bcast_checked])
def test_an_error_is_told_where_the_other_ranks_call_another_method(naive, tell):
    """Rank 0 has an error, and so isn't in the collective call that the others are in."""

    def fail():
        raise ValueError("planted")

    with pytest.raises(
        PeerError if naive.rank else ValueError, match="planted"
    ) as raised:
        naive.alltoall(tuple(range(naive.size))) if naive.rank else tell(
            naive, "test", fail
        )
    assert not naive.rank or "rank 0: ValueError: planted" in str(raised.value)
    assert naive.allreduce_obj(1) == naive.size


def test_values_that_are_too_large_for_a_handshake_arrive(comm):
    """Of some ranks only; a handshake is made for some kilobytes."""
    last, sizes = comm.size - 1, (3, 1 << 20)
    mine = bytes(sizes[comm.rank == last])
    found = allgather_checked(comm, "test", lambda: mine)
    assert [len(each) for each in found] == [
        sizes[rank == last] for rank in range(comm.size)
    ]
    for size in sizes:
        assert bcast_checked(comm, "test", lambda: bytes(size), last) == bytes(size)  # noqa: B023


@pytest.mark.sizes(2, 3, 4)
def test_the_cause_is_named_where_the_others_are_in_a_call_of_their_losses(naive):
    """Rank 0's fails at once. All have raised in that call, and are in step."""

    def loss():
        if naive.rank == 0:
            raise ValueError("planted")
        naive.alltoall(tuple(range(naive.size)))

    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), naive)
    optimizer.setup(L.Linear(3, 1, initialW=1)).assume_synchronized()
    with pytest.raises(
        PeerError if naive.rank else ValueError, match="planted"
    ) as raised:
        optimizer.update(loss)
    assert not naive.rank or "rank 0: ValueError: planted" in str(raised.value)
    assert naive.allreduce_obj(1) == naive.size


@pytest.mark.sizes(2, 3, 4)
def test_epochs_of_different_lengths_are_told(naive, trainer_for):
    """Rank 0 evaluates at the end of its epoch, and the others go on with theirs."""
    model = L.Classifier(L.Linear(3, 2))
    x, t = (
        np.ones((4 + 4 * naive.rank, 3), np.float32),
        np.zeros(4 + 4 * naive.rank, np.int32),
    )
    examples = chainer.datasets.TupleDataset(x, t)
    batches = SerialIterator(examples, 2, repeat=False, shuffle=False)
    evaluator = create_multi_node_evaluator(extensions.Evaluator(batches, model), naive)
    trainer = trainer_for(
        naive, (2, "epoch"), evaluator, model=model, examples=examples
    )
    where = "optimizer" if naive.rank else "evaluator"
    words = rf"This rank is in a multi-node {where}\..*equally often.*force_equal_length=False"
    with pytest.raises(RankMismatchError, match=words):
        trainer.run(show_loop_exception_msg=False)
    assert naive.allreduce_obj(1) == naive.size


@pytest.mark.sizes(2, 3, 4)
def test_what_a_rank_lacks_comes_from_the_first_that_has_it_and_no_other(comm):
    def give(name):
        given.append(name)
        return f"{name} of rank {comm.rank}"

    given: list[str] = []
    held = {"a", "b"} if comm.rank else {"b", "c"}
    found = values_of_first_holders(comm, "exchange", held, give)
    of_rank_0 = {"b": "b of rank 0", "c": "c of rank 0"} if comm.rank else {}
    assert found == of_rank_0 | ({"a": "a of rank 1"} if comm.rank != 1 else {})
    assert sorted(given) == [["b", "c"], ["a"], [], []][comm.rank]
