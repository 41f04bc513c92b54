"""The thread beside the training."""

from __future__ import annotations

import sys
import threading

import pytest

from chainermn_train.background_thread import SWITCH_INTERVAL_SECONDS, BackgroundThread


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
