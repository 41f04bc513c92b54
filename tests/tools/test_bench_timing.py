"""Calls are timed."""

from chainermn_tools.bench.timing import time_call


def test_who_has_nothing_to_call_takes_no_time():
    assert time_call(None, None) == 0
