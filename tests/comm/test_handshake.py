"""Ranks check that they mean the same call, and tell each other of errors."""

from contextlib import suppress

import numpy as np
import pytest

from chainermn_comm import CommunicatorBase, PeerError, RankMismatchError
from tests.support.oracles.freed import Batch, caught_with, freed_at_once

pytestmark = [
    pytest.mark.world,
    pytest.mark.parametrize(
        "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
    ),
]


def test_payloads_of_any_length_reach_all_ranks(naive, kind):
    for length in (0, 1, 96, 97, 5000):
        payloads = [bytes([rank]) * (length + rank) for rank in range(naive.size)]
        found = kind(naive).handshake(
            naive, "save", (("step", 3),), payload=payloads[naive.rank]
        )
        assert found == payloads


def test_an_error_is_raised_where_it_is_and_told_elsewhere(naive, kind):
    last = naive.size - 1
    error = ValueError(f"rank {last}: no such file") if naive.rank == last else None
    expected = pytest.raises(ValueError, match=f"^rank {last}: no such file$")
    if naive.rank != last:
        text = (
            f"^save on rank {naive.rank} failed because of rank {last}: "
            "ValueError: no such file$"
        )
        expected = pytest.raises(PeerError, match=text)
    with expected:
        kind(naive).handshake(naive, "save", error=error, payload=b"unused")
    assert kind(naive).handshake(naive, "save") == [b""] * naive.size


def test_the_same_error_may_be_raised_again(naive, kind):
    """In a call of its own each time, without one between."""
    error = ValueError("planted")
    for operation in "save", "load":
        with pytest.raises(
            ValueError if naive.rank == 0 else PeerError, match="planted"
        ):
            kind(naive).handshake(naive, operation, error=None if naive.rank else error)
    assert kind(naive).handshake(naive, "save") == [b""] * naive.size


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("entry", ["operation", "step"])
def test_what_differs_is_named_on_all_ranks(naive, kind, entry):
    odd = naive.rank == 0
    operation = "load" if odd and entry == "operation" else "save"
    step = 4 if odd and entry == "step" else 3
    with pytest.raises(
        RankMismatchError, match=f"ranks disagree on {entry}: .* on rank 0"
    ) as found:
        kind(naive).handshake(naive, operation, (("name", "x"), ("step", step)))
    assert found.value.entry == entry
    assert kind(naive).handshake(naive, "save") == [b""] * naive.size


def test_a_payload_that_is_not_bytes_is_told_on_all_ranks(naive, kind):
    with pytest.raises(
        (TypeError, PeerError), match=r"rank 0: .*payload of save must be bytes"
    ):
        kind(naive).handshake(naive, "save", payload=b"" if naive.rank else "text")


def test_numbers_of_numpy_are_equal_to_those_of_python(naive, kind):
    number = np.int64 if naive.rank else int
    signature = ("step", number(3)), ("shape", (number(2), 5), "float32"), ("on", None)
    assert kind(naive).handshake(naive, "save", signature) == [b""] * naive.size
    if naive.size > 1:
        with pytest.raises(
            RankMismatchError, match="ranks disagree on step: 3 on rank 0; 4 on"
        ):
            kind(naive).handshake(
                naive, "save", (("step", number(3 + (naive.rank > 0))),)
            )


def test_an_error_does_not_outlive_its_handling(naive, kind):
    batch = Batch()
    with freed_at_once(batch):
        error = caught_with(batch) if naive.rank == 0 else None
        del batch
        with suppress(ValueError, PeerError):
            kind(naive).handshake(naive, "save", error=error)
        del error


@pytest.mark.parametrize(
    "method", ["allreduce", "bcast", "allgather", "gather", "bcast_data"]
)
def test_a_wrong_argument_does_not_outlive_the_error(naive, kind, method):
    batch = Batch()
    with freed_at_once(batch):
        with suppress(TypeError, PeerError):
            getattr(naive, method)(batch)
        del batch


@pytest.mark.parametrize(
    "entry",
    [("root", "first"), ("root", 1 << 70), ("root", -1), ("root",), ("root", None)],
    ids=str,
)
def test_an_entry_named_root_may_have_any_value(naive, kind, entry):
    for _ in range(2):
        assert kind(naive).handshake(naive, "save", (entry,)) == [b""] * naive.size


@pytest.mark.parametrize(
    "value", [[1, 2], {"a": 1}, np.arange(3)], ids=["list", "dict", "array"]
)
def test_a_value_that_has_no_hash_is_compared(naive, kind, value):
    for _ in range(2):
        signature = (("step", 3), ("x", value))
        assert kind(naive).handshake(naive, "save", signature) == [b""] * naive.size
    if naive.size > 1:
        odd = naive.rank == 0
        with pytest.raises(
            RankMismatchError, match="ranks disagree on x: other on rank 0; "
        ):
            kind(naive).handshake(naive, "save", (("x", "other" if odd else value),))


def failing_signature():
    yield ("step", 3)
    raise ValueError("no second entry")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (failing_signature, ValueError, "no second entry"),
        (lambda: 3, TypeError, "iterable"),
        *(
            (
                lambda entry=entry: (("step", 3), entry),
                TypeError,
                r"of save must have tuples of a name and",
            )
            for entry in ((), 3, "ab", ["x", 1], (3, 4), (None,))
        ),
    ],
)
def test_a_signature_that_is_none_raises_on_all_ranks(naive, kind, make, error, words):
    wrong = naive.rank == 0
    with pytest.raises(error if wrong else PeerError, match=words):
        kind(naive).handshake(naive, "save", make() if wrong else (("step", 3),))
    assert (
        kind(naive).handshake(naive, "save", iter([("step", 3)])) == [b""] * naive.size
    )


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("nested", [False, True])
def test_equal_numbers_of_different_types_differ_whatever_was_called_before(
    naive, kind, nested
):
    def call(number):
        value = (2, ("f4", number)) if nested else number
        return kind(naive).handshake(naive, "save", (("on", value),))

    for number in (1, True, 1.0, True, 1):
        assert call(number) == [b""] * naive.size
        for other in {bool, int, float} - {type(number)}:
            with pytest.raises(
                RankMismatchError, match=r"disagree on on: .* on rank 0; "
            ):
                call(other(1) if naive.rank == 0 else number)
