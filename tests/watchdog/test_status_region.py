"""What a rank records is read whole, whatever moment the monitor looks at."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from chainermn_comm.watchdog import status_region
from tests.support.jobs import runner
from tests.support.watchdog.records import clock

ENOUGH = 20_000
# Notes calls as fast as it can, where nothing takes long, until it is told to end.
RANK = """
import os, select, sys
from tests.support.watchdog.records import description, record
described, recorder = description(0), record(1, 0, 2)
print(f"/proc/{os.getpid()}/fd/{described['files'][0]}", flush=True)
number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for number in range(number, number + 1000):
        recorder.collective("allreduce", number, nbytes=8)
        recorder.leave()
"""


@pytest.fixture
def region():
    """The memory of a process that records calls without end."""
    how = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": runner.variables(),
    }
    with subprocess.Popen([sys.executable, "-c", RANK], text=True, **how) as process:
        assert process.stdout is not None
        with open(process.stdout.readline().strip(), "rb") as file:
            yield mmap.mmap(
                file.fileno(), status_region.REGION_BYTES, prot=mmap.PROT_READ
            )
        process.communicate("\n")


def test_a_call_that_is_being_recorded_never_seems_to_wait_since_the_machine_started(
    region,
):
    """The clock of its times begins then, and memory that is about to be written holds zeros."""
    seen = 0
    for _ in range(100 * ENOUGH):
        for call in status_region.read_calls(region, clock()):
            assert call.age < clock() / 2, call
            assert call.operation in ("", "allreduce"), call
            seen += call.waits
        if seen == ENOUGH:
            return
    pytest.fail(f"the rank recorded {seen} calls")


def test_what_is_being_written_is_read_again(region):
    class Changing(bytearray):
        looks = 0

        def __getitem__(self, where):
            self.looks += 1
            found = bytes(super().__getitem__(where))
            if self.looks > 3:
                return found
            return bytes([self.looks]) * len(found)

    changing = Changing(region[:])
    (call,) = status_region.read_calls(changing, clock())
    assert call.operation in ("", "allreduce")
    assert changing.looks == 7  # two of the next slot, which ends the list
