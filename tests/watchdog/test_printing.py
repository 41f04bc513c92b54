"""Where a monitor prints."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager

import pytest

from chainermn_comm.watchdog.monitor import printing
from tests.support.watchdog.records import clock


@contextmanager
def printing_to(file):
    """A process that has this file as its standard error."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stderr=file) as process:
        yield process.pid


@pytest.mark.ci
def test_a_launcher_that_reads_nothing_keeps_the_end_waiting_once(monkeypatch):
    monkeypatch.setattr(printing, "PRINT_SECONDS", 0.5)
    reading, writing = os.pipe()
    with printing_to(writing) as stopped:
        os.close(writing)
        begun = clock()
        printing.print_for([stopped, stopped], "words" * 100_000)
        assert 0.5 <= clock() - begun < 5.0
    os.close(reading)


def test_a_text_goes_to_the_first_process_where_it_can_be_read():
    deaf, unread = os.pipe()
    reading, writing = os.pipe()
    with printing_to(unread) as first, printing_to(writing) as second:
        os.close(deaf)
        os.close(unread)
        os.close(writing)
        printing.print_for([first, second], "words", b"event\n")
    with open(reading) as file:
        assert file.read() == "event\nwords"
