"""Arrays that `scatter_dataset` deals lie once in the node's memory, however they got there."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import pickle
import re
import resource
import tempfile
import time

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)

from chainermn_comm import PeerError, create_communicator
from chainermn_train import parcels, scatter_dataset, shared_arrays

pytestmark = pytest.mark.world


def numbers(count, dtype=np.float32):
    return np.arange(3 * count).reshape(count, 3).astype(dtype)


KINDS = {
    "float16": lambda n: numbers(n, np.float16),
    "bool": lambda n: numbers(n) % 2 == 0,
    "complex": lambda n: numbers(n) * 1j,
    "big-endian": lambda n: numbers(n, ">f8"),
    "structured": lambda n: np.array([(i, b"x" * (i % 4)) for i in range(n)], "i4,S3"),
    "unaligned": lambda n: np.zeros(n, "i1,f8")["f1"] + 0.5,
    "dates": lambda n: np.arange(n).astype("datetime64[D]"),
    "text": lambda n: np.array([f"{i}" for i in range(n)], "U5"),
    "objects": lambda n: np.array([{i} for i in range(n)], object),
    "column order": lambda n: np.asfortranarray(numbers(n)),
    "every other": lambda n: numbers(2 * n)[::2],
    "backwards": lambda n: numbers(n)[::-1, ::-1],
    "all the same": lambda n: np.broadcast_to(np.float32(7), (n, 3)),
    "nothing in a row": lambda n: np.zeros((n, 0), np.float32),
    "no width": lambda n: np.zeros(n, "S0"),
    "long rows": lambda n: np.arange(n * 300_000, dtype=np.int64).reshape(n, 300_000),
    "many dimensions": lambda n: np.arange(n * 24, dtype=np.int8).reshape(n, 2, 3, 4),
    "columns": lambda n: TupleDataset(np.arange(n, dtype=np.int8), numbers(n), list(range(n))),
    "first column empty": lambda n: TupleDataset(np.zeros((n, 0)), np.arange(n)),
    "last column empty": lambda n: TupleDataset(np.ones((n, 8)), np.zeros((n, 0))),
    "names": lambda n: DictDataset(x=numbers(n), t=np.arange(n)),
    "nested": lambda n: SubDataset(
        TransformDataset(ConcatenatedDataset(numbers(3), numbers(n)), abs), 2, n + 2
    ),
}


@pytest.fixture(params=["near", "far", "both"])
def way(request, monkeypatch, world):
    """Which ranks can open the root's files: all, none, or every other one."""
    if request.param == "near":
        return "near"
    openable = Address.open

    def open_some(address):
        if address.process != os.getpid() and (request.param == "far" or world.rank % 2):
            raise FileNotFoundError(errno.ENOENT, "as if on another machine")
        return openable(address)

    monkeypatch.setattr(shared_arrays.Address, "open", open_some)
    return request.param


Address = shared_arrays.Address


def at(comm, rank, dataset):
    return dataset if comm.rank == rank else None


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return getattr(a, "dtype", None) == getattr(b, "dtype", None) and np.array_equal(a, b)


def right(comm, part, whole, shuffle=False, seed=0):
    """Whether this rank has exactly its examples of the whole."""
    order = np.random.RandomState(seed).permutation(len(whole)) if shuffle else range(len(whole))
    begin = len(whole) * comm.rank // comm.size
    end = begin + -(-len(whole) // comm.size)
    return len(part) == end - begin and all(
        same(part[i], whole[int(index)]) for i, index in enumerate(order[begin:end])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_arrives_as_it_is(naive, way, kind):
    for count in 0, 1, 11:
        whole = KINDS[kind](count)
        for shuffle in False, True:
            part = scatter_dataset(at(naive, 0, whole), naive, shuffle=shuffle, seed=0)
            assert right(naive, part, whole, shuffle)


def test_they_arrive_from_any_root_on_any_communicator(comm, way):
    whole = TupleDataset(numbers(23), numbers(23, np.float64))
    for root in range(comm.size):
        part = scatter_dataset(at(comm, root, whole), comm, root, shuffle=True, seed=9)
        assert right(comm, part, whole, shuffle=True, seed=9)


@pytest.mark.parametrize("limit", [7, 1000])
def test_pieces_are_no_longer_than_max_buf_len(world, plain_communicator, way, limit):
    class Limited(plain_communicator):  # type: ignore[valid-type,misc]
        def send(self, data, dest, tag):
            assert data.nbytes <= max(limit, 16)  # 16: the message that says how many follow
            super().send(data, dest, tag)

        def bcast(self, data, max_buf_len=None, root=0):
            assert not isinstance(data, np.ndarray) or data.nbytes <= limit
            return super().bcast(data, max_buf_len, root)

    comm = Limited(world)
    whole = TupleDataset(numbers(99), Opaque(99))
    for shuffle in False, True:
        part = scatter_dataset(at(comm, 0, whole), comm, 0, shuffle, 5, limit)
        assert right(comm, part, whole, shuffle, seed=5)


def test_long_arrays_come_in_several_blocks(naive, way):
    whole = np.arange(6 << 20, dtype=np.int64).reshape(-1, 16)  # 48 MiB
    for shuffle in False, True:
        part = scatter_dataset(at(naive, 0, whole), naive, shuffle=shuffle, seed=3)
        order = np.arange(len(whole))
        if shuffle:
            order = np.random.RandomState(3).permutation(len(whole))
        begin = len(whole) * naive.rank // naive.size
        np.testing.assert_array_equal(part._dataset.array, whole[order[begin : begin + len(part)]])


def test_a_memory_mapped_file_is_scattered(naive, way, tmp_path):
    whole = None
    if naive.rank == 0:
        whole = np.memmap(tmp_path / "data", np.float32, "w+", shape=(50, 3))
        whole[:] = numbers(50)
    assert right(naive, scatter_dataset(whole, naive), numbers(50))


def test_a_part_can_be_scattered_again(naive, way):
    """Among the ranks of a group, say."""
    whole = numbers(40)
    part = scatter_dataset(at(naive, 0, whole), naive)
    mine = np.stack([part[i] for i in range(len(part))])
    last = naive.size - 1
    again = scatter_dataset(part, naive, last)
    assert right(naive, again, naive.bcast_obj(mine, root=last))


# Memory.


def pss():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_node_holds_one_copy(naive, way, shuffle):
    whole = at(naive, 0, np.ones((20_000, 1250), np.float32))  # 100 MB
    scatter_dataset(at(naive, 0, numbers(3)), naive)  # what the first call allocates for good
    naive.allgather_obj(None)
    before = pss()
    naive.allgather_obj(None)
    part = scatter_dataset(whole, naive, shuffle=shuffle)
    assert sum(part[i][::1000].sum() for i in range(len(part))) == 2 * len(part)
    assert sum(example.sum() for example in part[:10]) == 12_500
    part._dataset.array.max()  # every page of it
    naive.allgather_obj(None)
    after = pss()
    assert sum(naive.allgather_obj(after - before)) <= 1.1 * 100e6


def test_columns_that_are_one_array_are_stored_once(naive):
    """As of an autoencoder, whose input is the target."""
    whole = numbers(1000)
    part = scatter_dataset(at(naive, 0, TupleDataset(whole, whole)), naive, shuffle=True)
    x, t = part[3]
    assert np.shares_memory(x, t)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_kept_for_as_long_as_the_data_set_and_no_longer(world, naive):
    whole = numbers(100_000)
    before = descriptors()
    communicator = create_communicator("naive", world)
    part = scatter_dataset(at(naive, 0, whole), communicator)
    communicator.finalize()
    pickle.dumps(part)  # puts the root's own into a file too
    assert descriptors() > before
    assert right(naive, part, whole)
    example = part[5]
    expected = example.copy()
    del part
    gc.collect()
    np.testing.assert_array_equal(example, expected)  # it keeps what it needs
    del example
    assert descriptors() <= before


def test_nothing_has_a_name_in_any_folder(naive):
    before = naming_folders()
    part = scatter_dataset(at(naive, 0, numbers(100_000)), naive)
    assert not new_names(before)
    del part


def naming_folders():
    return {f: set(os.listdir(f)) for f in (shared_arrays.MEMORY_FOLDER, tempfile.gettempdir())}


def new_names(before):
    """Files that are new for good, and ours; others work on this machine too."""
    time.sleep(0.1)
    return [
        path
        for folder, names in naming_folders().items()
        for path in (os.path.join(folder, name) for name in names - before[folder])
        if os.path.isfile(path) and os.path.basename(path).startswith("tmp")
    ]


# Space.


def test_without_room_in_memory_a_temporary_folder_serves(naive, monkeypatch, tmp_path, way):
    monkeypatch.setattr(shared_arrays, "LEFT_FREE_BYTES", 1 << 60)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = numbers(100_000)
    part = scatter_dataset(at(naive, 0, whole), naive)
    assert right(naive, part, whole)
    pickle.dumps(part)  # puts the root's own into a file too
    assert os.fstat(part._dataset._file.descriptor).st_dev == os.stat(tmp_path).st_dev
    assert os.listdir(tmp_path) == []


@contextlib.contextmanager
def no_file_longer_than(nbytes):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.sizes(2, 3, 4)
def test_without_room_anywhere_all_ranks_are_told(comm, way):
    maker = 0 if way == "near" else 1
    whole = at(comm, 0, np.zeros((comm.size, 1_000_000)))
    error, text = (
        (OSError, "no place for 8000064 bytes")
        if comm.rank == maker
        else (PeerError, f"rank {maker}: ")
    )
    with (
        no_file_longer_than(1_000_000) if comm.rank == maker else contextlib.nullcontext(),
        pytest.raises(error, match=text) as raised,
    ):
        scatter_dataset(whole, comm)
    assert "TMPDIR" in str(raised.value)
    assert right(comm, scatter_dataset(at(comm, 0, numbers(5)), comm), numbers(5))


# Failures in the middle.


@pytest.mark.sizes(2, 3, 4)
def test_rows_that_cannot_be_read_are_an_error_on_all(comm, way, monkeypatch):
    def blocks(source, indices):
        yield source[:1].reshape(-1).view(np.uint8)
        raise OSError(errno.EIO, "the disk is broken")

    whole = TupleDataset(numbers(100), numbers(100))
    with monkeypatch.context() as patch:
        patch.setattr(parcels, "blocks", blocks)
        with pytest.raises(OSError if comm.rank == 0 else PeerError, match="disk is broken"):
            scatter_dataset(at(comm, 0, whole), comm)
    assert right(comm, scatter_dataset(at(comm, 0, whole), comm), whole)


@pytest.mark.sizes(2, 3, 4)
def test_a_file_that_cannot_be_written_is_an_error_on_all(comm, way, monkeypatch):
    writer = 0 if way == "near" else 1

    def write(file, data, offset):
        raise OSError(errno.EIO, "the disk is broken")

    whole = numbers(100)
    with monkeypatch.context() as patch:
        if comm.rank == writer:
            patch.setattr(shared_arrays.SharedFile, "write", write)
        with pytest.raises(OSError if comm.rank == writer else PeerError, match="disk is broken"):
            scatter_dataset(at(comm, 0, whole), comm)
    assert right(comm, scatter_dataset(at(comm, 0, whole), comm), whole)


class Awkward:
    """Cannot be unpickled."""

    def __reduce__(self):
        return fail_to_load, ()


def fail_to_load():
    raise ValueError("does not arrive")


@pytest.mark.sizes(2, 3, 4)
def test_objects_that_fail_beside_arrays_are_an_error_on_all(comm, way):
    last = comm.size - 1
    whole = TupleDataset(numbers(comm.size), [*range(last), Awkward()])
    with pytest.raises(ValueError if comm.rank == last else PeerError, match="does not arrive"):
        scatter_dataset(at(comm, 0, whole), comm)
    whole = TupleDataset(numbers(comm.size), [*range(last), lambda: None])
    expected = (AttributeError, pickle.PicklingError) if comm.rank == 0 else PeerError
    with pytest.raises(expected, match="lambda"):
        scatter_dataset(at(comm, 0, whole), comm)
    assert right(comm, scatter_dataset(at(comm, 0, numbers(9)), comm), numbers(9))


# Other data.


class Opaque(DatasetMixin):
    """Only it knows how to divide itself; it counts how often it is pickled."""

    pickled = 0

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def get_example(self, i):
        return 3 * i

    def __reduce__(self):
        type(self).pickled += 1
        return Opaque, (self.count,)


def test_an_opaque_data_set_is_pickled_once_for_all(comm):
    Opaque.pickled = 0
    whole = Opaque(17)
    pair = TupleDataset(whole, whole)
    part = scatter_dataset(at(comm, 0, pair), comm)
    assert right(comm, part, pair)
    assert Opaque.pickled == (comm.rank == 0 < comm.size - 1)
    first, second = part._dataset._datasets
    assert first._dataset is second._dataset


def test_alone_nothing_need_be_picklable(world):
    alone = create_communicator("naive", world.Split(world.rank))
    whole = TransformDataset(numbers(5), lambda x: 2 * x)
    part = scatter_dataset(whole, alone)
    np.testing.assert_array_equal(part[4], 2 * numbers(5)[4])


def test_a_pickle_and_copies_refer_to_the_same_memory(naive):
    whole = TupleDataset(numbers(100_000), np.arange(100_000))
    part = scatter_dataset(at(naive, 0, whole), naive)
    payload = pickle.dumps(part)
    assert len(payload) < 2000
    for twin in pickle.loads(payload), copy.copy(part), copy.deepcopy(part):
        assert len(twin) == len(part)
        assert np.shares_memory(twin[7][0], part[7][0])
    pickled_example = pickle.loads(pickle.dumps(part[7]))
    assert same(pickled_example, part[7])
    assert not np.shares_memory(pickled_example[0], part[7][0])


@pytest.mark.sizes(2, 3, 4)
def test_another_ranks_pickle_is_read_while_it_has_the_data_set(naive):
    part = scatter_dataset(at(naive, 0, numbers(1000)), naive)
    first = naive.bcast_obj(part)
    assert np.array_equal(first[1], numbers(1000)[1])
    payload = naive.bcast_obj(pickle.dumps(part) if naive.rank == 0 else None)
    naive.allgather_obj(None)
    del part, first
    gc.collect()
    naive.allgather_obj(None)
    with pytest.raises(OSError, match=re.escape("as a reference to that memory")):
        pickle.loads(payload)
