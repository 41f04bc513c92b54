"""The thread beside the training."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from chainermn_train.background_thread import (
    SWITCH_INTERVAL_SECONDS,
    BackgroundThread,
    threads_may_use_mpi,
)


def test_a_thread_hands_over_its_error_while_threads_switch_often():
    go = threading.Event()

    def work(wait_requested):
        go.wait(60)
        assert wait_requested.wait(60)
        raise ValueError("planted")

    task = BackgroundThread(work)
    task.start()
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_SECONDS
    go.set()
    assert str(task.wait()) == "planted"
    assert str(task.wait()) == "planted"


def test_what_has_no_thread_is_done_by_who_waits(monkeypatch):
    """There can't be another one."""
    done = []

    def work(wait_requested):
        done.append((wait_requested.is_set(), threading.current_thread()))

    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    task = BackgroundThread(work)
    with pytest.raises(RuntimeError, match="can't start"):
        task.start()
    assert not done
    assert task.wait() is task.wait() is None
    assert done == [(True, threading.main_thread())]


def test_threads_may_not_use_an_mpi_without_thread_multiple(monkeypatch):
    mpi = SimpleNamespace(Query_thread=lambda: 2, THREAD_MULTIPLE=3)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    with pytest.warns(RuntimeWarning, match="MPI_THREAD_MULTIPLE"):
        assert not threads_may_use_mpi()
