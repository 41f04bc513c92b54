"""What a rank notes is read whole, whatever moment the monitor looks at."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from chainermn_comm.watchdog import records
from tests.support import jobs
from tests.support.watchdog import clock

# Notes calls as fast as it can, where nothing takes long.
RANK = """
import os
from tests.support.watchdog import description, record
described, noted = description(0), record((0, 1), 0, 2)
print(f"/proc/{os.getpid()}/fd/{described['area']}", flush=True)
for number in range(200_000):
    noted.collective("allreduce", number, nbytes=8)
    noted.leave()
input()
"""


@pytest.fixture
def busy_rank():
    """A process that notes calls, and the memory where it does."""
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": jobs.variables()}
    with subprocess.Popen([sys.executable, "-c", RANK], text=True, **how) as process:
        assert process.stdout is not None
        with open(process.stdout.readline().strip(), "rb") as file:
            yield process, mmap.mmap(file.fileno(), records.AREA_BYTES, prot=mmap.PROT_READ)
        process.communicate("\n")


def test_a_call_that_is_being_noted_never_seems_to_wait_since_the_machine_started(busy_rank):
    """The clock of its times begins then, and memory that is about to be written holds zeros."""
    _, area = busy_rank
    seen = 0
    number = -1
    while number < 199_999:
        for call in records.read(area, clock()):
            number, seen = call.sequence, seen + call.waits
            assert call.age < clock() / 2, call
            assert call.operation in ("", "allreduce"), call
    assert seen


def test_a_rank_that_is_stopped_while_it_notes_a_call_does_not_wait(busy_rank):
    _, area = busy_rank
    while records.read(area, clock())[-1].sequence < 199_999:
        pass
    torn = bytearray(area[:])
    records.VERSION.pack_into(torn, records.offset_of(1) + records.VERSION_AT, 7)
    (call,) = [one for one in records.read(torn, clock()) if one.communicator == (0, 1)]
    assert (call.waits, call.age, call.operation) == (False, 0.0, "allreduce")
