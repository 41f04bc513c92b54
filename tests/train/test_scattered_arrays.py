"""Arrays that `scatter_dataset` divides lie once in the node's memory, however they got there."""

from __future__ import annotations

import gc
import io
import itertools
import multiprocessing
import os
import pickle
import tempfile
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TupleDataset,
)
from numpy.random import RandomState

from chainermn_comm import create_communicator
from chainermn_train import scatter_dataset, scatter_index, share_dataset
from tests.support.oracles.raised import raises_on_all
from tests.support.oracles.samples import alike
from tests.support.training.trainers import processes

pytestmark = pytest.mark.world


def rows(count, dtype=np.float32):
    return np.arange(3 * count).reshape(count, 3).astype(dtype)


def make_structured(n):
    return np.array([(i, b"x" * (i % 4)) for i in range(n)], "i4,S3")


def make_unaligned(n):
    return np.zeros(n, "i1,f8")["f1"] + 0.5


def make_text(n):
    return np.array([f"{i}" for i in range(n)], "U5")


def make_objects(n):
    return np.array([{i} for i in range(n)], object)


def make_all_the_same(n):
    return np.broadcast_to(np.float32(7), (n, 3))


def make_an_empty_column(n):
    return TupleDataset(np.zeros((n, 0)), rows(n))


def make_names(n):
    return DictDataset(x=rows(n, "f2"), t=np.arange(n), n=list(range(n)))


KINDS = {
    "structured": make_structured,
    "unaligned": make_unaligned,
    "text": make_text,
    "objects": make_objects,
    "column order": lambda n: np.asfortranarray(rows(n)),
    "all the same": make_all_the_same,
    "an empty column": make_an_empty_column,
    "names": make_names,
}


def right(comm, part, whole, order=None):
    """Whether this rank has exactly its examples of the whole."""
    mine = SubDataset(whole, *scatter_index(len(whole), comm), order)
    return alike(list(part), list(mine))


def arrives(comm, whole, shuffle=False, root=0):
    """Whether each rank gets its examples of the whole."""
    order = None
    if shuffle:
        order = RandomState(5).permutation(len(whole))
    part = scatter_dataset(whole, comm, root, shuffle, 5)
    return right(comm, part, whole, order)


def lies_in(array):
    """Device and number of the file that the array is mapped from; number "0" if none."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as file:
        for line in file:
            place, _, _, device, inode, *_ = line.split()
            begin, end = (int(each, 16) for each in place.split("-"))
            if begin <= address < end:
                return device, inode
    return None


class Reporting(DatasetMixin):
    """Says beside each example which process made it, and which file it lies in there.

    What a worker process writes to the example afterwards is in nobody else's.
    """

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return len(self.part)

    def get_example(self, i):
        example = self.part[i]
        found = example.copy(), os.getpid(), lies_in(example)
        if multiprocessing.parent_process() is not None:
            example[...] = -1
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_arrives_as_it_is(naive, kind):
    for count, shuffle in itertools.product((0, 1, 11), (False, True)):
        assert arrives(naive, KINDS[kind](count), shuffle)


def test_they_arrive_from_any_root_on_any_communicator(comm):
    whole = TupleDataset(rows(23), rows(23, np.float64))
    for root in range(comm.size):
        assert arrives(comm, whole, True, root)
    long_rows = np.arange(1 << 20).reshape(8, -1)  # each takes a message of its own
    assert arrives(comm, long_rows, True)


def test_a_part_can_be_scattered_again(naive):
    """Among the ranks of a group, say."""
    part = scatter_dataset(rows(40), naive)
    assert arrives(naive, naive.bcast_obj(part))


def pss():
    """Bytes of this process's memory, of which a shared page counts in part."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return int(file.read().partition("Pss:")[2].split()[0]) * 1024


def test_a_node_holds_one_copy(naive):
    nbytes = 30_000_000
    whole = None
    if naive.rank == 0:
        whole = np.ones((nbytes // 5000, 1250), np.float32)
    scatter_dataset(rows(3), naive)  # what the first call allocates for good
    before = naive.allgather_obj(pss())
    part = scatter_dataset(whole, naive, shuffle=True)
    part[0][:] = 1  # takes this page only
    # Every page of it.
    found = sum(example.sum() for example in part)
    assert found == 1250 * len(part)
    naive.allgather_obj(None)
    after = naive.allgather_obj(pss())
    assert sum(after) - sum(before) <= 1.5 * nbytes


def test_columns_that_are_one_array_are_stored_once(naive):
    """As of an autoencoder, whose input is the target."""
    whole = rows(1000)
    x, t = scatter_dataset(TupleDataset(whole, whole), naive, shuffle=True)[3]
    assert np.shares_memory(x, t)


def new_files(before=()):
    """What this process has open, but for files of these numbers."""
    gc.collect()
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {number: path for number, path in found.items() if number not in before}


def test_arrays_lie_in_one_nameless_file_for_as_long_as_the_data_set(world, naive):
    """However many they are, and with every copy of the data set."""
    whole = ConcatenatedDataset(*[rows(each % 7) for each in range(600)])
    naive.allgather_obj(None)  # connects ranks
    before = new_files()

    communicator = create_communicator("naive", world)
    part = scatter_dataset(whole, communicator)
    communicator.finalize()
    part[0][:] = 1  # its next pickle is of a new file
    payload = pickle.dumps(part)
    part = pickle.loads(payload)
    files = new_files(before)
    kept = {number: files[number] for number in files if "/dev/shm" in files[number]}
    assert 1 <= len(kept) <= 2  # a descriptor, and the mapping's
    for path in kept.values():
        assert path.endswith("(deleted)")
    # Each array of at most 72 bytes takes one or two cache lines.
    for number in kept:
        assert os.fstat(int(number)).st_size <= 600 * 128
    example = part[0]  # which keeps what it needs
    del part
    with pytest.raises(OSError, match="a reference to that memory"):
        pickle.loads(payload)
    assert example.tolist() == [1, 1, 1]
    del example
    assert len(new_files()) <= len(before)


def test_without_room_in_memory_a_temporary_folder_serves(naive, monkeypatch, folder):
    space = os.statvfs
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)

    def fake_space(p):
        if "/dev" in p:
            return full
        return space(p)

    monkeypatch.setattr(os, "statvfs", fake_space)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    part = deepcopy(scatter_dataset(rows(10_000), naive))
    assert right(naive, part, rows(10_000))
    assert any(path.startswith(str(folder)) for path in new_files().values())
    assert os.listdir(folder) == []


def fail(*_, **__):
    raise OSError("the disk is broken")


class Broken(io.FileIO):
    write = fail


# What fails and how, on which rank, and words: to reserve memory, to write to it, to read
# the root's rows.
FAILURES = [
    ("os.posix_fallocate", fail, 1, "no place for .*, or set TMPDIR to"),
    ("builtins.open", Broken, 1, "is broken"),
    ("numpy.take", fail, 0, "is broken"),
]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(("function", "planted", "culprit", "text"), FAILURES)
def test_rows_without_a_place_or_that_fail_are_an_error_on_all(
    comm, monkeypatch, function, planted, culprit, text
):
    # Each rank's part takes several messages.
    whole = TupleDataset(rows(200_000), rows(200_000, np.float64))
    wrong = comm.rank == culprit
    with monkeypatch.context() as patch:
        if wrong:
            patch.setattr(function, planted)
        with raises_on_all(wrong, OSError, text):
            scatter_dataset(whole, comm, shuffle=True)
    assert arrives(comm, whole)


class Counted:
    """A data set that only it can divide; it counts how often it is pickled, and made."""

    pickled = made = 0

    def __init__(self):
        type(self).made += 1

    def __len__(self):
        return 17

    def __getitem__(self, i):
        return 3 * i

    def __reduce__(self):
        type(self).pickled += 1
        return Counted, ()


def test_an_unsplittable_data_set_is_pickled_once_for_each_rank(comm):
    whole = Counted()
    Counted.pickled = Counted.made = 0
    assert arrives(comm, TupleDataset(whole, whole))
    count = 0
    if comm.rank == 0:
        count = comm.size - 1
    assert Counted.pickled == count
    assert Counted.made == (comm.rank > 0)


def test_pickles_and_copies_refer_to_the_memory_and_have_what_was_written(naive):
    """The file as it was stays with those who have it."""
    part = scatter_dataset(TupleDataset(rows(100_000), rows(100_000)), naive)
    before = pickle.loads(pickle.dumps(part))
    kept = part[-1][0].tolist()
    file = lies_in(part[-1][0])
    assert lies_in(before[-1][0]) == file
    assert lies_in(deepcopy(part)[-1][0]) == file
    part[-1][0][:] = 7
    payload = pickle.dumps(part)
    assert len(payload) < 2000
    x, y = pickle.loads(payload)[-1]
    assert x.tolist() == [7, 7, 7]
    assert y.tolist() == kept
    # A data set has one file: what was not written to goes there, too.
    assert lies_in(part[-1][0]) == lies_in(part[-1][1]) == lies_in(x) != file
    assert before[-1][0].tolist() == kept
    assert pickle.dumps(part) == payload  # it lies in a file as it is now


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("forkserver")
def test_workers_read_the_same_memory(naive):
    part = scatter_dataset(rows(60), naive)
    part[-1][:] = 3  # which the workers see
    with processes(Reporting(part), repeat=False, shuffle=False) as iterator:
        # Chainer's iterator makes the first batch itself, to see how large it is.
        _, *batches = iterator
    found, makers, files = zip(*itertools.chain(*batches), strict=True)
    assert all(map(alike, found, part[3:]))  # which no worker has changed here
    assert os.getpid() not in makers
    assert set(files) == {lies_in(part[0])}


@pytest.mark.parametrize("root", [0, -1])
def test_a_shared_data_set_lies_once_on_a_machine(comm, root):
    root %= comm.size
    whole = TupleDataset(rows(17), list(range(17)), Counted())
    given = None
    if comm.rank == root:
        given = whole
    shared = share_dataset(given, comm, root)
    assert all(map(alike, shared, whole))
    places = comm.allgather_obj((comm.inter_rank, lies_in(shared[0][0])))
    assert len(set(places)) == comm.inter_size
    shared[3][0][:] = comm.rank  # stays here
    comm.allgather_obj(None)
    assert shared[3][0].tolist() == [comm.rank] * 3
    assert len(share_dataset(rows(0), comm, root)) == 0
