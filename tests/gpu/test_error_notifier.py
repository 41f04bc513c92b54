"""How ranks that work on GPUs tell one another of a failure."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError
from chainermn_comm.gpu.error_notifier import ErrorNotifier

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


@pytest.mark.parametrize("failing", ["one", "all"])
def test_no_message_of_a_failure_gets_into_the_next_communicator(world, failing):
    errors = ErrorNotifier(world)
    if failing == "all" or world.rank == 0:
        errors.send("no luck")  # and never listens
    assert errors.close()
    with_next(world)


def test_a_failure_is_heard_and_without_one_nothing_is_left(world):
    errors = ErrorNotifier(world)
    errors.poll()
    assert not errors.close()
    errors = ErrorNotifier(world)
    if world.rank == 0:
        errors.send("no luck")
    else:
        with pytest.raises(PeerError, match="rank 0 failed: no luck"):
            listen(errors)
    assert errors.close()
    with_next(world)


def listen(errors):
    while True:
        errors.poll()


def with_next(world):
    """Messages on a new communicator are its own, though MPI gives numbers of freed ones anew."""
    comm, got = world.Dup(), np.zeros(world.size, "i4")
    requests = [comm.Irecv(got[rank : rank + 1], rank) for rank in range(world.size)]
    requests += [comm.Isend(np.array([comm.rank], "i4"), rank) for rank in range(world.size)]
    for request in requests:
        request.Wait()
    assert got.tolist() == list(range(world.size))
    comm.Free()
