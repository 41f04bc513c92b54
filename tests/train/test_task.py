"""The thread beside the training."""

from __future__ import annotations

import sys
import threading

from chainermn_train.task import Task


def test_a_task_hands_over_its_error_and_restores_the_interval():
    interval, go = sys.getswitchinterval(), threading.Event()

    def work(hurry):
        go.wait(60)
        assert hurry.wait(60)
        raise ValueError("planted")

    tasks = [Task(work), Task(work)]
    assert sys.getswitchinterval() < interval
    go.set()
    for task in tasks:
        assert str(task.wait()) == str(task.wait()) == "planted"
    assert sys.getswitchinterval() == interval


def test_a_task_without_a_thread_is_done_at_once():
    done = []
    task = Task(lambda hurry: done.append((hurry.is_set(), threading.current_thread())), False)
    assert done == [(True, threading.main_thread())]
    assert task.wait() is None


def test_waiting_gives_up_after_its_time():
    go, done = threading.Event(), []
    task = Task(lambda hurry: done.append(go.wait(60)))
    assert task.wait(0.01) is None
    assert not done
    go.set()
    task.wait()
    assert done == [True]
