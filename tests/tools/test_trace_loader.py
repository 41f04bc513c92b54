"""How much memory a trace that was read takes."""

import tracemalloc

from chainermn_tools.trace import loader
from tests.support.tools.traces import Made

CALLS = 5000
# As much as a row of the table has in columns, and some.
MOST_BYTES_OF_A_CALL = 150


def test_a_trace_of_millions_of_calls_fits_into_memory(tmp_path):
    made = Made(tmp_path, 0, 1)
    made.write()
    loader.read(tmp_path)  # what is only imported or compiled once doesn't count
    for n in range(CALLS):
        made.call(f"bcast{n % 9}", n, n + 1, sequence=n, root=0)
    made.write()
    del made
    tracemalloc.start()
    run = loader.read(tmp_path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(run.table) == CALLS
    assert held < CALLS * MOST_BYTES_OF_A_CALL
