"""What one rank fails at is raised on all."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest

from chainermn_comm import PeerError, RankMismatchError
from chainermn_comm.errors import raise_together, rank_list
from tests.support.oracles.raised import (
    Batch,
    freed_at_once,
    raises_on_all,
)


def save(
    handshake,
    is_wrong,
    make=lambda: ValueError("planted"),
):
    """Raise what is made if this rank is wrong; a variable for it would keep it alive."""
    with raise_together(handshake, "save"):
        if is_wrong:
            raise make()


def caught_with(batch):
    """An error whose traceback refers to the batch."""
    try:
        raise ValueError("planted")
    except ValueError as error:
        return error


@pytest.mark.world
def test_an_error_is_raised_on_all_and_does_not_outlive_its_handling(either):
    batches = [Batch()]
    is_wrong = either.rank == 0
    with freed_at_once(batches[0]):
        with suppress(ValueError, PeerError):
            save(either.handshake, is_wrong, lambda: caught_with(batches[0]))
        batches.clear()
    error = ValueError("planted")
    for _ in range(2):  # an error of an earlier call is exchanged like another one
        with raises_on_all(is_wrong, ValueError, "planted"):
            save(either.handshake, is_wrong, lambda: error)
    assert either.handshake("save") == [b""] * either.size


@pytest.mark.world
@pytest.mark.sizes(2, 3)
def test_ranks_compare_signatures_and_exchange_payloads(either):
    for odd in (False, True):
        expected = nullcontext()
        if odd:
            expected = pytest.raises(RankMismatchError, match="disagree on step")
        with expected, raise_together(either.handshake, "save") as call:
            call.signature = (("step", either.rank == 0 and odd),)
            call.payload = bytes([either.rank])
        assert odd or call.payloads == [bytes([it]) for it in range(either.size)]


@pytest.mark.world
def test_without_meet_the_next_handshake_is_the_callers(either):
    for is_wrong in (False, either.rank == 0):
        block = raise_together(either.handshake, "save", meet=False)
        if is_wrong:
            with pytest.raises(ValueError, match="planted"), block:
                raise ValueError("planted")
            continue
        with block:
            pass
    if either.rank > 0:
        with pytest.raises(PeerError, match="planted"):
            either.handshake("save")
    assert either.handshake("save") == [b""] * either.size


@pytest.mark.world
def test_an_error_is_exchanged_if_another_call_has_been_made_since(either):
    is_first = either.rank == 0
    error = ValueError("planted")
    with (
        raises_on_all(is_first, ValueError, "planted"),
        raise_together(either.handshake, "outer"),
    ):
        with suppress(ValueError, PeerError):
            save(either.handshake, is_first, lambda: error)
        assert either.handshake("save") == [b""] * either.size
        if is_first:
            raise error
    assert either.handshake("save") == [b""] * either.size


def test_of_many_ranks_the_first_are_listed():
    assert rank_list([0]) == "rank 0"
    assert rank_list([0, 1]) == "ranks 0, 1"
    assert rank_list(list(range(32))).endswith(" 31")
    assert rank_list(list(range(33))).endswith(" 31, ...")
