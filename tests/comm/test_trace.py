"""What communicators write where CHAINERMN_TRACE names a folder, and what can go wrong there."""

from __future__ import annotations

import os
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import numpy as np
import pytest

from chainermn_comm import RankMismatchError, create_communicator
from chainermn_comm.trace import TRACE_VARIABLE
from tests.comm.methods import GIVEN, x
from tests.comm.tracing import (
    calls,
    events,
    is_traced,
    note_message,
    write_to,
)
from tests.support.watchdog.records import Neighbour
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.topologies import by_name

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2, 3), pytest.mark.ranks(3)]


@pytest.mark.parametrize("name", by_name("naive", "hierarchical"))
def test_every_method_is_traced(world, folder, name):
    with create_communicator(name) as comm:
        for method, given in GIVEN.items():
            getattr(comm, method)(*given)
        check_mean(comm, 300_000)
    found = calls(folder, world.rank)
    methods = [*GIVEN, "allreduce_grad", "finalize"]
    assert [call["name"] for call in found] == methods
    args = {call["name"]: call["args"] for call in found}
    assert args["bcast"]["root"] == world.size - 1
    assert args["gather"]["root"] == 0
    assert args["allreduce"]["bytes"] == x.nbytes
    assert args["multi_node_mean"]["bytes"] == x.nbytes
    assert args["allreduce_grad"]["bytes"] == 4 * 300_000
    assert found == sorted(found, key=lambda call: call["args"]["sequence"])
    end = 0
    for call in found:
        assert call["cat"] == "collective"
        assert call["pid"] == world.rank
        assert call["tid"] == 0
        assert call["ts"] >= end
        assert call["dur"] >= call["args"].get("waited", 0) >= 0
        end = call["ts"]


@pytest.mark.sizes(2, 3)
def test_calls_wait_for_the_rank_that_is_late(world, folder):
    with create_communicator("naive") as comm:
        comm.bcast_obj(0)
        first = Neighbour(world)
        if world.rank == world.size - 1:
            first.seen_waiting()
            time.sleep(0.1)
        comm.bcast_obj(0)
    waited = calls(folder, world.rank)[1]["args"]["waited"] / 1e6
    assert world.rank > 0 or waited >= 0.1


def named(folder, rank, name):
    """What a rank's events of that name tell."""
    return [event["args"] for event in events(folder, rank) if event["name"] == name]


@pytest.mark.sizes(2)
def test_messages_and_errors_are_recorded(world, folder):
    with create_communicator("naive") as comm:
        with pytest.raises(ValueError, match="dest"):
            comm.send(1, 99)  # before anything is waited for
        if world.rank == 0:
            comm.send(x, 1, 7)
            name = "send"
            error = None
        else:
            with pytest.raises(TypeError, match="sent with send"):
                comm.recv_obj(0, 7)
            name = "recv_obj"
            error = "TypeError"
        with pytest.raises(TypeError):
            comm.allreduce(np.array(["text"]))
        try:
            raise KeyError
        except KeyError:
            comm.allreduce(1.0)
    message, allreduce, in_handler, _ = calls(folder, world.rank)
    assert "error" not in in_handler["args"]
    assert message["cat"] == "message"
    assert message["name"] == name
    args = message["args"]
    assert args["tag"] == 7
    assert args["peer"] == 1 - world.rank
    assert args.get("error") == error
    assert allreduce["args"]["error"] == "TypeError"


def test_parts_of_a_communicator_have_names_and_members(world, folder):
    color = world.rank % 2
    with create_communicator("naive") as comm, comm.split(color, -world.rank) as part:
        part.allreduce(1.0)
    whole, mine = named(folder, world.rank, "chainermn communicator")
    assert whole["ranks"] == list(range(world.size))
    members = list(range(color, world.size, 2))[::-1]
    assert mine["ranks"] == members
    assert mine["ranks"][mine["rank"]] == world.rank
    split, allreduce, *_ = calls(folder, world.rank)
    assert split["args"]["communicator"] == whole["communicator"]
    assert allreduce["args"]["communicator"] == mine["communicator"]
    parts = world.allgather(mine["communicator"])
    found = len({*parts, whole["communicator"]})
    assert found == 1 + min(world.size, 2)
    assert set(world.allgather(mine["run"])) == {whole["run"]}


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_folder_that_cannot_be_written_is_said_by_that_rank_and_keeps_nobody_waiting(
    world, folder, monkeypatch, action
):
    bad = world.rank == world.size - 1
    if bad:
        monkeypatch.setenv(TRACE_VARIABLE, "/proc/nowhere")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter(action)
        with create_communicator("naive") as comm:
            assert comm.allreduce(1.0) == world.size
    told = [f"rank {world.rank}: no trace is written" in str(it.message) for it in said]
    assert told.count(True) == (bad and action == "always")
    world.Barrier()
    found = len(list(folder.glob("*.json")))
    assert found == world.size - 1


def test_forked_children_write_nothing(world, folder):
    with create_communicator("naive") as comm:
        comm.allreduce(1.0)
        pid = os.fork()
        if pid == 0:
            note_message(comm)
            os._exit(0)
        os.waitpid(pid, 0)
        comm.allreduce(1.0)
    names = [call["name"] for call in calls(folder, world.rank)]
    assert names == ["allreduce", "allreduce", "finalize"]


def test_a_full_disk_ends_the_trace_and_not_the_training(world, folder):
    with (
        create_communicator("naive") as comm,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        comm.allreduce(1.0)
        write_to("/dev/full")
        for _ in range(2):
            assert comm.allreduce(1.0) == world.size
    (told,) = said
    text = rf"rank {world.rank}.*No space left"
    assert re.search(text, str(told.message))
    found = [call["name"] for call in calls(folder, world.rank)]
    assert found == ["allreduce"]


@pytest.mark.parametrize("value", ["", None])
def test_without_the_variable_no_line_of_it_is_passed(
    world, folder, monkeypatch, value
):
    monkeypatch.setenv(TRACE_VARIABLE, value or "")
    if value is None:
        monkeypatch.delenv(TRACE_VARIABLE)
    with create_communicator("naive") as comm:
        assert not is_traced(comm)
    assert not folder.exists()


@pytest.mark.sizes(2, 3)
def test_ranks_that_disagree_are_told(world, folder, monkeypatch):
    if world.rank == 1:
        monkeypatch.delenv(TRACE_VARIABLE)
    with pytest.raises(RankMismatchError, match=f"{TRACE_VARIABLE}.*unset on rank 1"):
        create_communicator("naive")


def test_other_threads_have_rows_of_their_own(world, folder):
    with create_communicator("naive") as comm, ThreadPoolExecutor(1) as thread:
        model = with_grads(w=np.ones(9, "f4"))
        thread.submit(comm.allreduce_grad, model).result()
        comm.allreduce_grad(model)
    found = [call["tid"] for call in calls(folder, world.rank)]
    assert found == [1, 0, 0]


def test_clocks_are_compared_at_the_start_now_and_then_and_at_the_end(world, folder):
    with create_communicator("naive") as comm:
        for _ in range(300):
            comm.bcast_obj(0)
    found = named(folder, world.rank, "chainermn clock")
    last = calls(folder, world.rank)[-2]["args"]["sequence"]
    between = [64 << power for power in range(10) if 64 << power <= last]
    assert len(found) == 1 + len(between) + 1 >= 5
    assert found == sorted(found, key=itemgetter("at"))
    (own,) = named(folder, world.rank, "chainermn")
    for one in found:
        # All processes of a machine share the clock.
        distance = abs(one["ahead"] - own["zero"])
        assert distance <= one["round_trip"] / 2 + 1
        assert (one["round_trip"] == 0) == (world.rank == 0)
