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
import re
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
from chainermn_train import scatter_dataset, share_dataset
from tests.support.oracles.alike import alike
from tests.support.oracles.mapped import Reporting, lies_in

pytestmark = pytest.mark.world


def rows(count, dtype=np.float32):
    return np.arange(3 * count).reshape(count, 3).astype(dtype)


KINDS = {
    "float16": lambda n: rows(n, np.float16),
    "structured": lambda n: np.array([(i, b"x" * (i % 4)) for i in range(n)], "i4,S3"),
    "unaligned": lambda n: np.zeros(n, "i1,f8")["f1"] + 0.5,
    "text": lambda n: np.array([f"{i}" for i in range(n)], "U5"),
    "objects": lambda n: np.array([{i} for i in range(n)], object),
    "column order": lambda n: np.asfortranarray(rows(n)),
    "backwards": lambda n: rows(n)[::-1, ::-1],
    "all the same": lambda n: np.broadcast_to(np.float32(7), (n, 3)),
    "no width": lambda n: np.zeros(n, "S0"),
    "long rows": lambda n: np.arange(n * 140_000, dtype=np.int64).reshape(n, 140_000),
    "columns": lambda n: TupleDataset(
        np.arange(n, dtype=np.int8), rows(n), list(range(n))
    ),
    "first column empty": lambda n: TupleDataset(np.zeros((n, 0)), np.arange(n)),
    "last column empty": lambda n: TupleDataset(np.ones((n, 8)), np.zeros((n, 0))),
    "names": lambda n: DictDataset(x=rows(n), t=np.arange(n)),
    "nested": lambda n: SubDataset(
        TransformDataset(ConcatenatedDataset(rows(3), rows(n)), abs), 2, n + 2
    ),
}


def at(comm, rank, dataset):
    return dataset if comm.rank == rank else None


def right(comm, part, whole, shuffle=False, seed=0):
    """Whether this rank has exactly its examples of the whole."""
    order = range(len(whole))
    if shuffle:
        order = np.random.RandomState(seed).permutation(len(whole))
    begin = len(whole) * comm.rank // comm.size
    mine = [whole[int(i)] for i in order[begin : begin + -(-len(whole) // comm.size)]]
    return len(part) == len(mine) and all(map(alike, part, mine))


def arrives(comm, whole, shuffle=False, seed=0, root=0, **options):
    """Whether each rank gets its examples of the whole."""
    part = scatter_dataset(at(comm, root, whole), comm, root, shuffle, seed, **options)
    return right(comm, part, whole, shuffle, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_arrives_as_it_is(naive, kind):
    for count, shuffle in itertools.product((0, 1, 11), (False, True)):
        assert arrives(naive, KINDS[kind](count), shuffle)


def test_they_arrive_from_any_root_on_any_communicator(comm):
    whole = TupleDataset(rows(23), rows(23, np.float64))
    assert all(arrives(comm, whole, True, 9, root) for root in range(comm.size))
    mapped = np.arange(1 << 20).reshape(-1, 2048)  # 8 MiB, in blocks of 1 MiB
    assert arrives(comm, mapped, True)


@pytest.mark.parametrize("limit", [7, 1000])
def test_pieces_are_no_longer_than_max_buf_len(world, plain_communicator, limit):
    class Limited(plain_communicator):  # type: ignore[valid-type,misc]
        def send(self, data, dest, tag):
            assert data.nbytes <= limit
            super().send(data, dest, tag)

        def split(self, color, key):
            return Limited(self.mpi.Split(color, key))

    comm = Limited(world)
    whole = TupleDataset(rows(99), list(range(99)))
    assert arrives(comm, whole, True, 5, max_buf_len=limit)


def test_a_part_can_be_scattered_again(naive):
    """Among the ranks of a group, say."""
    part = scatter_dataset(at(naive, 0, rows(40)), naive)
    assert arrives(naive, naive.bcast_obj(part))


def pss():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(
            int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")
        )


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_node_holds_one_copy(naive, shuffle):
    nbytes = 30_000_000
    whole = at(naive, 0, np.ones((nbytes // 5000, 1250), np.float32))
    # What the first call allocates for good.
    scatter_dataset(at(naive, 0, rows(3)), naive)
    naive.allgather_obj(None)
    before = pss()
    naive.allgather_obj(None)
    part = scatter_dataset(whole, naive, shuffle=shuffle)
    part[0][:] = 1  # takes this page only
    # Every page of it.
    assert sum(example.sum() for example in part) == 1250 * len(part)
    naive.allgather_obj(None)
    after = pss()
    assert sum(naive.allgather_obj(after - before)) <= 1.5 * nbytes


def test_columns_that_are_one_array_are_stored_once(naive):
    """As of an autoencoder, whose input is the target."""
    whole = rows(1000)
    part = scatter_dataset(
        at(naive, 0, TupleDataset(whole, whole)), naive, shuffle=True
    )
    x, t = part[3]
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

    def use():
        communicator = create_communicator("naive", world)
        part = scatter_dataset(at(naive, 0, whole), communicator)
        communicator.finalize()
        kept = [
            path
            for path in new_files(before).values()
            if path.startswith(("/dev/shm", tempfile.gettempdir()))
        ]
        assert kept
        assert all(path.endswith("(deleted)") for path in kept)
        assert right(naive, part, whole)
        return part[5]

    example = use()  # which keeps what it needs
    gc.collect()
    fifth = len(whole) * naive.rank // naive.size + 5
    np.testing.assert_array_equal(example, whole[fifth])
    del example
    assert len(new_files()) <= len(before)


def test_a_data_set_of_many_arrays_takes_one_file(naive):
    """However it came here, and also where it was written to since."""
    whole = ConcatenatedDataset(*[rows(each % 7) for each in range(600)])
    naive.allgather_obj(None)  # connects ranks
    before = new_files()
    part = scatter_dataset(at(naive, 0, whole), naive, shuffle=True, seed=5)
    twin = pickle.loads(pickle.dumps(part))
    shared = share_dataset(at(naive, 0, whole), naive)
    assert all(map(alike, twin, part))
    assert right(naive, part, whole, shuffle=True, seed=5)
    # Of each a descriptor, and the mapping's.
    assert len(new_files(before)) <= 6
    assert len(shared) == len(whole)
    del twin, shared
    for example in part:
        example += 1
    del example
    written = pickle.loads(pickle.dumps(part))
    assert all(map(alike, written, part))
    assert len(new_files(before)) <= 4


def test_without_room_in_memory_a_temporary_folder_serves(naive, monkeypatch, folder):
    space = os.statvfs
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(
        os, "statvfs", lambda path: full if path == "/dev/shm" else space(path)
    )
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    whole = rows(10_000)
    part = scatter_dataset(at(naive, 0, whole), naive)
    assert right(naive, part, whole)
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
    text = r"no place for \d+ bytes.*TMPDIR" if fails == "reserving" else "is broken"

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
            with pytest.raises(error, match=text):
                scatter_dataset(at(comm, 0, whole), comm, shuffle=True)
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


def test_alone_nothing_need_be_picklable(world):
    alone = create_communicator("naive", world.Split(world.rank))
    whole = TransformDataset(rows(5), lambda x: 2 * x)
    part = scatter_dataset(whole, alone)
    np.testing.assert_array_equal(part[4], 2 * rows(5)[4])


def test_pickles_and_copies_refer_to_the_memory_and_have_what_was_written(naive):
    """The file as it was stays with those who have it."""
    whole = TupleDataset(rows(100_000), rows(100_000))
    part = scatter_dataset(at(naive, 0, whole), naive)
    payload = pickle.dumps(part)
    assert len(payload) < 2000
    before = pickle.loads(payload)
    for twin in before, copy.deepcopy(part):
        assert lies_in(twin[7][0]) == lies_in(part[7][0])
        assert lies_in(part[7][0])[1] != "0"
    x, y = part[-1]
    kept = y.copy()
    file = lies_in(x)
    x += 1
    payload = pickle.dumps(part)
    assert len(payload) < 2000
    twin = pickle.loads(payload)
    np.testing.assert_array_equal(twin[-1][0], kept + 1)
    np.testing.assert_array_equal(twin[-1][1], kept)
    np.testing.assert_array_equal(before[-1][0], kept)
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
    part = scatter_dataset(at(naive, 0, rows(60)), naive)
    place = lies_in(part[0])
    part[-1][:] = 3  # which the workers see
    before = [example.copy() for example in part]
    iterator = MultiprocessIterator(
        Reporting(part), 5, repeat=False, shuffle=False, n_processes=1
    )
    examples = [example for batch in iterator for example in batch]
    iterator.finalize()
    assert all(map(alike, [example for example, _, _ in examples], before))
    assert all(map(alike, part[5:], before[5:]))
    # Chainer's iterator makes the first batch itself, to see how large it is.
    assert os.getpid() not in {process for _, process, _ in examples[5:]}
    assert {file for _, _, file in examples[5:]} == {lies_in(part[0])}
    assert place[1] != "0"


@pytest.mark.sizes(2, 3, 4)
def test_another_ranks_pickle_is_read_while_it_has_the_data_set(naive):
    part = scatter_dataset(at(naive, 0, rows(1000)), naive)
    first = naive.bcast_obj(part)
    assert np.array_equal(first[1], rows(1000)[1])
    payload = naive.bcast_obj(pickle.dumps(part))
    naive.allgather_obj(None)
    del part, first
    gc.collect()
    naive.allgather_obj(None)
    with pytest.raises(OSError, match=re.escape("as a reference to that memory")):
        pickle.loads(payload)


@pytest.mark.parametrize("last", [False, True])
def test_a_shared_data_set_lies_once_on_a_machine(comm, last):
    def make():
        return TupleDataset(rows(17), list(range(17)), Counted())

    root = comm.size - 1 if last else 0
    shared = share_dataset(at(comm, root, make()), comm, root)
    assert len(shared) == 17
    assert all(map(alike, shared, make()))
    places = comm.allgather_obj((comm.inter_rank, lies_in(shared[0][0])))
    assert len(set(places)) == len({node for node, _ in places})
    shared[3][0][:] = comm.rank  # stays here
    comm.allgather_obj(None)
    assert shared[3][0].tolist() == [comm.rank] * 3
    assert len(share_dataset(at(comm, root, rows(0)), comm, root)) == 0


def test_mistakes_in_sharing_are_told_on_all_ranks(naive):
    with pytest.raises((TypeError, PeerError), match="must have a len"):
        share_dataset(3, naive)
    with pytest.raises((ValueError, PeerError), match="root must be from 0 to"):
        share_dataset([1], naive, naive.size)
