"""Arrays that `scatter_dataset` divides lie once in the node's memory, however they got there."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
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
from chainer.dataset import DatasetMixin
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
from tests.support.oracles.pickles import Awkward

pytestmark = pytest.mark.world


def rows(count, dtype=np.float32):
    return np.arange(3 * count).reshape(count, 3).astype(dtype)


KINDS = {
    "float16": lambda n: rows(n, np.float16),
    "bool": lambda n: rows(n) % 2 == 0,
    "complex": lambda n: rows(n) * 1j,
    "big-endian": lambda n: rows(n, ">f8"),
    "structured": lambda n: np.array([(i, b"x" * (i % 4)) for i in range(n)], "i4,S3"),
    "unaligned": lambda n: np.zeros(n, "i1,f8")["f1"] + 0.5,
    "dates": lambda n: np.arange(n).astype("datetime64[D]"),
    "text": lambda n: np.array([f"{i}" for i in range(n)], "U5"),
    "objects": lambda n: np.array([{i} for i in range(n)], object),
    "column order": lambda n: np.asfortranarray(rows(n)),
    "every other": lambda n: rows(2 * n)[::2],
    "backwards": lambda n: rows(n)[::-1, ::-1],
    "all the same": lambda n: np.broadcast_to(np.float32(7), (n, 3)),
    "nothing in a row": lambda n: np.zeros((n, 0), np.float32),
    "no width": lambda n: np.zeros(n, "S0"),
    "long rows": lambda n: np.arange(n * 140_000, dtype=np.int64).reshape(n, 140_000),
    "many dimensions": lambda n: np.arange(n * 24, dtype=np.int8).reshape(n, 2, 3, 4),
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
    order = (
        np.random.RandomState(seed).permutation(len(whole))
        if shuffle
        else range(len(whole))
    )
    begin = len(whole) * comm.rank // comm.size
    mine = [whole[int(i)] for i in order[begin : begin + -(-len(whole) // comm.size)]]
    return len(part) == len(mine) and all(map(alike, part, mine))


def arrives(comm, whole, shuffle=False, seed=0, root=0, source=None, **options):
    """Whether each rank gets its examples of the whole, which `source` has too."""
    given = at(comm, root, whole if source is None else source)
    part = scatter_dataset(given, comm, root, shuffle, seed, **options)
    return right(comm, part, whole, shuffle, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_arrives_as_it_is(naive, kind):
    for count, shuffle in itertools.product((0, 1, 11), (False, True)):
        assert arrives(naive, KINDS[kind](count), shuffle)


def test_they_arrive_from_any_root_on_any_communicator(comm):
    whole = TupleDataset(rows(23), rows(23, np.float64))
    assert all(arrives(comm, whole, True, 9, root) for root in range(comm.size))


@pytest.mark.parametrize("limit", [7, 1000])
def test_pieces_are_no_longer_than_max_buf_len(world, plain_communicator, limit):
    class Limited(plain_communicator):  # type: ignore[valid-type,misc]
        def send(self, data, dest, tag):
            # 16: the message that says how many follow.
            assert data.nbytes <= max(limit, 16)
            super().send(data, dest, tag)

        def bcast(self, data, max_buf_len=None, root=0):
            assert not isinstance(data, np.ndarray) or data.nbytes <= limit
            return super().bcast(data, max_buf_len, root)

        def split(self, color, key):
            return Limited(self.mpi.Split(color, key))

    comm = Limited(world)
    whole = TupleDataset(rows(99), Unsplittable(99))
    assert all(
        arrives(comm, whole, each, 5, max_buf_len=limit) for each in (False, True)
    )


def test_long_and_memory_mapped_arrays_come_in_several_blocks(naive, tmp_path):
    # 8 MiB, and blocks of 1 MiB.
    whole = np.arange(1 << 20, dtype=np.int64).reshape(-1, 2048)
    mapped = np.memmap(tmp_path / "data", np.int64, "w+", shape=whole.shape)
    mapped[:] = whole
    for source, shuffle in itertools.product((whole, mapped), (False, True)):
        assert arrives(naive, whole, shuffle, seed=3, source=source)


def test_a_part_can_be_scattered_again(naive):
    """Among the ranks of a group, say."""
    part = scatter_dataset(at(naive, 0, rows(40)), naive)
    last = naive.size - 1
    again = scatter_dataset(part, naive, last)
    assert right(naive, again, naive.bcast_obj(np.stack([*part]), root=last))


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


def open_files():
    """What this process has open, by number."""
    gc.collect()
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def test_memory_is_kept_for_as_long_as_the_data_set_and_no_longer(world, naive):
    """And it has no name in any folder."""
    whole = rows(20_000)
    before = open_files()

    def use():
        communicator = create_communicator("naive", world)
        part = scatter_dataset(at(naive, 0, whole), communicator)
        communicator.finalize()
        pickle.dumps(part)  # puts the root's own into a file too
        new = [path for number, path in open_files().items() if number not in before]
        kept = [
            path for path in new if path.startswith(("/dev/shm", tempfile.gettempdir()))
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
    assert len(open_files()) <= len(before)


def new_files(before):
    return [path for number, path in open_files().items() if number not in before]


MANY = 600
COLLECTIONS = {
    "concatenated": lambda: ConcatenatedDataset(
        *[rows(each % 7) for each in range(MANY)]
    ),
    "columns": lambda: TupleDataset(*[rows(7) + each for each in range(MANY)]),
    "names": lambda: DictDataset(**{f"x{each}": rows(7) for each in range(MANY)}),
}


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_a_data_set_of_many_arrays_takes_one_file(naive, kind):
    """However it came here, and also where it was written to since."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    whole = COLLECTIONS[kind]()
    naive.allgather_obj(None)  # connects ranks
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        part = scatter_dataset(at(naive, 0, whole), naive, shuffle=True, seed=5)
        payload = pickle.dumps(part)  # puts the root's own into a file too
        twin = pickle.loads(payload)
        shared = share_dataset(at(naive, 0, whole), naive)
        assert all(map(alike, twin, part))
        assert right(naive, part, whole, shuffle=True, seed=5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Of each a descriptor, and the mapping's.
    assert len(new_files(before)) <= 6
    assert len(shared) == len(whole)
    del twin, shared
    for example in part:
        values = example.values() if kind == "names" else example
        for array in values:
            array += 1
    del example, values, array
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
    pickle.dumps(part)  # puts the root's own into a file too
    assert any(path.startswith(str(folder)) for path in open_files().values())
    assert os.listdir(folder) == []


@pytest.mark.sizes(2, 3, 4)
def test_without_room_anywhere_all_ranks_are_told(comm):
    whole = at(comm, 0, np.zeros((comm.size, 1_000_000)))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    error, text = PeerError, r"rank 1: .*TMPDIR"
    if comm.rank == 1:
        error, text = OSError, r"no place for 8000000 bytes.*TMPDIR"
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, old[1]))
    try:
        with pytest.raises(error, match=text):
            scatter_dataset(whole, comm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert arrives(comm, rows(5))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("fails", ["writing the first row", "writing later", "reading"])
def test_rows_that_cannot_be_written_or_read_are_an_error_on_all(
    comm, monkeypatch, fails
):
    culprit = 0 if fails == "reading" else 1
    written = []
    pwrite = os.pwrite
    # Each rank's part takes several messages.
    whole = TupleDataset(rows(200_000), rows(200_000, np.float64))

    def fail(*_, **__):
        raise OSError(errno.EIO, "the disk is broken")

    def fail_later(descriptor, data, offset):
        if offset:  # not the mark that files begin with
            written.append(offset)
        if len(written) > (fails == "writing later"):
            fail()
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        if comm.rank == culprit:
            name = "numpy.take" if fails == "reading" else "os.pwrite"
            patch.setattr(name, fail if fails == "reading" else fail_later)
        with pytest.raises(
            OSError if comm.rank == culprit else PeerError, match="disk is broken"
        ):
            scatter_dataset(at(comm, 0, whole), comm, shuffle=True)
    assert arrives(comm, whole)


@pytest.mark.sizes(2, 3, 4)
def test_objects_that_fail_beside_arrays_are_an_error_on_all(comm):
    last = comm.size - 1
    whole = TupleDataset(rows(comm.size), [*range(last), Awkward()])
    with pytest.raises(
        ValueError if comm.rank == last else PeerError, match="does not arrive"
    ):
        scatter_dataset(at(comm, 0, whole), comm)
    whole = TupleDataset(rows(comm.size), [*range(last), lambda: None])
    expected = (AttributeError, pickle.PicklingError) if comm.rank == 0 else PeerError
    with pytest.raises(expected, match="lambda"):
        scatter_dataset(at(comm, 0, whole), comm)
    assert arrives(comm, rows(9))


class Unsplittable(DatasetMixin):
    """Only it knows how to divide itself; it counts how often it is pickled, and made."""

    pickled = made = 0

    def __init__(self, count):
        type(self).made += 1
        self.count = count

    def __len__(self):
        return self.count

    def get_example(self, i):
        return 3 * i

    def __reduce__(self):
        type(self).pickled += 1
        return Unsplittable, (self.count,)


def test_an_unsplittable_data_set_is_pickled_once_for_each_rank(comm):
    whole = Unsplittable(17)
    pair = TupleDataset(whole, whole)
    Unsplittable.pickled = Unsplittable.made = 0
    assert arrives(comm, pair)
    assert Unsplittable.pickled == (comm.size - 1 if comm.rank == 0 else 0)
    assert Unsplittable.made == (comm.rank > 0)


def test_alone_nothing_need_be_picklable(world):
    alone = create_communicator("naive", world.Split(world.rank))
    whole = TransformDataset(rows(5), lambda x: 2 * x)
    part = scatter_dataset(whole, alone)
    np.testing.assert_array_equal(part[4], 2 * rows(5)[4])


def test_a_pickle_and_copies_refer_to_the_same_memory(naive):
    whole = TupleDataset(rows(100_000), np.arange(100_000))
    part = scatter_dataset(at(naive, 0, whole), naive)
    payload = pickle.dumps(part)
    assert len(payload) < 2000
    for twin in pickle.loads(payload), copy.copy(part), copy.deepcopy(part):
        assert len(twin) == len(part)
        assert lies_in(twin[7][0]) == lies_in(part[7][0])
        assert lies_in(part[7][0])[1] != "0"
    pickled_example = pickle.loads(pickle.dumps(part[7]))
    assert alike(pickled_example, part[7])
    assert not np.shares_memory(pickled_example[0], part[7][0])


def test_what_was_written_is_in_a_pickle_of_it(naive):
    """The file as it was stays with those who have it."""
    whole = TupleDataset(rows(20_000), rows(20_000), np.zeros(20_000, np.float16))
    part = scatter_dataset(at(naive, 0, whole), naive)
    before = pickle.loads(pickle.dumps(part))
    x, y, _ = part[-1]
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
    mine, bits = naive.bcast_obj((part, naive.rank))
    assert bits == 0
    mine[-1][0][:] = naive.rank
    naive.allgather_obj(None)
    assert (mine[-1][0] == naive.rank).all()


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
    whole = rows(60)
    part = scatter_dataset(at(naive, 0, whole), naive)
    part[-1][:] = 3  # which the workers see
    pickle.dumps(part)  # puts the root's own into a file too
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
    assert {file for _, _, file in examples} == {lies_in(part[0])}
    assert lies_in(part[0])[1] != "0"


@pytest.mark.sizes(2, 3, 4)
def test_another_ranks_pickle_is_read_while_it_has_the_data_set(naive):
    part = scatter_dataset(at(naive, 0, rows(1000)), naive)
    first = naive.bcast_obj(part)
    assert np.array_equal(first[1], rows(1000)[1])
    payload = naive.bcast_obj(pickle.dumps(part) if naive.rank == 0 else None)
    naive.allgather_obj(None)
    del part, first
    gc.collect()
    naive.allgather_obj(None)
    with pytest.raises(OSError, match=re.escape("as a reference to that memory")):
        pickle.loads(payload)
