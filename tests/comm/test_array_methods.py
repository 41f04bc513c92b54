"""What values of arrays may be beside what tests/gpu/test_verbs.py draws, and how they travel."""

from __future__ import annotations

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from numpy.random import default_rng

from chainermn_comm import (
    CommunicationError,
    CommunicatorBase,
    create_communicator,
)
from tests.support.oracles.samples import same, sample

# Three ranks are a ring that has a middle. Communicators of all names share the
# methods.
pytestmark = [pytest.mark.world, pytest.mark.ranks(3)]
two_ranks = pytest.mark.sizes(2)


def all_same(found, expected):
    assert isinstance(found, tuple)
    assert list(map(type, found)) == list(map(type, expected))
    for array, wanted in zip(found, expected, strict=True):
        same(np.asarray(array), np.asarray(wanted))


@pytest.mark.parametrize("container", [tuple, list])
def test_tuples_and_lists_with_scalars_arrive_as_tuples(naive, container):
    def row(rank):
        scalars = [3, 2.5, True, 1j, np.float16(rank), np.int8(-3)]
        return container([sample(rank, "int32", "F"), np.zeros((0, 2)), *scalars])

    def expected(rank):
        return [np.asarray(each)[()] for each in row(rank)]

    rank = naive.rank
    size = naive.size
    all_same(naive.bcast(row(rank)), expected(0))
    for other, found in enumerate(naive.allgather(row(rank))):
        all_same(found, expected(other))
    rows = [row(other) for other in range(size)]
    all_same(naive.scatter(rows), expected(rank))
    total = naive.allreduce((2.5, True, np.int8(-3)))
    expected_total = [np.float64(2.5 * size), np.True_, np.int8(-3 * size)]
    all_same(total, expected_total)
    if rank == 0 < size - 1:
        naive.send(row(0), 1, 0)
    elif rank == 1:
        all_same(naive.recv(0, 0), expected(0))


def test_a_large_broadcast_arrives_whole(naive):
    """From 8 MiB on, each of three ranks or more sends a part to the others."""
    for root in range(naive.size):
        array = np.arange(2_300_001, dtype="f4") + naive.rank
        found = naive.bcast(array, root=root)
        same(found, np.arange(2_300_001, dtype="f4") + root)


def test_a_broadcasts_root_may_stand_where_older_communicators_had_it(naive):
    """Alone and by position; with a root, the second argument is the length of a buffer."""
    last = naive.size - 1
    for positional, named, root in [
        ((last,), {}, last),
        ((np.int64(last),), {}, last),
        ((1 << 28,), {}, 0),
        ((last, 0), {}, 0),
        ((last,), {"root": last}, last),
        ((), {"max_buf_len": last}, 0),
    ]:
        found = naive.bcast(np.array(naive.rank), *positional, **named)
        assert found == root
    assert naive.bcast_obj(naive.rank, last) == 0
    assert naive.bcast_obj(naive.rank, max_buf_len=last) == 0


def test_any_dtype_with_a_buffer_travels(naive):
    for array in (
        np.array(["2026-11-20", "NaT"], "datetime64[D]"),
        np.array(["ab", "ç"]),
        np.array([(1, 2.5)], [("n", "i4"), ("x", "f8")]),
        np.arange(5, dtype=">i4"),
        np.array([b"\0\1"], "V2"),
        np.arange(4, dtype=np.longdouble),
    ):
        all_same(naive.allgather(array), [array] * naive.size)
    total = naive.allreduce(np.arange(5, dtype=">f4"))  # a sum keeps the byte order
    same(total, (np.arange(5) * naive.size).astype(">f4"))


# Around what is inline with header and metadata, which other arrays and the header
# share.
SIZES = (0, 1, 16_000, 16_383, 16_384, 16_385, 40_000, 65_000, 65_536, 65_537)


def tuple_of_sizes(seed):
    """Small arrays after large ones, in both memory orders; the order follows from the seed.

    So arrays of ranks differ in shape.
    """
    random = default_rng(seed)
    flat = [
        random.integers(0, 256, size).astype(np.uint8)
        for size in random.permutation(SIZES)
    ]
    fortran = np.asfortranarray(random.standard_normal((3, 4)))
    return *flat, fortran, np.float16(seed)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_small_arrays_travel_with_their_frame_and_large_ones_apart(naive, seed):
    mine = tuple_of_sizes(seed)
    many = tuple(np.full(i % 3, i) for i in range(3000))  # a long header
    if naive.rank == 0 < naive.size - 1:
        for value in (mine, mine[seed], many):
            naive.send(value, 1, 0)
    elif naive.rank == 1:
        all_same(naive.recv(0, 0), mine)
        same(naive.recv(0, 0), mine[seed])
        all_same(naive.recv(0, 0), many)
    for verb in (naive.allgather, naive.gather):
        for rank, found in enumerate(verb(tuple_of_sizes(naive.rank + seed)) or ()):
            all_same(found, tuple_of_sizes(rank + seed))
    all_same(naive.allgather(mine[naive.rank]), mine[: naive.size])


@two_ranks
def test_what_was_sent_in_another_way_is_refused_by_name(naive):
    given = {
        "": (np.ones(100_000),),
        "_with_metadata": (b"metadata", (np.ones(2),)),
        "_obj": ("text",),
    }
    for sent, wanted in itertools.permutations(given, 2):
        if naive.rank == 0:
            getattr(naive, f"send{sent}")(*given[sent], 1, 0)
        else:
            text = rf"rank 1: recv{wanted} got .* sent with send{sent} .* recv{sent}$"
            with pytest.raises(TypeError, match=text):
                getattr(naive, f"recv{wanted}")(0, 0)
    if naive.rank == 0:
        naive.send(np.ones(2), 1, 0)
    else:
        text = "rank 1: recv_with_metadata got a ndarray that rank 0"
        with pytest.raises(TypeError, match=text):
            CommunicatorBase.recv_with_metadata(naive, 0, 0)


@two_ranks
def test_after_a_message_that_could_not_be_received_every_call_says_so(
    world, monkeypatch
):
    comm = create_communicator("naive", world)  # which the ranks can't finalize
    if comm.rank == 0:
        comm.send(np.ones(3, ml_dtypes.bfloat16), 1, 3)
    elif comm.rank == 1:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "ml_dtypes", None)  # its import fails
            with pytest.raises(ImportError, match="ml_dtypes"):
                comm.recv(0, 3)
        told = r"recv was interrupted .*ml_dtypes"
        with pytest.raises(CommunicationError, match=told):
            comm.recv(0, 3)


@two_ranks
@pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)
def test_metadata_of_any_length_travel_beside_arrays(naive, kind):
    arrays = np.arange(6, dtype="f2").reshape(2, 3), np.asfortranarray(np.ones((2, 2)))
    large = np.arange(10_000, dtype="f8")
    lengths = (0, 1, 25_600, 76_800)
    data = ((), arrays, (*arrays, large), (large[::2], arrays[0]))
    for length, some in itertools.product(lengths, data):
        metadata = bytes(range(256)) * (length // 256) + b"x" * (length % 256)
        if naive.rank == 0:
            kind(naive).send_with_metadata(naive, metadata, some, 1, 3)
        else:
            found, received = kind(naive).recv_with_metadata(naive, 0, 3)
            assert found == metadata
            all_same(received, some)
            for array in received:
                assert array.flags.owndata
