"""What a step that all ranks take together notices: an exception within, and nothing after it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn_comm.messaging import process_group

pytestmark = pytest.mark.world


def group_of(world):
    handshake = process_group.Handshake(world)
    topology = process_group.Topology.of(range(world.size))
    return process_group.ProcessGroup(world, handshake, 0, topology, lambda: None)


def test_what_is_raised_in_a_step_interrupts_it(world):
    group = group_of(world)
    with (
        pytest.raises(KeyboardInterrupt),
        group.call("outer"),
        group.call("inner"),
    ):
        raise KeyboardInterrupt
    assert group.handshake.interruptions == [
        "inner was interrupted on this rank (KeyboardInterrupt: )"
    ]


def test_a_signal_between_a_step_and_its_end_does_not(world):
    group = group_of(world)
    step = group.call("a step")
    step.__enter__()
    # As a handler's exception leaves it, which is raised before the end is called.
    del step
    assert group.handshake.interruptions == []
    with ThreadPoolExecutor(1) as thread:  # whose turn it is now
        assert thread.submit(group.call("another").__enter__).result()
