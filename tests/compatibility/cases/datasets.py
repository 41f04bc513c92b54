"""Data sets divided among ranks."""

from __future__ import annotations

import chainer
import numpy as np
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)
from mpi4py import MPI

from .table import case, each, of_rank_0

KINDS = {
    "list": list(range(7)),
    "tuple": tuple(range(7)),
    "range": range(7),
    "array": np.arange(14, dtype=np.float32).reshape(7, 2),
    "TupleDataset": TupleDataset(
        np.arange(14, dtype=np.float32).reshape(7, 2), np.arange(7, dtype=np.int32)
    ),
    "DictDataset": DictDataset(
        x=np.arange(14, dtype=np.float32).reshape(7, 2), t=np.arange(7, dtype=np.int32)
    ),
    "SubDataset": SubDataset(list(range(20)), 3, 10),
    "ConcatenatedDataset": ConcatenatedDataset([1, 2, 3], [4, 5]),
    "list of tuples": [(np.full(2, n, np.float32), np.int32(n)) for n in range(7)],
    "texts": list("abcdefg"),
    "one": [5],
    "two": [5, 6],
    "none": [],
}


class Squares(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 7

    def get_example(self, i):
        return i * i


def examples(part):
    return {
        "type": type(part).__name__,
        "length": len(part),
        "all": [part[n] for n in range(len(part))],
    }


@each(**KINDS)
def scatter_dataset(chainermn, comm, dataset):
    return examples(chainermn.scatter_dataset(of_rank_0(comm, dataset), comm))


@case
def scatter_a_dataset_of_a_class(chainermn, comm):
    return examples(chainermn.scatter_dataset(of_rank_0(comm, Squares()), comm))


@case
def scatter_a_dict(chainermn, comm):
    return type(chainermn.scatter_dataset(of_rank_0(comm, {"a": 1, "b": 2}), comm))


@case
def scatter_a_transformed_dataset(chainermn, comm):
    whole = TransformDataset(list(range(5)), str)
    return examples(chainermn.scatter_dataset(of_rank_0(comm, whole), comm))


@each(0, 1, 2**31, None)
def shuffled(chainermn, comm, seed):
    whole = of_rank_0(comm, list(range(9)))
    np.random.seed(5)
    part = chainermn.scatter_dataset(whole, comm, shuffle=True, seed=seed)
    if seed is not None:
        return examples(part)
    return len(part), sorted(
        {*MPI.COMM_WORLD.bcast([*part]), *MPI.COMM_WORLD.bcast([*part], 1)}
    )


@case
def shuffle_leaves_the_state_of_random(chainermn, comm):
    np.random.seed(5)
    chainermn.scatter_dataset(
        of_rank_0(comm, list(range(9))), comm, shuffle=True, seed=3
    )
    return float(np.random.rand())


@each(True, False)
def equal_length(chainermn, comm, force):
    whole = of_rank_0(comm, list(range(7)))
    return examples(chainermn.scatter_dataset(whole, comm, force_equal_length=force))


@case
def scatter_of_the_other_rank(chainermn, comm):
    return examples(chainermn.scatter_dataset([comm.rank] * 4, comm, root=1))


@case
def scatter_over_an_mpi_communicator(chainermn, comm):
    whole = of_rank_0(comm, list(range(5)))
    return examples(chainermn.scatter_dataset(whole, comm.mpi_comm))


@each(0, 2**31)
def scatter_with_max_buf_len(chainermn, comm, length):
    whole = of_rank_0(comm, list(range(5)))
    return examples(chainermn.scatter_dataset(whole, comm, max_buf_len=length))


@each("array", "TupleDataset", "list of tuples")
def examples_can_be_written_to(chainermn, comm, kind):
    part = chainermn.scatter_dataset(of_rank_0(comm, KINDS[kind]), comm)
    if isinstance(part[0], np.ndarray):
        first = part[0]
    else:
        first = part[0][0]
    first[...] = 100
    return first


def make_array():
    return np.zeros((4, 2), np.float32)


@each(
    array=make_array,
    arrays=lambda: [*np.zeros((4, 2), np.float32)],
)
def the_roots_examples_after_a_change(chainermn, comm, make):
    """Of the part, which is of the root's own array or list."""
    whole = of_rank_0(comm, make())
    part = chainermn.scatter_dataset(whole, comm)
    part[0][...] = 1
    return whole


@each("array", "TupleDataset", "list")
def slices(chainermn, comm, kind):
    part = chainermn.scatter_dataset(of_rank_0(comm, KINDS[kind]), comm)
    return part[1:3]


@each(0, 1, 2, 7, 100)
def scatter_index(chainermn, comm, count):
    return chainermn.scatter_index(count, comm)


@each("list", "array", "TupleDataset", "DictDataset")
def create_empty_dataset(chainermn, comm, kind):
    return examples(chainermn.datasets.create_empty_dataset(KINDS[kind]))


# -- the module's other names


@each(0, 1, 7, 8)
def iterations_of_an_epoch(chainermn, comm, count):
    from chainermn.datasets.scatter import get_n_iterations_for_one_epoch

    return get_n_iterations_for_one_epoch(list(range(count)), 2, comm)


@each(1, 3)
def epoch_trigger(chainermn, comm, epochs):
    from chainermn.datasets.scatter import get_epoch_trigger

    return get_epoch_trigger(epochs, list(range(7 + comm.rank)), 2, comm)


@case
def data_size_error(chainermn, comm):
    kind = chainermn.DataSizeError
    return [
        base.__name__ for base in kind.__mro__
    ], kind is chainermn.datasets.DataSizeError
