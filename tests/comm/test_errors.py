"""What one rank fails at is raised on all."""

from contextlib import suppress

import pytest

from chainermn_comm import CommunicatorBase, PeerError
from chainermn_comm.errors import SharedFailure
from tests.support.freed import Batch, caught_with, freed_at_once

pytestmark = [
    pytest.mark.world,
    pytest.mark.parametrize("kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]),
]


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
