"""Iterators that several ranks share."""

from __future__ import annotations

import chainer
import numpy as np
from chainer.iterators import SerialIterator
from chainer.serializers import DictionarySerializer

from .table import case, each, outcome

EXAMPLES = {
    "arrays": [np.full(2, n, np.float32) for n in range(5)],
    "pairs": [(np.full(2, n, np.float32), np.full(1, n, np.float32)) for n in range(5)],
    "labelled": [(np.full(2, n, np.float32), np.int32(n)) for n in range(5)],
    "float32": [np.float32(n) for n in range(5)],
}


def serial(examples, batch=2, **how):
    return SerialIterator(examples, batch, **{"shuffle": False, **how})


def shared(chainermn, comm, examples, root=0, **how):
    actual = None
    if comm.rank == root:
        actual = serial(examples, **how)
    return chainermn.iterators.create_multi_node_iterator(actual, comm, root)


@each(**EXAMPLES)
def multi_node_iterator(chainermn, comm, examples):
    iterator = shared(chainermn, comm, examples)
    return [
        (
            next(iterator),
            iterator.epoch,
            iterator.is_new_epoch,
            float(iterator.epoch_detail),
        )
        for _ in range(4)
    ]


@case
def multi_node_iterator_ends(chainermn, comm):
    return [*shared(chainermn, comm, EXAMPLES["arrays"], repeat=False)]


@case
def multi_node_iterator_of_the_other_rank(chainermn, comm):
    return next(shared(chainermn, comm, EXAMPLES["arrays"], root=1))


@each("batch_size", "dataset", "nothing")
def multi_node_iterator_attribute(chainermn, comm, name):
    iterator = shared(chainermn, comm, EXAMPLES["arrays"])
    next(iterator)
    if name == "dataset":
        return len(iterator.dataset)
    return getattr(iterator, name)


@each(
    ints=[1, 2, 3, 4],
    texts=["a", "b"],
    float64=[np.full(2, n, np.float64) for n in range(3)],
)
def multi_node_iterator_of(chainermn, comm, examples):
    return next(shared(chainermn, comm, examples))


@case
def multi_node_iterator_serialized(chainermn, comm):
    iterator = shared(chainermn, comm, EXAMPLES["arrays"])
    next(iterator)
    serializer = DictionarySerializer()
    iterator.serialize(serializer)
    return serializer.target


@case
def synchronized_iterator_in_order(chainermn, comm):
    iterator = chainermn.iterators.create_synchronized_iterator(
        actual_iterator=serial(list(range(5))), communicator=comm
    )
    return [next(iterator) for _ in range(3)], iterator.epoch, iterator.epoch_detail


@each("batch_size", "dataset", "is_new_epoch", "current_position", "nothing")
def synchronized_iterator_attribute(chainermn, comm, name):
    iterator = chainermn.iterators.create_synchronized_iterator(
        serial(list(range(5))), comm
    )
    next(iterator)
    return getattr(iterator, name)


@case
def synchronized_iterator_of_the_order_of_a_seed(chainermn, comm):
    np.random.seed(5 + comm.rank)
    iterator = chainermn.iterators.create_synchronized_iterator(
        serial(list(range(8)), 4, shuffle=True), comm
    )
    return next(iterator)


@case
def synchronized_iterator_serialized(chainermn, comm):
    iterator = chainermn.iterators.create_synchronized_iterator(
        serial(list(range(5))), comm
    )
    next(iterator)
    serializer = DictionarySerializer()
    iterator.serialize(serializer)
    return serializer.target


@case
def iterators_are_chainers(chainermn, comm):
    one = shared(chainermn, comm, EXAMPLES["arrays"])
    other = chainermn.iterators.create_synchronized_iterator(serial([1, 2]), comm)
    return isinstance(one, chainer.dataset.Iterator), isinstance(
        other, chainer.dataset.Iterator
    )


@case
def synchronized_iterator_without_an_iterator(chainermn, comm):

    def make():
        return type(chainermn.iterators.create_synchronized_iterator(None, comm))

    return outcome(make)
