"""Arrays that `scatter_dataset` divides lie once in the node's memory, however they got there."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import resource
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)
from chainer.iterators import MultiprocessIterator

from chainermn_comm import PeerError, create_communicator
from chainermn_train import scatter_dataset, scatter_index, share_dataset
from tests.support.oracles.alike import alike
from tests.support.oracles.mapped import Reporting, lies_in

pytestmark = pytest.mark.world


def rows(count, dtype=np.float32):
    return np.arange(3 * count).reshape(count, 3).astype(dtype)


KINDS = {
    "structured": lambda n: np.array([(i, b"x" * (i % 4)) for i in range(n)], "i4,S3"),
    "unaligned": lambda n: np.zeros(n, "i1,f8")["f1"] + 0.5,
    "text": lambda n: np.array([f"{i}" for i in range(n)], "U5"),
    "objects": lambda n: np.array([{i} for i in range(n)], object),
    "column order": lambda n: np.asfortranarray(rows(n)),
    "backwards": lambda n: rows(n)[::-1, ::-1],
    "all the same": lambda n: np.broadcast_to(np.float32(7), (n, 3)),
    "first column empty": lambda n: TupleDataset(np.zeros((n, 0)), rows(n)),
    "last column empty": lambda n: TupleDataset(np.ones((n, 8)), np.zeros((n, 0))),
    "names": lambda n: DictDataset(x=rows(n, "f2"), t=np.arange(n), n=list(range(n))),
    "nested": lambda n: SubDataset(
        TransformDataset(ConcatenatedDataset(rows(3), rows(n)), abs), 2, n + 2
    ),
}


def right(comm, part, whole, order=None):
    """Whether this rank has exactly its examples of the whole."""
    begin, end = scatter_index(len(whole), comm)
    mine = SubDataset(whole, begin, end, order)
    return len(part) == len(mine) and all(map(alike, part, mine))


def arrives(comm, whole, shuffle=False, root=0):
    """Whether each rank gets its examples of the whole."""
    order = np.random.RandomState(5).permutation(len(whole)) if shuffle else None
    part = scatter_dataset(whole, comm, root, shuffle, 5)
    return right(comm, part, whole, order)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_arrives_as_it_is(naive, kind):
    for count, shuffle in itertools.product((0, 1, 11), (False, True)):
        assert arrives(naive, KINDS[kind](count), shuffle)


def test_they_arrive_from_any_root_on_any_communicator(comm):
    whole = TupleDataset(rows(23), rows(23, np.float64))
    assert all(arrives(comm, whole, True, root) for root in range(comm.size))
    long_rows = np.arange(1 << 20).reshape(8, -1)  # each takes a message of its own
    assert arrives(comm, long_rows, True)


def test_a_part_can_be_scattered_again(naive):
    """Among the ranks of a group, say."""
    part = scatter_dataset(rows(40), naive)
    assert arrives(naive, naive.bcast_obj(part))


def pss():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(
            int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")
        )


def test_a_node_holds_one_copy(naive):
    nbytes = 30_000_000
    whole = np.ones((nbytes // 5000, 1250), np.float32) if naive.rank == 0 else None
    # What the first call allocates for good.
    scatter_dataset(rows(3), naive)
    naive.allgather_obj(None)
    before = pss()
    naive.allgather_obj(None)
    part = scatter_dataset(whole, naive, shuffle=True)
    part[0][:] = 1  # takes this page only
    # Every page of it.
    assert sum(example.sum() for example in part) == 1250 * len(part)
    naive.allgather_obj(None)
    after = pss()
    assert sum(naive.allgather_obj(after - before)) <= 1.5 * nbytes


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
        with contextlib.suppress(OSError):  # the listing's own
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {number: path for number, path in found.items() if number not in before}


def test_memory_is_kept_for_as_long_as_the_data_set_and_no_longer(world, naive):
    """And it has no name in any folder."""
    whole = rows(20_000)
    before = new_files()

    communicator = create_communicator("naive", world)
    part = scatter_dataset(whole, communicator)
    communicator.finalize()
    payload = pickle.dumps(part)
    part = pickle.loads(payload)
    kept = [path for path in new_files(before).values() if "/dev/shm" in path]
    assert kept
    assert all(path.endswith("(deleted)") for path in kept)
    example = part[5]  # which keeps what it needs
    del part
    with pytest.raises(OSError, match="a reference to that memory"):
        pickle.loads(payload)
    fifth = len(whole) * naive.rank // naive.size + 5
    np.testing.assert_array_equal(example, whole[fifth])
    del example
    assert len(new_files()) <= len(before)


def test_a_data_set_of_many_arrays_takes_one_file(naive):
    """However it came here, and also where it was written to since."""
    whole = ConcatenatedDataset(*[rows(each % 7) for each in range(600)])
    naive.allgather_obj(None)  # connects ranks
    before = new_files()
    part = scatter_dataset(whole, naive)
    twin = pickle.loads(pickle.dumps(part))
    shared = share_dataset(whole, naive)
    # Of each a descriptor, and the mapping's.
    assert len(new_files(before)) <= 6
    assert all(map(alike, shared, whole))
    del twin, shared
    part[0][:] = 1
    assert pickle.dumps(part)
    assert len(new_files(before)) <= 4


def test_without_room_in_memory_a_temporary_folder_serves(naive, monkeypatch, folder):
    space = os.statvfs
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda p: full if "/dev" in p else space(p))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    part = copy.deepcopy(scatter_dataset(rows(10_000), naive))
    assert right(naive, part, rows(10_000))
    assert any(path.startswith(str(folder)) for path in new_files().values())
    assert os.listdir(folder) == []


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("fails", ["reserving", "writing", "reading"])
def test_rows_without_a_place_or_that_fail_are_an_error_on_all(
    comm, monkeypatch, fails
):
    # Each rank's part takes several messages.
    whole = TupleDataset(rows(200_000), rows(200_000, np.float64))
    culprit = 0 if fails == "reading" else 1

    def fail(*_, **__):
        raise OSError("the disk is broken")

    class Broken(io.FileIO):
        write = fail

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        if comm.rank == culprit and fails == "reading":
            patch.setattr(np, "take", fail)
        elif comm.rank == culprit and fails == "writing":
            patch.setattr("builtins.open", Broken)
        elif comm.rank == culprit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            error = OSError if comm.rank == culprit else PeerError
            with pytest.raises(error, match=r"no place for .*TMPDIR|is broken"):
                scatter_dataset(whole, comm, shuffle=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
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
    assert Counted.pickled == (comm.size - 1 if comm.rank == 0 else 0)
    assert Counted.made == (comm.rank > 0)


def test_pickles_and_copies_refer_to_the_memory_and_have_what_was_written(naive):
    """The file as it was stays with those who have it."""
    part = scatter_dataset(TupleDataset(rows(100_000), rows(100_000)), naive)
    before = pickle.loads(pickle.dumps(part))
    assert (
        lies_in(before[7][0])
        == lies_in(part[7][0])
        == lies_in(copy.deepcopy(part)[7][0])
    )
    x, y = part[-1]
    kept = y.copy()
    file = lies_in(x)
    x += 1
    payload = pickle.dumps(part)
    assert len(payload) < 2000
    twin = pickle.loads(payload)
    for found, expected in zip(
        (*twin[-1], before[-1][0]), (kept + 1, kept, kept), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    # A data set has one file: what was not written to goes there, too.
    assert lies_in(part[-1][0]) == lies_in(part[-1][1]) != file
    assert lies_in(y) == file
    assert pickle.dumps(part) == payload  # it lies in a file as it is now


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("forkserver")
@pytest.mark.filterwarnings("ignore:.* about to fork")
@pytest.mark.parametrize(
    "method",
    [
        "forkserver",
        *(pytest.param(m, marks=pytest.mark.full) for m in ("fork", "spawn")),
    ],
)
def test_workers_read_the_same_memory(naive, monkeypatch, method):
    # Workers that import mpi4py don't start MPI.
    monkeypatch.setenv("MPI4PY_RC_INITIALIZE", "0")
    multiprocessing.set_start_method(method, force=True)
    part = scatter_dataset(rows(60), naive)
    part[-1][:] = 3  # which the workers see
    iterator = MultiprocessIterator(
        Reporting(part), 5, repeat=False, shuffle=False, n_processes=1
    )
    # Chainer's iterator makes the first batch itself, to see how large it is.
    _, *batches = iterator
    iterator.finalize()
    found, processes, files = zip(*itertools.chain(*batches), strict=True)
    assert all(map(alike, found, part[5:]))  # which no worker has changed here
    assert os.getpid() not in processes
    if method != "fork":
        assert set(files) == {lies_in(part[0])}


@pytest.mark.parametrize("last", [False, True])
def test_a_shared_data_set_lies_once_on_a_machine(comm, last):
    def make():
        return TupleDataset(rows(17), list(range(17)), Counted())

    root = comm.size - 1 if last else 0
    shared = share_dataset(make() if comm.rank == root else None, comm, root)
    assert all(map(alike, shared, make()))
    places = comm.allgather_obj((comm.inter_rank, lies_in(shared[0][0])))
    assert len(set(places)) == comm.inter_size
    shared[3][0][:] = comm.rank  # stays here
    comm.allgather_obj(None)
    assert shared[3][0].tolist() == [comm.rank] * 3
    assert len(share_dataset(rows(0), comm, root)) == 0
