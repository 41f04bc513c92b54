"""The thread beside the training."""

from __future__ import annotations

import sys
import threading

from chainermn_train.background_thread import BackgroundThread


def test_a_thread_hands_over_its_error_and_restores_the_interval():
    interval, go = sys.getswitchinterval(), threading.Event()

    def work(wait_requested):
        go.wait(60)
        assert wait_requested.wait(60)
        raise ValueError("planted")

    tasks = [BackgroundThread(work), BackgroundThread(work)]
    assert sys.getswitchinterval() < interval
    go.set()
    for task in tasks:
        assert str(task.wait()) == str(task.wait()) == "planted"
    assert sys.getswitchinterval() == interval


def test_work_without_a_thread_is_done_at_once():
    done = []

    def work(wait_requested):
        done.append((wait_requested.is_set(), threading.current_thread()))

    task = BackgroundThread(work, False)
    assert done == [(True, threading.main_thread())]
    assert task.wait() is None


def test_waiting_gives_up_after_its_time():
    go, done = threading.Event(), []
    task = BackgroundThread(lambda wait_requested: done.append(go.wait(60)))
    assert task.wait(0.01) is None
    assert not done
    go.set()
    task.wait()
    assert done == [True]
