"""Work that another thread does is known as such; meanwhile users' arrays don't go by NCCL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn_comm.work import in_background

pytestmark = pytest.mark.world


@pytest.mark.parametrize("is_dropped", [False, True])
def test_work_through_a_channel_is_in_the_background_until_the_main_thread_has_it(
    naive, is_dropped
):
    in_background.clear()
    with naive.split(0, naive.rank) as channel, ThreadPoolExecutor(1) as thread:
        reducer = naive.make_reducer()
        reducer.agree()
        reducer.start().wait()
        assert not in_background
        reducer = naive.make_reducer(channel=channel)
        reducer.agree()
        work = reducer.start()
        assert work in in_background
        thread.submit(work.wait).result()
        thread.submit(work.assign).result()
        assert work in in_background
        if is_dropped:
            del work
        else:
            work.assign()
        assert not in_background
