"""What values of arrays may be beside what tests/gpu/test_verbs.py draws, and how they travel."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from chainermn_comm import (
    CommunicationError,
    CommunicatorBase,
    PeerError,
    create_communicator,
)
from tests.support.oracles.samples import same, sample
from tests.support.worlds.models import Model, Param

# Three ranks are a ring that has a middle. Communicators of all names share the
# methods.
pytestmark = [pytest.mark.world, pytest.mark.ranks(3)]


def all_same(found: tuple | None, expected: Sequence) -> None:
    assert isinstance(found, tuple)
    assert list(map(type, found)) == list(map(type, expected))
    for array, wanted in zip(found, expected, strict=True):
        same(np.asarray(array), np.asarray(wanted))


def test_shapes_and_dtypes_may_differ_between_ranks(naive):
    rows = [
        np.full((rank, 2), rank, ["float16", "int64"][rank % 2])
        for rank in range(naive.size)
    ]
    all_same(naive.allgather(rows[naive.rank]), rows)
    all_same(naive.gather(rows[naive.rank]) or (), [] if naive.rank else rows)


@pytest.mark.parametrize("method", ["gather", "allgather", "alltoall", "scatter"])
def test_what_a_rank_gives_to_itself_is_a_copy(naive, method):
    mine = sample(0, "float32").copy()
    given = [mine] * naive.size if method in ("alltoall", "scatter") else mine
    found = getattr(naive, method)(given)
    if method == "scatter":
        found = [found]
    mine[...] = -1
    for array in found or ():
        same(array, sample(0, "float32"))


def test_results_keep_the_order_and_are_the_callers_to_write(naive):
    rank, size = naive.rank, naive.size
    mine = sample(rank, "float32", "F")
    mine.flags.writeable = False
    found = list(naive.allgather(mine))
    if size > 1:
        naive.send(mine, (rank + 1) % size, 0)
        found.append(naive.recv((rank - 1) % size, 0))
    for array in found:
        assert array.flags.f_contiguous
        array[...] = -1
    same(mine, sample(rank, "float32"))


@pytest.mark.parametrize("container", [tuple, list])
def test_tuples_and_lists_arrive_as_tuples(naive, container):
    def mine(rank):
        row = [sample(rank, "float16"), sample(rank, "int32", "F")]
        return container([*row, np.float32(rank), np.zeros((0, 2))])

    rank, size = naive.rank, naive.size
    all_same(naive.bcast(mine(rank)), mine(0))
    last = naive.size - 1
    for root in (last, np.int64(last)):  # as Chainer 7's class had its arguments
        all_same(naive.bcast(mine(rank), root), mine(last))
    all_same(naive.bcast(mine(rank), 1 << 28), mine(0))
    # Only alone and by position is it the root that older communicators had there.
    all_same(naive.bcast(mine(rank), max_buf_len=last), mine(0))
    all_same(naive.bcast(data=mine(rank), max_buf_len=last), mine(0))
    for length in (last, 1 << 28):
        all_same(naive.bcast(mine(rank), length, 0), mine(0))
        all_same(naive.bcast(mine(rank), length, root=last), mine(last))
        assert (
            naive.bcast_obj(rank, length)
            == naive.bcast_obj(rank, max_buf_len=length)
            == 0
        )
    gathered, everywhere = naive.gather(mine(rank)) or (), naive.allgather(mine(rank))
    for every in (gathered, everywhere, naive.alltoall([mine(rank)] * size)):
        for other, found in enumerate(every):
            all_same(found, mine(other))
    all_same(naive.scatter([mine(other) for other in range(size)]), mine(rank))
    total = naive.allreduce(mine(rank))
    same(total[1], sum(sample(other, "int32") for other in range(size)).astype("int32"))
    if rank == 0 < size - 1:
        naive.send(mine(0), 1, 0)
    elif rank == 1:
        all_same(naive.recv(0, 0), mine(0))


def test_scalars_arrive_as_numpy_scalars(naive):
    for scalar in (3, 2.5, True, 1j, np.float16(0.5), np.int8(-3)):
        expected = np.asarray(scalar)[()]
        all_same(
            (naive.bcast(scalar), *naive.allgather(scalar)),
            [expected] * (1 + naive.size),
        )
        assert naive.allreduce(scalar) == sum([expected] * (naive.size - 1), expected)


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


def tuple_of_sizes(seed: int) -> tuple[np.ndarray, ...]:
    """Small arrays after large ones too, in both memory orders, in an order that the seed draws."""
    random = np.random.default_rng(seed)
    flat = [
        random.integers(0, 256, size).astype(np.uint8)
        for size in random.permutation(SIZES)
    ]
    return *flat, np.asfortranarray(random.standard_normal((3, 4))), np.float16(seed)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_small_arrays_travel_with_their_frame_and_large_ones_apart(naive, seed):
    mine = tuple_of_sizes(seed)
    if naive.rank == 0 < naive.size - 1:
        naive.send(mine, 1, 0)
        naive.send(mine[seed], 1, 0)
    elif naive.rank == 1:
        all_same(naive.recv(0, 0), mine)
        same(naive.recv(0, 0), mine[seed])
    for rank, found in enumerate(naive.allgather(tuple_of_sizes(naive.rank + seed))):
        all_same(found, tuple_of_sizes(rank + seed))
    all_same(naive.allgather(mine[naive.rank]), mine[: naive.size])


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    "method", ["bcast", "gather", "scatter", "allgather", "alltoall", "bcast_data"]
)
def test_a_dtype_that_pickle_refuses_on_one_rank_raises_on_all(naive, method):
    wrong, size = naive.rank == 1, naive.size
    metadata = {"f": lambda: 0} if wrong else {}
    dtype = np.dtype(
        "f4" if method == "bcast_data" else [("a", "f4")], metadata=metadata
    )
    mine: Any = np.zeros(3, dtype)
    if method in ("scatter", "alltoall"):
        mine = [mine] * size
    if method == "bcast_data":
        mine = Model(w=Param(mine))
    root = {"root": 1} if method in ("bcast", "gather", "scatter") else {}
    with pytest.raises((pickle.PicklingError, AttributeError) if wrong else PeerError):
        getattr(naive, method)(mine, **root)
    assert naive.allreduce_obj(1) == size


two_ranks = pytest.mark.sizes(2)
# What a third party's communicator inherits must say and do the same.
ours_and_a_third_partys = pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)


@two_ranks
@ours_and_a_third_partys
def test_metadata_of_any_length_travel_beside_arrays(naive, kind):
    arrays = np.arange(6, dtype="f2").reshape(2, 3), np.asfortranarray(np.ones((2, 2)))
    large = np.arange(10_000, dtype="f8")
    all_metadata = (b"", b"x", bytes(range(256)) * 100, bytes(range(256)) * 300)
    data = ((), arrays, (*arrays, large), (large[::2], arrays[0]))
    for metadata, some in itertools.product(all_metadata, data):
        if naive.rank == 0:
            kind(naive).send_with_metadata(naive, metadata, some, 1, 3)
        else:
            found, received = kind(naive).recv_with_metadata(naive, 0, 3)
            assert found == metadata
            all_same(received, some)
            assert all(array.flags.owndata for array in received)


@two_ranks
def test_long_metadata_are_not_kept(naive):
    metadata = bytes(100_000)
    before = sys.getrefcount(metadata)
    if naive.rank == 0:
        naive.send_with_metadata(metadata, (np.ones(2),), 1, 3)
    else:
        naive.recv_with_metadata(0, 3)
    assert sys.getrefcount(metadata) == before


@two_ranks
@ours_and_a_third_partys
def test_what_is_no_metadata_or_no_tuple_raises_at_once(naive, kind):
    arrays = (np.ones(2),)
    for metadata, data, text in [
        ("text", (), "the metadata of send_with_metadata must be bytes, got str"),
        (
            None,
            arrays,
            "the metadata of send_with_metadata must be bytes, got NoneType",
        ),
        (
            b"",
            np.ones((2, 2)),
            "send_with_metadata takes a tuple of arrays, got ndarray",
        ),
        (b"", np.float64(1), "send_with_metadata takes a tuple of arrays, got float64"),
    ]:
        with pytest.raises(
            (TypeError, ValueError), match=f"^rank {naive.rank}: {text}"
        ):
            kind(naive).send_with_metadata(naive, metadata, data, 1 - naive.rank, 3)


@two_ranks
def test_what_was_sent_in_another_way_is_refused_by_name(naive):
    sends = {
        "send": lambda: naive.send(np.ones(100_000), 1, 0),
        "send_with_metadata": lambda: naive.send_with_metadata(
            b"metadata", (np.ones(2),), 1, 0
        ),
        "send_obj": lambda: naive.send_obj("text", 1, 0),
    }
    for sent, send in sends.items():
        for received in (name for name in sends if name != sent):
            if naive.rank == 0:
                send()
            else:
                name = received.replace("send", "recv")
                advice = sent.replace("send", "recv")
                text = (
                    rf"rank 1: {name} got .* rank 0 sent with {sent} .* with {advice}$"
                )
                with pytest.raises(TypeError, match=text):
                    getattr(naive, name)(0, 0)
    if naive.rank == 0:
        sends["send"]()
    else:
        with pytest.raises(
            TypeError, match="rank 1: recv_with_metadata got a ndarray that rank 0"
        ):
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
        with pytest.raises(
            CommunicationError, match=r"recv was interrupted .*ml_dtypes"
        ):
            comm.recv(0, 3)


def test_many_arrays_need_a_long_header(naive):
    mine = [np.full((2, 3), i + naive.rank) for i in range(200)]
    for rank, found in enumerate(naive.allgather(mine)):
        all_same(found, [np.full((2, 3), i + rank) for i in range(200)])
    many = [np.full(i % 3, i) for i in range(3000)]
    if naive.rank == 0 < naive.size - 1:
        naive.send(many, 1, 0)
    elif naive.rank == 1:
        all_same(naive.recv(0, 0), many)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_allreduce_of_all_sizes(naive, dtype):
    for elements in (1, 4096, 4097, 300_000, 1_000_003):
        drawn = [
            np.random.default_rng(i).standard_normal(elements, "f4")
            for i in range(naive.size)
        ]
        rows = [row.astype(dtype) for row in drawn]
        expected = sum(rows[1:], rows[0].astype("f4"))
        same(naive.allreduce(rows[naive.rank]), expected.astype(dtype))


@pytest.mark.parametrize(("dtype", "order"), [("f4", "C"), ("f8", "F"), ("i4,f8", "C")])
def test_large_results_begin_on_a_huge_page_and_are_the_callers_own(
    naive, dtype, order
):
    """Their first touch is faster there; nothing else differs from small ones."""
    rows = [np.zeros((1030, 1050), dtype, order) for _ in range(naive.size)]
    for rank, row in enumerate(rows):
        row.view((np.uint8, row.dtype.itemsize))[:, rank, 0] = rank + 1
    mine = rows[naive.rank]
    gathered, copied = naive.allgather(mine), naive.bcast(mine, root=naive.size - 1)
    all_same((*gathered, copied), [*rows, rows[-1]])
    own = [each for each in (*gathered, copied) if each is not mine]
    assert all(each.ctypes.data % (2 << 20) == 0 for each in own)
    gathered[naive.rank][...] = 0
    assert all(
        each.flags.writeable and each.flags[f"{order}_CONTIGUOUS"] for each in own
    )
    assert (
        mine.view((np.uint8, mine.dtype.itemsize))[0, naive.rank, 0] == naive.rank + 1
    )


def test_what_fills_a_structured_dtype_up_travels_too(naive):
    """Memory of somebody else's doesn't, which would be in its place."""
    dtype = np.dtype("i1,f8", align=True)
    mine = (
        np.full(1 << 19, 7 + naive.rank, np.uint8).view(np.uint8).repeat(16).view(dtype)
    )
    for rank, array in enumerate(naive.allgather(mine)):
        assert set(np.unique(array.view(np.uint8))) == {7 + rank}
