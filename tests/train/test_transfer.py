"""Ranks that wait for their examples are seen to."""

from __future__ import annotations

import pickle

import numpy as np

from chainermn_train.datasets import transfer
from tests.support.watchdog import WORLD, recorded_calls


def test_the_wait_for_scattered_examples_is_recorded():
    class File:
        def wait_until_unlocked(self):
            seen.extend(recorded_calls())

    class Comm:
        def recv(self, source, tag):
            return messages.pop(0)

    recorded_calls()  # from now on there is where to record it
    seen = []
    messages = [np.frombuffer(pickle.dumps([1, 2]), np.uint8), np.array([True])]
    assert transfer._receive(Comm(), 0, File(), [], True) == [1, 2]
    assert not messages
    waits = [call for call in seen if call.waits]
    assert [(call.operation, call.communicator) for call in waits] == [("scatter_dataset", WORLD)]
