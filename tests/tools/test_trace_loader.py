"""How much memory a trace that was read takes."""

import tracemalloc

import pytest

from chainermn_tools.trace import loader
from tests.support.tools.traces import Made

EVENTS = 5000
# As much as a row of the table has in columns, and some; and about what the file has of
# the event.
MOST_OF_A_CALL, MOST_OF_AN_EVENT = 150, 250


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (
            lambda made, n: made.call(f"bcast{n % 9}", n, n + 1, sequence=n, root=0),
            MOST_OF_A_CALL,
        ),
        (
            lambda made, n: made.metadata("thread_name", name=f"worker {n}"),
            MOST_OF_AN_EVENT,
        ),
    ],
    ids=["calls", "events of others"],
)
def test_a_trace_of_millions_of_events_fits_into_memory(tmp_path, make, most):
    made = Made(tmp_path, 0, 1)
    made.write()
    loader.read(tmp_path)  # what is only imported or compiled once doesn't count
    for n in range(EVENTS):
        make(made, n)
    made.write()
    del made
    tracemalloc.start()
    run = loader.read(tmp_path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(run.table) + len(run.ranks[0].other) >= EVENTS
    assert held < EVENTS * most
