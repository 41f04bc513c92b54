"""Streams and events beside training: who waits for what, and CUDA's errors are told."""

from __future__ import annotations

import pytest
from chainer.optimizers import SGD

from chainermn_comm import CommunicationError, PeerError, create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.doubles.cupy_double import installed
from tests.support.doubles.device_double import ILLEGAL_ADDRESS
from tests.support.training.overlapped import (
    Deep,
    Streams,
    all_arrays_on_one_gpu,
    batch,
)
from tests.support.training.overlapped import small_buckets as small_buckets
from tests.support.training.trainers import same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]

WORDS = "cudaErrorIllegalAddress: an illegal memory access"
FIRST = 0  # update, which makes the stream
STEADY = 3
KINDS = ["overlap", "double_buffering"]
CALLS = ["eventCreate", "eventRecord", "streamWaitEvent"]
# The exchange, CUDA's call that fails, the update, and how many such calls come before.
CASES = [
    *[(kind, call, STEADY, 0) for kind in KINDS for call in CALLS],
    *[(kind, "streamCreate", FIRST, 0) for kind in KINDS],
    ("double_buffering", "eventQuery", STEADY, 0),
    # The main thread's call comes first, then the other one's.
    ("double_buffering", "eventCreate", STEADY, 1),
    ("double_buffering", "eventRecord", STEADY, 1),
]


def optimizer_of(comm, model, kind):
    """A multi-node optimizer with this exchange."""
    actual = SGD(0.1)
    options = {"overlap": False, kind: True}
    return create_multi_node_optimizer(actual, comm, **options).setup(model)


@pytest.fixture
def gpu():
    """A double that has the streams; the arrays are NumPy's."""
    with installed() as device, all_arrays_on_one_gpu():
        yield device


@pytest.mark.parametrize(("kind", "call", "update", "after"), CASES)
def test_an_error_is_raised_and_who_goes_on_trains_with_the_same_state(
    world, gpu, kind, call, update, after
):
    """On all ranks where they agree after it; else on its own, and they share rank 0's state."""
    with create_communicator("naive") as comm:
        model = Deep()
        optimizer = optimizer_of(comm, model, kind)
        raised = []
        for number in range(update + 8):
            if number == update and comm.rank == 1:
                gpu.plant(call, ILLEGAL_ADDRESS, after)
            try:
                optimizer.update(model, batch(comm.rank, number))
            except CommunicationError as error:
                raised.append(error)
        if comm.rank == 1:
            assert gpu.recover(), "the call isn't made"
        if comm.rank == 1 or kind == "double_buffering" or update == FIRST:
            assert len(raised) == 1
        for error in raised:
            assert WORDS in str(error)
            assert isinstance(error, PeerError) == (comm.rank != 1)
        assert same_everywhere(comm, model)
        optimizer.finalize()


# What threads do in an update with the thread's stream: that which trains, and the
# other one.
EVENT = ["event made", "recorded"]
ON_STREAMS = {
    # The main thread's stream waits for the other one, and the host for neither.
    "overlap": ([*EVENT, "stream waits for event"], ["stream entered", "stream left"]),
    # The exchange comes after the gradients.
    "double_buffering": (
        EVENT,
        [
            *("stream entered", "stream waits for event"),
            *(*EVENT, "stream done", "stream left"),
        ],
    ),
}


@pytest.mark.parametrize("kind", ON_STREAMS)
def test_the_thread_has_a_stream_of_its_own(world, kind):
    """A double of CuPy's streams writes down who does what in which order."""
    streams = Streams()
    with create_communicator("naive") as comm, streams.installed():
        model = Deep()
        optimizer = optimizer_of(comm, model, kind)
        for number in range(STEADY + 1):
            streams.main.clear()
            optimizer.update(model, batch(comm.rank, number))
        optimizer.finalize()
    main, thread = ON_STREAMS[kind]
    assert [each for each in streams.main if each != "device"] == main
    found = [each for each in streams.thread if each != "device"]
    assert found == STEADY * thread
    streams.make_stream.assert_called_once_with(non_blocking=True)
