"""`get_communication_backend`, a name that older versions had."""

import pytest

from chainermn_modelparallel.functions.sync_batch_norm import get_communication_backend

pytestmark = pytest.mark.world


def test_which_backend_it_uses_is_told(comm):
    """`get_communication_backend` takes any communicator, as older versions' did."""
    for given, expected in (("auto", "mpi"), ("mpi", "mpi"), ("nccl", "nccl")):
        assert get_communication_backend(comm, given) == expected
    assert get_communication_backend(comm=comm) == "mpi"
    with pytest.raises(ValueError, match="auto, mpi, nccl, got 'gloo'"):
        get_communication_backend(comm, communication_backend="gloo")
