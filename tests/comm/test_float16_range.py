"""Means that travel in 16 bits: no needless infinity, and no needless zero."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
from ml_dtypes import finfo

from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes, over_nodes

pytestmark = pytest.mark.world

HALF, SINGLE, DOUBLE = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
COUNT, TURNS = 3000, 2
# The lowest and the highest bits.
KINDS = {
    "any": (0, 0x7BFF),
    "small": (0, 6),
    "below normal": (0, 0x3FF),
    "mixed": (0x7BF0, 0x7BFF),
}


def float16s(kind: str, rank: int, turn: int) -> np.ndarray:
    """float16 numbers of one kind; `any` and `mixed` have the largest beside the smallest."""
    random = np.random.default_rng([rank, turn, len(kind)])
    signs = np.random.default_rng(turn).integers(0, 2, COUNT) << 15
    signs[::4] = random.integers(0, 2, len(signs[::4])) << 15
    bits = random.integers(*KINDS[kind], COUNT, endpoint=True)
    if kind == "mixed":
        bits[::2] = random.integers(0, 4, len(bits[::2]))
    bits[random.random(COUNT) < 0.2] = 0
    return (bits | signs).astype(np.uint16).view(HALF)


@over_nodes("flat", "hierarchical", "two_dimensional")
def test_means_are_neither_infinite_nor_zero_where_float32_sums_are_not(
    world, name, nodes
):
    with on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm:
        for kind, own, turn in itertools.product(KINDS, (HALF, SINGLE), range(TURNS)):
            check(comm, [float16s(kind, rank, turn) for rank in range(world.size)], own)


def check(comm, rows: list[np.ndarray], own: np.dtype) -> None:
    """Whether their mean is near the mean, and finite and other than 0 as a float32 sum is."""
    model = with_grads(w=rows[comm.rank].astype(own), v=np.ones(3, HALF))
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["v"].grad, 1)
    found = model["w"].grad.astype(DOUBLE)
    exact = sum(row.astype(DOUBLE) for row in rows) / len(rows)
    with np.errstate(over="ignore"):
        expected = sum(row.astype(SINGLE) for row in rows) / np.float32(len(rows))
        expected = expected.astype(HALF)
    finite = np.isfinite(expected)
    assert np.all(np.isfinite(found[finite]))
    # Where terms cancel, the order of a sum decides what is left of the small ones; and
    # what lies between zero and the smallest number may, but for a rounding, become
    # either.
    alike = np.all(np.array(rows) >= 0, axis=0) | np.all(np.array(rows) <= 0, axis=0)
    is_number = abs(exact) >= 0.51 * np.finfo(HALF).smallest_subnormal
    assert np.all(found[alike & is_number] != 0)
    assert np.all(found[alike & (exact == 0)] == 0)
    scale = sum(abs(row.astype(DOUBLE)) for row in rows) / len(rows)
    bound = 2 * np.finfo(HALF).eps * scale + np.finfo(HALF).smallest_subnormal
    assert np.all(abs(found - exact)[finite] <= bound[finite])


def beyond_float16(kind: str, size: int) -> list[np.ndarray]:
    """Each rank's float32 numbers, of which float16 holds none or few, though it holds the mean."""
    random = np.random.default_rng(len(kind))
    rows = random.uniform(0, 2.0**-24, (size, COUNT)).astype(SINGLE)
    if kind == "too large":
        rows = random.standard_normal((size, COUNT)).astype(SINGLE)
    if kind in ("too large", "one too large"):
        step = 1 if kind == "too large" else 100
        rows[0, ::step] = 10 ** random.uniform(5, 30, COUNT)[::step]
        rows[1, ::step] = -rows[0, ::step] * SINGLE.type(1 - 2**-20)
        rows[1, ::step][rows[0, ::step] > 1e8] = -rows[0, ::step][rows[0, ::step] > 1e8]
    return list(rows)


@over_nodes("naive", "flat", "hierarchical", "two_dimensional")
def test_gradients_that_float16_does_not_hold_have_a_mean(world, name, nodes):
    with on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm:
        for kind in ("too large", "too small", "one too large"):
            rows = beyond_float16(kind, world.size)
            with np.errstate(over="ignore"):
                narrow = np.array(rows).astype(HALF)
            assert np.isinf(narrow).any() == (kind != "too small")
            for own in (SINGLE, DOUBLE):
                check(comm, rows, own)


@pytest.mark.parametrize("by_rounds", [False, True])
@over_nodes("naive", "flat", "hierarchical", "two_dimensional")
def test_small_means_keep_their_precision_under_every_name(
    world, name, nodes, by_rounds
):
    """Those that float16 rounds to its smallest number, or to zero; nothing but zeros somewhere."""
    how = by_circulant() if by_rounds else contextlib.nullcontext()
    with how, on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm:
        for least in (3e-8, 2e-8, 1e-20):
            rows = [
                np.full(COUNT, least * (rank + 1) * (rank != 1), SINGLE)
                for rank in range(9)
            ]
            rows = [
                row * np.linspace(1, 2, COUNT, dtype=SINGLE)
                for row in rows[: world.size]
            ]
            comm.allreduce_grad(large := with_grads(w=np.full(COUNT, 70_000, SINGLE)))
            np.testing.assert_array_equal(large["w"].grad, 70_000)
            comm.allreduce_grad(model := with_grads(w=rows[comm.rank].copy()))
            exact = np.sum(rows, axis=0, dtype=DOUBLE) / world.size
            np.testing.assert_allclose(
                model["w"].grad, exact, rtol=4 * np.finfo(HALF).eps
            )
        # What is packed together may share an exponent.
        comm.allreduce_grad(
            model := with_grads(v=np.full(5, 2.0**-27, "f4"), w=np.ones(5, "f4"))
        )
        np.testing.assert_array_equal(model["v"].grad, 2.0**-27)


@pytest.mark.parametrize(
    ("own", "wire"),
    [
        *(("bfloat16", "bfloat16"), ("float32", "bfloat16")),
        # As the other type their largest numbers would be infinite, there or back
        # again.
        *(("float16", "bfloat16"), ("bfloat16", "float16")),
    ],
)
@over_nodes("naive", "flat", "hierarchical", "two_dimensional")
def test_means_at_the_end_of_the_range_are_finite(world, name, nodes, own, wire):
    narrow = wire if own == "float32" else own
    largest, rest = float(finfo(narrow).max), [0.0] * (world.size - 2)
    every = {
        # Their sum is a float32, and rounds to infinity in 16 bits.
        "a sum beyond": [largest / 2, 2.0 ** math.frexp(largest / 2)[1], *rest],
        "opposite": [largest, -largest, *rest],
    }
    if narrow == "float16":
        every |= {"all the largest": [largest] * world.size}
    if own == "float32":  # whose last number rounds to infinity in bfloat16
        last = float(np.finfo(SINGLE).max)
        every |= {
            "terms beyond": [last, -last, *rest],
            "one beyond": [last, 0.0, *rest],
        }
    with on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
        for terms in every.values():  # each in a chunk of its own
            model = with_grads(v=np.ones(5, "f4"), w=np.full(9, terms[comm.rank], own))
            comm.allreduce_grad(model)
            mean, scale = sum(terms) / world.size, sum(map(abs, terms)) / world.size
            bound = 2 * float(finfo(narrow).eps) * scale
            assert np.all(abs(model["w"].grad.astype(DOUBLE) - mean) <= bound)
            np.testing.assert_array_equal(model["v"].grad, 1)
