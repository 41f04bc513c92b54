"""What one rank fails at is raised on all, and what ranks differ in, however many they are."""

from __future__ import annotations

import json
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

from chainermn_comm import CommunicatorBase, PeerError, RankMismatchError
from chainermn_comm.errors import SharedFailure, raise_mismatch, view_of
from tests.support.oracles.freed import Batch, caught_with, freed_at_once

RANKS, PARAMETERS, ODD = 1024, 200, 700


@pytest.mark.world
@pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)
def test_a_shared_failure_does_not_outlive_its_handling(naive, kind):
    batch = Batch()

    def handshake(*arguments, **options):
        kind(naive).handshake(naive, *arguments, **options)

    with freed_at_once(batch):
        with suppress(ValueError, PeerError), SharedFailure(handshake, "save"):
            if naive.rank == 0:
                raise caught_with(batch)
        del batch
        if naive.rank:
            with pytest.raises(PeerError, match="rank 0: ValueError: planted"):
                handshake("save")
    assert kind(naive).handshake(naive, "save") == [b""] * naive.size


def signature(odd: bool) -> list[tuple]:
    return [
        (
            "parameter",
            f"/{index}/W",
            np.dtype("f4"),
            (64, 64, 3, 4 if odd and index == 150 else 3),
        )
        for index in range(PARAMETERS)
    ]


def test_each_different_signature_is_read_once():
    views = [view_of("allreduce_grad", signature(rank == ODD)) for rank in (0, ODD)]
    views = [views[rank == ODD] for rank in range(RANKS)]
    with (
        mock.patch("json.loads", side_effect=json.loads) as read,
        pytest.raises(RankMismatchError) as caught,
    ):
        raise_mismatch("allreduce_grad", 0, views)
    assert read.call_count == 2
    text = str(caught.value)
    assert (
        "ranks disagree on parameter: /150/W float32 (64, 64, 3, 3) on ranks 0, 1, 2, "
        in text
    )
    assert text.endswith(f"; /150/W float32 (64, 64, 3, 4) on rank {ODD}")
