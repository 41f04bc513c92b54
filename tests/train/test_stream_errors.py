"""Streams and events beside training: the host needn't wait, and CUDA's errors are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import chainer
import pytest

from chainermn_comm import CommunicationError, PeerError, create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.doubles.cupy_double import Gpu, installed
from tests.support.doubles.device_double import ILLEGAL_ADDRESS
from tests.support.doubles.gpu_streams import all_arrays_on_one_gpu
from tests.support.training.overlapped import Deep, batch
from tests.support.training.overlapped import small_buckets as small_buckets
from tests.support.training.trainers import same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]

WORDS = "cudaErrorIllegalAddress: an illegal memory access"
FIRST, STEADY = 0, 3  # updates: the first makes the stream
CALLS = ["eventCreate", "eventRecord", "streamWaitEvent"]
# The exchange, CUDA's call that fails, the update, and how many such calls come before.
CASES = [
    *(
        (kind, call, STEADY, 0)
        for kind in ("overlap", "double_buffering")
        for call in CALLS
    ),
    ("overlap", "streamCreate", FIRST, 0),
    ("double_buffering", "streamCreate", FIRST, 0),
    ("double_buffering", "eventQuery", STEADY, 0),
    # The main thread's call comes first, then the other one's.
    ("double_buffering", "eventCreate", STEADY, 1),
    ("double_buffering", "eventRecord", STEADY, 1),
]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A double that has the streams; the arrays are NumPy's."""
    with installed() as device, all_arrays_on_one_gpu():
        yield device


def error_of(call: Callable[[], None]) -> CommunicationError | None:
    try:
        call()
    except CommunicationError as error:
        return error
    return None


@pytest.mark.parametrize(("kind", "call", "update", "after"), CASES)
def test_an_error_is_raised_and_who_goes_on_trains_with_the_same_state(
    world, gpu, kind, call, update, after
):
    """On all ranks where they agree after it; else on its own, and they share rank 0's state."""
    with create_communicator("naive") as comm:
        model = Deep()
        optimizer = create_multi_node_optimizer(
            chainer.optimizers.SGD(0.1), comm, **{"overlap": False, kind: True}
        ).setup(model)
        for number in range(update):
            optimizer.update(model, batch(comm.rank, number))
        if comm.rank == 1:
            gpu.plant(call, ILLEGAL_ADDRESS, after)
        outcomes = [
            error_of(lambda n=number: optimizer.update(model, batch(comm.rank, n)))
            for number in range(update, update + 8)
        ]
        raised = [error for error in outcomes if error is not None]
        assert comm.rank != 1 or gpu.recover(), "the call isn't made"
        assert len(raised) <= 1
        if comm.rank == 1:
            assert WORDS in str(raised[0])
        elif kind == "double_buffering" or update == FIRST:
            assert WORDS in str(raised[0])
            assert isinstance(raised[0], PeerError)
        assert same_everywhere(comm, model)
        optimizer.finalize()
