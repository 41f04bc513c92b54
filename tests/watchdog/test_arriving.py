"""The watch over the first communicator."""

from __future__ import annotations

import os
import threading

from chainermn_comm.watchdog import Limit
from chainermn_comm.watchdog.arriving import arriving


def test_the_first_communicators_watch_costs_no_thread_where_it_is_off():
    before = threading.active_count()
    for limit, members in ((Limit(0.0), [0, 1]), (Limit(600.0), [0])):
        with arriving(limit, members, os.abort):
            assert threading.active_count() == before
