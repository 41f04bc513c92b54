"""What ranks differ in is told, however many they are."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np

from chainermn_comm.signatures import mismatch_error, view_of

RANKS, PARAMETERS, ODD = 1024, 200, 700


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
    with mock.patch("json.loads", side_effect=json.loads) as read:
        text = str(mismatch_error("allreduce_grad", 0, views))
    assert read.call_count == 2
    assert (
        "ranks disagree on parameter: /150/W float32 (64, 64, 3, 3) on ranks 0, 1, 2, "
        in text
    )
    assert text.endswith(f"; /150/W float32 (64, 64, 3, 4) on rank {ODD}")
