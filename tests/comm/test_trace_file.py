"""How a rank's trace gets into its file: when it is written, and a full disk."""

from __future__ import annotations

import os
import re
import warnings

import pytest

from chainermn_comm import create_communicator
from chainermn_comm.trace import file
from chainermn_comm.trace.file import flush_trace
from tests.support.tracing import calls

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2, 3), pytest.mark.ranks(3)]


def own_file() -> file.TraceFile:
    assert file._file is not None
    return file._file


def test_calls_are_written_together(world, folder, monkeypatch):
    monkeypatch.setattr(file, "FLUSH_SECONDS", 3600.0)  # only when told to
    with create_communicator("naive") as comm:
        flush_trace()
        written: list[str] = []
        monkeypatch.setattr(own_file(), "_write", written.append)
        for _ in range(300):
            comm.bcast_obj(0)
        assert written == []
        flush_trace()
        (text,) = written
        assert text.count('"name":"bcast_obj"') == 300
        monkeypatch.undo()


def test_where_the_disk_is_too_slow_memory_is_bounded_and_calls_are_dropped(
    world, folder, monkeypatch
):
    monkeypatch.setattr(file, "FLUSH_SECONDS", 3600.0)
    with create_communicator("naive") as comm:
        flush_trace()
        monkeypatch.setattr(file, "MOST_QUEUED", 100)
        for _ in range(300):
            comm.bcast_obj(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            own_file().end()
    (text,) = {str(one.message) for one in said}
    missing = re.search(r"(\d+) calls are missing: the disk is too slow", text)
    assert missing is not None, text
    kept = [call for call in calls(folder, world.rank) if call["name"] == "bcast_obj"]
    assert 0 < len(kept) <= 100
    assert len(kept) + int(missing[1]) == 300


def test_a_full_disk_ends_the_trace_and_not_the_training(world, folder):
    with create_communicator("naive") as comm:
        comm.allreduce(1.0)
        flush_trace()
        if world.rank == 0:
            own_file()._descriptor = os.open("/dev/full", os.O_WRONLY)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                assert comm.allreduce(1.0) == world.size
                flush_trace()
        # The file's own thread may have written, and warned, before us.
        texts = [str(one.message) for one in said]
        assert (own_file()._descriptor is None) == (world.rank == 0)
        assert all("No space left" in text and "rank 0" in text for text in texts)
        assert world.rank == 0 or not texts
    names = [call["name"] for call in calls(folder, world.rank)]
    assert names == (["allreduce"] if world.rank == 0 else ["allreduce"] * 3 + ["finalize"])
