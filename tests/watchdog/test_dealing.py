"""Ranks that wait for their examples are seen to."""

from __future__ import annotations

import numpy as np

from chainermn_train import dealing
from tests.support.watchdog import WORLD, noted


def test_the_wait_for_scattered_examples_is_noted():
    class Gate:
        def wait_until_open(self):
            seen.extend(noted())

    class Comm:
        def recv(self, source, tag):
            return np.array([dealing._NONE_COMES])

    noted()  # from now on there is where to note it
    seen = []
    assert dealing._receive(Comm(), 0, Gate(), None, [], 1) is None
    waits = [call for call in seen if call.waits]
    assert [(call.operation, call.communicator) for call in waits] == [("scatter_dataset", WORLD)]
