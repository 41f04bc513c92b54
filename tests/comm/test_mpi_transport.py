"""The transport over MPI: what room it takes."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm.allreduce.mpi_transport import MpiTransport
from tests.support.one_of_many import most_bytes, rank_1_of

MIB = 1 << 20


@pytest.mark.parametrize(("size", "limit"), [(2, 16), (4, 16), (9, 16), (100, 16), (1000, 32)])
def test_what_is_received_hardly_grows_with_the_number_of_ranks(monkeypatch, size, limit):
    monkeypatch.setattr(MpiTransport, "_exchange", lambda *_: [])
    grad = np.zeros(20 * MIB, "f4")
    transport = MpiTransport(rank_1_of(size), 0)
    with np.errstate(all="ignore"):  # of what wasn't received
        used = most_bytes(lambda: transport.allreduce([grad], size))
    assert MIB / 2 < used < limit * MIB
