"""Every array verb carries every dtype, layout and shape."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from chainermn_comm import CommunicatorBase, PeerError
from tests.support.samples import DTYPES, LAYOUTS, same, sample

# Three ranks are a ring that has a middle. Communicators of all names share the verbs.
pytestmark = [pytest.mark.world, pytest.mark.ranks(3)]


def every_sample(ranks: range, dtype: str, layout: str) -> list[np.ndarray]:
    return [sample(rank, dtype, layout) for rank in ranks]


def all_same(found: tuple[np.ndarray, ...] | None, expected: list[np.ndarray]) -> None:
    assert isinstance(found, tuple)
    assert len(found) == len(expected)
    for array, wanted in zip(found, expected, strict=True):
        same(array, wanted)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(dtype, "C") for dtype in DTYPES] + [("float32", layout) for layout in LAYOUTS[1:]],
)
def test_every_verb_carries_any_array_from_and_to_any_rank(naive, dtype, layout):
    me, size = naive.rank, naive.size
    rows = every_sample(range(size), dtype, layout)
    before = rows[me].copy()
    if size > 1:
        to, source = (me + 1) % size, (me - 1) % size
        if me % 2 == 0:
            naive.send(rows[me], to, 3)
        received = naive.recv(source, 3)
        if me % 2 == 1:
            naive.send(rows[me], to, 3)
        same(received, rows[source])
        received[...] = 0  # it is writable memory of our own
    for root in range(size):
        same(naive.bcast(rows[root] if me == root else "ignored", root=root), rows[root])
        same(naive.scatter(rows if me == root else None, root=root), rows[me])
        found = naive.gather(rows[me], root=root)
        assert (found is None) == (me != root)
        if me == root:
            all_same(found, rows)
    all_same(naive.allgather(rows[me]), rows)
    mine = every_sample(range(10 * me, 10 * me + size), dtype, layout)
    theirs = every_sample(range(me, me + 10 * size, 10), dtype, layout)
    all_same(naive.alltoall(tuple(mine)), theirs)
    total = rows[0].copy()
    for row in rows[1:]:
        total = total + row
    same(naive.allreduce(rows[me]), np.asarray(total))  # in rank order
    same(rows[me], before)


def test_layouts_survive_the_journey(naive):
    found = naive.allgather(np.asfortranarray(sample(naive.rank, "float64")))
    assert all(array.flags.f_contiguous for array in found)


def test_shapes_and_dtypes_may_differ_between_ranks(naive):
    rows = [np.full((rank, 2), rank, ["float16", "int64"][rank % 2]) for rank in range(naive.size)]
    all_same(naive.allgather(rows[naive.rank]), rows)
    found = naive.gather(rows[naive.rank])
    assert (found is None) == (naive.rank > 0)
    if found is not None:
        all_same(found, rows)


@pytest.mark.parametrize("verb", ["gather", "allgather", "alltoall", "scatter"])
def test_what_a_rank_gives_to_itself_is_a_copy(naive, verb):
    mine = sample(0, "float32").copy()
    given = [mine] * naive.size if verb in ("alltoall", "scatter") else mine
    found = getattr(naive, verb)(given)
    if verb == "scatter":
        found = [found]
    mine[...] = -1
    for array in found or ():
        same(array, sample(0, "float32"))


@pytest.mark.parametrize("container", [tuple, list])
def test_tuples_and_lists_arrive_as_tuples(naive, container):
    def mine(rank):
        row = [sample(rank, "float16"), sample(rank, "int32", "F")]
        return container([*row, np.float32(rank), np.zeros((0, 2))])

    def check(found, rank):
        assert isinstance(found, tuple)
        for actual, expected in zip(found, mine(rank), strict=True):
            assert type(actual) is type(expected)
            same(np.asarray(actual), np.asarray(expected))

    rank, size = naive.rank, naive.size
    check(naive.bcast(mine(rank)), 0)
    for every in (
        naive.gather(mine(rank)) or (),
        naive.allgather(mine(rank)),
        naive.alltoall([mine(rank)] * size),
    ):
        for other, found in enumerate(every):
            check(found, other)
    check(naive.scatter([mine(other) for other in range(size)]), rank)
    total = naive.allreduce(mine(rank))
    same(total[1], sum(sample(other, "int32") for other in range(size)).astype("int32"))
    if size > 1:
        if rank == 0:
            naive.send(mine(0), 1, 0)
        elif rank == 1:
            check(naive.recv(0, 0), 0)


def test_scalars_arrive_as_numpy_scalars(naive):
    for scalar in (3, 2.5, True, 1j, np.float16(0.5), np.int8(-3)):
        expected = np.asarray(scalar)[()]
        for found in (naive.bcast(scalar), *naive.allgather(scalar)):
            assert type(found) is type(expected)
            assert found == expected
        total = expected
        for _ in range(1, naive.size):
            total = total + expected
        assert naive.allreduce(scalar) == total


def test_any_dtype_with_a_buffer_travels(naive):
    for array in (
        np.array(["2026-11-20", "NaT"], "datetime64[D]"),
        np.array(["ab", "ç"]),
        np.array([(1, 2.5)], [("n", "i4"), ("x", "f8")]),
        np.arange(5, dtype=">i4"),
        np.array([b"\0\1"], "V2"),
        np.arange(4, dtype=np.longdouble),
    ):
        for found in naive.allgather(array):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


def test_a_sum_keeps_foreign_byte_order(naive):
    total = naive.allreduce(np.arange(5, dtype=">f4"))
    same(total, (np.arange(5) * naive.size).astype(">f4"))


# Around what goes with the frame or the note, which other arrays and the frame share.
SIZES = (0, 1, 16_000, 16_383, 16_384, 16_385, 40_000, 65_000, 65_536, 65_537)


def tuple_of_sizes(seed: int) -> tuple[np.ndarray, ...]:
    """Small arrays after large ones too, in both memory orders, in an order that the seed draws."""
    random = np.random.default_rng(seed)
    flat = [random.integers(0, 256, size).astype(np.uint8) for size in random.permutation(SIZES)]
    return *flat, np.asfortranarray(random.standard_normal((3, 4))), np.float16(seed)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_small_arrays_travel_with_their_frame_and_large_ones_apart(naive, seed):
    if naive.size > 1 and naive.rank < 2:
        if naive.rank == 0:
            naive.send(tuple_of_sizes(seed), 1, 0)
            naive.send(tuple_of_sizes(seed)[seed], 1, 0)
        else:
            found = naive.recv(0, 0)
            for actual, expected in zip(found, tuple_of_sizes(seed), strict=True):
                np.testing.assert_array_equal(actual, expected)
            same(naive.recv(0, 0), tuple_of_sizes(seed)[seed])
    for row in (tuple_of_sizes(naive.rank + seed), tuple_of_sizes(seed)[naive.rank]):
        found = naive.allgather(row)
        assert len(found) == naive.size
        for rank, each in enumerate(found):
            mine = tuple_of_sizes(rank + seed) if isinstance(row, tuple) else None
            if mine is None:
                same(each, tuple_of_sizes(seed)[rank])
            else:
                for actual, expected in zip(each, mine, strict=True):
                    np.testing.assert_array_equal(actual, expected)


def test_names_of_a_received_dtype_are_the_receivers_own(naive):
    """Frames are cached: what one array's owner changes must not come with the next one."""
    array = np.zeros(2, [("a", "f4"), ("b", "i8")])
    for _ in range(2):
        for found in naive.allgather(array):
            assert found.dtype.names == ("a", "b")
            if found.dtype is not array.dtype:
                found.dtype.names = ("x", "y")


def test_bytes_of_any_length_are_gathered_from_all_ranks(naive):
    for length in (0, 1, 96, 97, 5000):
        mine = [bytes([rank]) * (length + rank) for rank in range(naive.size)]
        assert naive.allgather_bytes(mine[naive.rank]) == mine
        assert CommunicatorBase.allgather_bytes(naive, mine[naive.rank]) == mine
    with pytest.raises((TypeError, PeerError), match=r"rank 0: .*allgather_bytes takes"):
        naive.allgather_bytes(b"" if naive.rank else "text")


two_ranks = pytest.mark.sizes(2)
# What a stranger's communicator inherits must say and do the same.
as_ours_and_as_a_strangers = pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)


@two_ranks
@as_ours_and_as_a_strangers
def test_a_note_of_any_length_travels_beside_arrays(naive, kind):
    arrays = np.arange(6, dtype="f2").reshape(2, 3), np.asfortranarray(np.ones((2, 2)))
    large = np.arange(10_000, dtype="f8")
    for note in (b"", b"x", bytes(range(256)) * 100, bytes(range(256)) * 300):
        for data in ((), arrays, (*arrays, large), (large[::2], arrays[0])):
            if naive.rank == 0:
                kind(naive).send_noted(naive, note, data, 1, 3, number=len(note) - 1)
            else:
                found, received, number = kind(naive).recv_noted(naive, 0, 3)
                assert (found, number) == (note, len(note) - 1)
                assert len(received) == len(data)
                for array, expected in zip(received, data, strict=True):
                    same(array, expected)
                    assert array.flags.owndata


@two_ranks
def test_a_long_note_is_not_kept(naive):
    note = bytes(100_000)
    before = sys.getrefcount(note)
    if naive.rank == 0:
        naive.send_noted(note, (np.ones(2),), 1, 3)
    else:
        naive.recv_noted(0, 3)
    assert sys.getrefcount(note) == before


@two_ranks
@as_ours_and_as_a_strangers
def test_what_is_no_note_no_tuple_or_no_number_raises_at_once(naive, kind):
    arrays = (np.ones(2),)
    for note, data, number, text in [
        ("text", (), 0, "the note of send_noted must be bytes, got str"),
        (None, arrays, 0, "the note of send_noted must be bytes, got NoneType"),
        (b"", np.ones((2, 2)), 0, "send_noted takes a tuple of arrays, got ndarray"),
        (b"", np.float64(1), 0, "send_noted takes a tuple of arrays, got float64"),
        (b"", (), "1", "the number of send_noted must be an int, got str"),
        (b"", arrays, 2**63, "the number of send_noted must have 64 bits, got 92"),
        (b"", (), 2**63, "the number of send_noted must have 64 bits, got 9223372036854775808"),
        (b"", (), -(2**63) - 1, "the number of send_noted must have 64 bits, got -9223372036854"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^rank {naive.rank}: {text}"):
            kind(naive).send_noted(naive, note, data, 1 - naive.rank, 3, "", number)


@two_ranks
@as_ours_and_as_a_strangers
def test_numbers_of_64_bits_travel_with_the_same_note(naive, kind):
    numbers = (0, 1, -1, 2**63 - 1, -(2**63), True)
    for number in numbers:
        if naive.rank == 0:
            kind(naive).send_noted(naive, b"the same", (np.full(2, number),), 1, 3, number=number)
        else:
            note, (array,), found = kind(naive).recv_noted(naive, 0, 3)
            assert (note, found) == (b"the same", number)
            assert array[0] == number


@two_ranks
def test_what_was_sent_in_another_way_is_refused_by_name(naive):
    ways = {
        "send": lambda: naive.send(np.ones(2), 1, 0),
        "send_noted": lambda: naive.send_noted(b"note", (np.ones(2),), 1, 0),
        "send_obj": lambda: naive.send_obj("text", 1, 0),
    }
    for sent, send in ways.items():
        for received in (name for name in ways if name != sent):
            if naive.rank == 0:
                send()
            else:
                name = received.replace("send", "recv")
                advice = sent.replace("send", "recv")
                text = rf"rank 1: {name} got .* rank 0 sent with {sent} .* with {advice}$"
                with pytest.raises(TypeError, match=text):
                    getattr(naive, name)(0, 0)
    if naive.rank == 0:
        ways["send"]()
    else:
        with pytest.raises(TypeError, match="rank 1: recv_noted got a ndarray that rank 0"):
            CommunicatorBase.recv_noted(naive, 0, 0)


def test_many_arrays_need_a_long_frame(naive):
    mine = [np.full((2, 3), i + naive.rank) for i in range(200)]
    for rank, found in enumerate(naive.allgather(mine)):
        for i, array in enumerate(found):
            same(array, np.full((2, 3), i + rank))
    if naive.size > 1 and naive.rank < 2:
        many = [np.full(i % 3, i) for i in range(3000)]
        if naive.rank == 0:
            naive.send(many, 1, 0)
        else:
            for actual, expected in zip(naive.recv(0, 0), many, strict=True):
                same(actual, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_allreduce_of_all_sizes(naive, dtype):
    for elements in (1, 4096, 4097, 300_000, 1_000_003):
        rows = [
            np.random.default_rng(rank).standard_normal(elements, "f4").astype(dtype)
            for rank in range(naive.size)
        ]
        expected = rows[0].astype("float32")
        for row in rows[1:]:
            expected += row
        same(naive.allreduce(rows[naive.rank]), expected.astype(dtype))


def test_multi_node_mean(comm):
    expected = sum(np.arange(3.0) + rank for rank in range(comm.size)) / comm.size
    same(comm.multi_node_mean(np.arange(3.0) + comm.rank), expected)
    out = np.empty(3)
    assert comm.multi_node_mean(np.arange(3.0) + comm.rank, out) is out
    same(out, expected)
