"""What one rank fails at is raised on all."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest

from chainermn_comm import CommunicatorBase, PeerError, RankMismatchError
from chainermn_comm.errors import raise_together
from tests.support.oracles.freed import Batch, caught_with, freed_at_once
from tests.support.oracles.raised import raises_on_all


def save(handshake, wrong: bool, make: Any = ValueError, operation: str = "save"):
    with raise_together(handshake, operation):
        if wrong:
            raise make("planted")


@pytest.mark.world
@pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)
class TestRaiseTogether:
    """The end of a block is one handshake, whatever one rank raises inside."""

    def test_an_error_is_raised_on_all_and_does_not_outlive_its_handling(
        self, naive, kind
    ):
        batches = [Batch()]
        is_first = naive.rank == 0
        handshake = partial(kind(naive).handshake, naive)
        with freed_at_once(batches[0]):
            with suppress(ValueError, PeerError):
                save(handshake, is_first, lambda _: caught_with(batches[0]))
            batches.clear()
        with raises_on_all(is_first, ValueError, "planted"):
            save(handshake, is_first)
        assert handshake("save") == [b""] * naive.size

    def test_ranks_compare_signatures_and_exchange_payloads(self, naive, kind):
        handshake = partial(kind(naive).handshake, naive)
        for odd in (False, True):
            expected = pytest.raises(RankMismatchError, match="disagree on step")
            with (
                expected if odd and naive.size > 1 else nullcontext(),
                raise_together(handshake, "save") as call,
            ):
                call.signature = (("step", naive.rank == 0 and odd),)
                call.payload = bytes([naive.rank])
            assert odd or call.payloads == [bytes([it]) for it in range(naive.size)]

    def test_without_meet_the_next_handshake_is_the_callers(self, naive, kind):
        handshake = partial(kind(naive).handshake, naive)
        for wrong in (None, 0):
            is_wrong = naive.rank == wrong
            expected = raises_on_all(is_wrong, ValueError, "planted")
            with nullcontext() if wrong is None else expected:
                with raise_together(handshake, "save", meet=False):
                    if is_wrong:
                        raise ValueError("planted")
                assert handshake("save") == [b""] * naive.size


@pytest.mark.world
def test_an_error_that_all_ranks_have_raised_is_not_exchanged_again(naive):
    """Though another rank has raised it outside of a block, all are at the same call then."""
    is_first = naive.rank == 0
    block = raise_together(naive.handshake, "outer") if is_first else nullcontext()
    with raises_on_all(is_first, ValueError, "planted"), block:
        save(naive.handshake, is_first)
    assert naive.handshake("save") == [b""] * naive.size


@pytest.mark.world
def test_an_error_of_an_earlier_call_is_exchanged(naive):
    is_first = naive.rank == 0
    error = ValueError("planted")
    for operation in "save", "load":
        with raises_on_all(is_first, ValueError, "planted"):
            save(naive.handshake, is_first, lambda _: error, operation)
    assert naive.handshake("save") == [b""] * naive.size


@pytest.mark.world
def test_an_error_is_exchanged_if_another_call_has_been_made_since(naive):
    is_first = naive.rank == 0
    error = ValueError("planted")
    with (
        raises_on_all(is_first, ValueError, "planted"),
        raise_together(naive.handshake, "outer"),
    ):
        with suppress(ValueError, PeerError):
            save(naive.handshake, is_first, lambda _: error)
        assert naive.handshake("save") == [b""] * naive.size
        if is_first:
            raise error
    assert naive.handshake("save") == [b""] * naive.size
