"""The thread beside the training."""

from __future__ import annotations

import sys
import threading
from unittest import mock

import pytest

from chainermn_train.background_thread import SWITCH_INTERVAL_SECONDS, BackgroundThread


def test_a_thread_hands_over_its_error_while_threads_switch_often():
    go = threading.Event()

    def work(wait_requested):
        go.wait(60)
        assert wait_requested.wait(60)
        raise ValueError("planted")

    tasks = [BackgroundThread(work), BackgroundThread(work)]
    for task in tasks:
        task.start()
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_SECONDS
    go.set()
    for task in tasks:
        assert str(task.wait()) == str(task.wait()) == "planted"


@pytest.mark.parametrize("starts", [False, True])
def test_what_has_no_thread_is_done_by_who_waits(starts):
    """It was not started, or can't be."""
    done = []

    def work(wait_requested):
        done.append((wait_requested.is_set(), threading.current_thread()))

    task = BackgroundThread(work)
    none_left = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        if starts:
            task.start()
    assert not done
    assert task.wait() is task.wait() is None
    assert done == [(True, threading.main_thread())]


def test_what_a_handler_raises_while_a_thread_starts_is_raised_and_the_thread_waited_for(
    monkeypatch,
):
    start, go, done = threading.Thread.start, threading.Event(), []

    def interrupted(thread):
        start(thread)
        raise RuntimeError("planted")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    task = BackgroundThread(lambda wait_requested: done.append(go.wait(60)))
    with pytest.raises(RuntimeError, match="planted"):
        task.start()
    go.set()
    assert task.wait() is None
    assert done == [True]
