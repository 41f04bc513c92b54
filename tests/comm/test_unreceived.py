"""A message that nobody has received is named when its communicator ends."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import chainermn_comm
from chainermn_comm.unreceived import say_unreceived_at_the_end
from tests.support.jobs import runner

SCRIPT = """
import chainermn_comm
comm = chainermn_comm.create_communicator("naive")
if comm.rank == 0:
    comm.send_obj("nobody", 1, 5)
comm.allreduce_obj(0)
"""


@pytest.mark.world
@pytest.mark.sizes(2)
@pytest.mark.parametrize("is_received", [False, True])
def test_when_it_is_finalized(world, capfd, is_received):
    with chainermn_comm.create_communicator("flat", world) as comm:
        if comm.rank == 0:
            comm.send(np.ones(3), 1, 7)
            comm.send(np.ones(3), 1, 8)
        if comm.rank == 1 and is_received:
            comm.recv(0, 7)
            comm.recv(0, 8)
    said = capfd.readouterr().err
    expected = comm.rank == 1 and not is_received
    text = (
        "rank 1 never received a message that rank 0 sent with tag 7 (2 such messages "
        "in all): call recv once for each send; "
    )
    assert (text in said) == expected
    assert bool(said) == expected


@pytest.mark.world
@pytest.mark.sizes(2)
def test_what_a_background_thread_may_still_receive_is_left_to_it(world, capfd):
    comm = world.Dup()
    with ExitStack() as resources:
        say_unreceived_at_the_end(comm, 10, [], resources)
        if comm.rank == 0:
            comm.Send(b"a part of a sum", 1, 11)
        comm.Barrier()
    if comm.rank == 1:
        assert comm.Iprobe(0, 11)
        comm.Recv(bytearray(15), 0, 11)
    assert capfd.readouterr().err == ""
    comm.Free()


def test_when_the_process_ends():
    job = runner.run_text(2, SCRIPT)
    assert "rank 1 never received a message that rank 0 sent with tag 5" in job.err
