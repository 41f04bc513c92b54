"""Ranks check that they mean the same call, and tell each other of errors."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
from tests.support.oracles.raised import Batch, freed_at_once, raises_on_all

pytestmark = pytest.mark.world


@pytest.mark.parametrize("length", [0, 1, 95, 96, 97, 5000])
def test_payloads_of_any_length_reach_all_ranks(either, length):
    ranks = range(either.size)
    signature = (("step", 3),)
    for payloads in (
        [bytes([rank]) * (length + rank) for rank in ranks],
        [b"x" * length + bytes([rank]) for rank in ranks],  # alike at the beginning
    ):
        found = either.handshake("save", signature, payload=payloads[either.rank])
        assert found == payloads


def test_an_error_is_raised_where_it_is_and_told_elsewhere(either):
    last = either.size - 1
    is_wrong = either.rank == last
    text = f"^rank {last}: no such file$"
    if not is_wrong:
        text = (
            f"^save on rank {either.rank} failed because of rank {last}: "
            "ValueError: no such file$"
        )
    error = None
    if is_wrong:
        error = ValueError(f"rank {last}: no such file")
    with raises_on_all(is_wrong, ValueError, text):
        either.handshake("save", error=error, payload=b"unused")
    assert either.handshake("save") == [b""] * either.size


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    ("operation", "value", "entry"),
    [
        ("load", 3, "operation"),
        ("save", 4, "step"),
        # Equal numbers of different types differ.
        ("save", 3.0, "step"),
        ("save", (3, ("f4", True)), "step"),
        ("save", np.arange(3), "step"),  # which has no hash
    ],
    ids=str,
)
def test_what_differs_is_named_on_all_ranks(either, operation, value, entry):
    for _ in range(2):
        number = 3
        if either.rank == 0:
            number = value
        signature = (("name", "x"), ("step", number))
        called = "save"
        if either.rank == 0:
            called = operation
        with pytest.raises(
            RankMismatchError, match=f"ranks disagree on {entry}: .* on rank 0; .* on"
        ) as found:
            either.handshake(called, signature)
        assert found.value.entry == entry
        same = (("name", "x"), ("step", value))
        assert either.handshake("save", same) == [b""] * either.size


@pytest.mark.parametrize(
    "entry",
    [("root", "first"), ("root", 1 << 70), ("root", -1), ("root",), ("root", None)],
    ids=str,
)
def test_an_entry_named_root_may_have_any_value(either, entry):
    assert either.handshake("save", (entry,)) == [b""] * either.size


def test_numbers_of_numpy_are_equal_to_those_of_python(either):
    number = int
    if either.rank:
        number = np.int64
    signature = ("step", number(3)), ("shape", (number(2), 5), "float32"), ("on", None)
    assert either.handshake("save", signature) == [b""] * either.size


def failing_signature():
    yield ("step", 3)
    raise ValueError("no second entry")


TUPLES = "of save must have tuples of a name and"


@pytest.mark.parametrize(
    ("signature", "payload", "error", "words"),
    [
        (failing_signature, b"", ValueError, "no second entry"),
        (lambda: 3, b"", TypeError, "iterable"),
        (lambda: [("step", 3), ()], b"", TypeError, TUPLES),
        (lambda: [["x", 1]], b"", TypeError, TUPLES),
        (lambda: [(3, 4)], b"", TypeError, TUPLES),
        (lambda: (), "text", TypeError, "payload of save must be bytes"),
    ],
)
def test_what_is_no_signature_or_payload_raises_on_all_ranks(
    either, signature, payload, error, words
):
    is_wrong = either.rank == 0
    with raises_on_all(is_wrong, error, words):
        if is_wrong:
            either.handshake("save", signature(), payload=payload)
        else:
            either.handshake("save", iter([("step", 3)]))
    assert either.handshake("save") == [b""] * either.size


@pytest.mark.parametrize("method", ["allreduce", "bcast_data"])
def test_a_wrong_argument_does_not_outlive_the_error(naive, method):
    batch = Batch()
    with freed_at_once(batch):
        with suppress(TypeError, PeerError):
            getattr(naive, method)(batch)
        del batch
