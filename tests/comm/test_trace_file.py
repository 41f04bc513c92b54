"""How a rank's trace gets into its file: when it is written, and a full or hanging disk."""

from __future__ import annotations

import os
import re
import select
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from chainermn_comm import create_communicator
from chainermn_comm.trace import file
from tests.support.jobs.processes import soon
from tests.support.tools.tracing import calls

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2, 3), pytest.mark.ranks(3)]


def own_file() -> file.TraceFile:
    assert file._file is not None
    return file._file


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings within, once it is left."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in said]


def test_calls_are_written_together(world, folder, monkeypatch):
    monkeypatch.setattr(file, "FLUSH_SECONDS", 3600.0)
    reading, writing = os.pipe()
    with create_communicator("naive") as comm:
        (path,) = folder.glob(f"*.rank{world.rank}.json")
        assert soon(path.read_text)  # its beginning
        own_file()._descriptor = writing
        for _ in range(300):
            comm.bcast_obj(0)
        assert not select.select([reading], [], [], 0)[0]
        own_file().end()
        assert os.read(reading, 1 << 20).count(b'"name":"bcast_obj"') == 300
    for each in (reading, writing):
        os.close(each)


def test_a_call_is_written_soon(world, folder):
    with create_communicator("naive") as comm:
        comm.bcast_obj(0)
        (path,) = folder.glob(f"*.rank{world.rank}.json")
        assert soon(lambda: "bcast_obj" in path.read_text())


def test_where_the_disk_is_too_slow_memory_is_bounded_and_calls_are_dropped(
    world, folder, monkeypatch
):
    monkeypatch.setattr(file, "FLUSH_SECONDS", 3600.0)
    monkeypatch.setattr(file, "MOST_WAITING", 100)
    with create_communicator("naive") as comm:
        for _ in range(300):
            comm.bcast_obj(0)
        with warned() as texts:
            own_file().end()
    (text,) = texts
    missing = re.search(r"(\d+) calls are missing: the disk is too slow", text)
    assert missing is not None, text
    kept = [call for call in calls(folder, world.rank) if call["name"] == "bcast_obj"]
    assert 0 < len(kept) <= 100
    assert len(kept) + int(missing[1]) == 300


def test_a_full_disk_ends_the_trace_and_not_the_training(world, folder):
    with create_communicator("naive") as comm, warned() as texts:
        comm.allreduce(1.0)
        assert soon(lambda: not own_file()._waiting)
        if world.rank == 0:
            own_file()._descriptor = os.open("/dev/full", os.O_WRONLY)
        assert comm.allreduce(1.0) == world.size
        assert soon(lambda: not own_file()._waiting)
        assert comm.allreduce(1.0) == world.size
        own_file().end()
    assert len(texts) == (world.rank == 0)
    assert all("No space left" in text and "rank 0" in text for text in texts)
    names = [call["name"] for call in calls(folder, world.rank)]
    assert names == ["allreduce"] * (1 if world.rank == 0 else 3)


def test_a_disk_that_hangs_keeps_neither_the_training_nor_its_end(
    world, folder, monkeypatch
):
    monkeypatch.setattr(file, "END_SECONDS", 0.1)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, bytes(1 << 16)):
            pass
    os.set_blocking(writing, True)
    with create_communicator("naive") as comm:
        assert soon(lambda: not own_file()._waiting)
        own_file()._descriptor = writing
        for _ in range(300):
            comm.bcast_obj(0)
        with warned() as texts:
            own_file().end()
    assert "calls are missing: the disk is too slow" in texts[0]
    os.close(reading)  # and the thread ends
    own_file()._thread.join()
    os.close(writing)
