"""What communicators write where CHAINERMN_TRACE names a folder, and what can go wrong there."""

from __future__ import annotations

import os
import threading
import time
import warnings
from operator import itemgetter

import numpy as np
import pytest

from chainermn_comm import RankMismatchError, create_communicator
from chainermn_comm.trace import TRACE_VARIABLE
from tests.support.tools.tracing import (
    calls,
    clock_at_speed,
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
    x, root = np.arange(6, dtype="f4"), world.size - 1
    model = with_grads(a=np.ones((3, 5), "f4"), b=np.ones(7, "f4"))
    methods = []
    with create_communicator(name) as comm:
        for names, *arguments in [
            ("bcast", x, None, root),
            ("gather", x, root),
            ("allgather allreduce multi_node_mean", x),
            ("alltoall scatter", (x,) * world.size),
            ("bcast_obj gather_obj allgather_obj allreduce_obj", 1),
            ("alltoall_obj scatter_obj", [1] * world.size),
            ("bcast_data allreduce_grad", model),
        ]:
            for method in names.split():
                getattr(comm, method)(*arguments)
                methods.append(method)
        comm.multi_node_mean_grad(model)
        check_mean(comm, 300_000)
        if world.rank < 2 <= world.size:
            for send, recv in ((comm.send, comm.recv), (comm.send_obj, comm.recv_obj)):
                (send(x, 1, 7) if world.rank == 0 else recv(0, 7))
    found = calls(folder, world.rank)
    methods += ["allreduce_grad"] * 2
    messages = (["send", "send_obj"], ["recv", "recv_obj"], [])[
        world.rank if world.size > 1 else 2
    ]
    assert [call["name"] for call in found] == [*methods, *messages, "finalize"]
    args = {call["name"]: call["args"] for call in found}
    assert args["bcast"]["root"] == args["gather"]["root"] == root
    assert args["allreduce"]["bytes"] == args["multi_node_mean"]["bytes"] == 24
    sizes = [
        call["args"]["bytes"] for call in found if call["name"] == "allreduce_grad"
    ]
    assert sizes == [4 * (15 + 7), 4 * (15 + 7), 4 * 300_000]
    numbers = [
        call["args"]["sequence"] for call in found if call["cat"] == "collective"
    ]
    assert numbers == sorted(set(numbers))
    for call in found:
        assert (call["pid"], call["tid"]) == (world.rank, 0)
        assert call["dur"] >= call["args"].get("waited", 0) >= 0
        assert "error" not in call["args"]
        if call["cat"] == "message":
            assert call["args"]["tag"] == 7
            assert call["args"]["peer"] == 1 - world.rank
    assert found == sorted(found, key=itemgetter("ts"))


def test_calls_wait_for_the_rank_that_is_late(world, folder):
    with create_communicator("naive") as comm:
        comm.bcast_obj(0)
        first = Neighbour(world)
        if world.rank == world.size - 1 > 0:
            first.seen_waiting()
            time.sleep(0.1)
        comm.bcast_obj(0)
    waited = calls(folder, world.rank)[1]["args"]["waited"] / 1e6
    assert waited >= (0.1 if world.rank == 0 < world.size - 1 else 0)


def test_errors_are_recorded_and_the_next_call_is_traced_again(world, folder):
    with create_communicator("naive") as comm:
        with pytest.raises(TypeError):
            comm.allreduce(np.array(["text"]))
        with pytest.raises(ValueError, match="dest"):
            comm.send(1, 99)  # before anything is waited for
        comm.allreduce(1.0)
    found = calls(folder, world.rank)
    errors = [(call["name"], call["args"].get("error")) for call in found]
    assert errors == [
        ("allreduce", "TypeError"),
        ("allreduce", None),
        ("finalize", None),
    ]


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.sizes(2)
def test_the_errors_of_messages_are_recorded_too(world, folder):
    with create_communicator("naive") as comm:
        if world.rank == 0:
            comm.send_obj("text", 1)
            comm.send(np.ones(2), 1)
            comm.send_obj(Unreadable(), 1)
        for receive in (comm.recv, comm.recv_with_metadata, comm.recv_obj)[
            : 3 * world.rank
        ]:
            with pytest.raises((TypeError, ValueError)):
                receive(0)
    found = [call["args"].get("error") for call in calls(folder, world.rank)]
    errors = ["TypeError", "TypeError", "ValueError"] if world.rank else [None] * 3
    assert found == [*errors, None]


def test_parts_of_a_communicator_have_names_and_members(world, folder):
    with (
        create_communicator("naive") as comm,
        comm.split(world.rank % 2, -world.rank) as part,
    ):
        part.allreduce(1.0)
    told = [
        e for e in events(folder, world.rank) if e["name"] == "chainermn communicator"
    ]
    whole, mine = (event["args"] for event in told)
    assert whole["communicator"] != mine["communicator"]
    assert whole["ranks"] == list(range(world.size))
    assert mine["ranks"] == [
        r for r in reversed(range(world.size)) if r % 2 == world.rank % 2
    ]
    assert mine["ranks"][mine["rank"]] == world.rank
    named = {c["name"]: c["args"]["communicator"] for c in calls(folder, world.rank)}
    assert named["allreduce"] == mine["communicator"]
    assert named["split"] == whole["communicator"]
    everywhere = world.allgather((mine["communicator"], mine["ranks"]))
    assert len({name for name, _ in everywhere}) == len(
        {tuple(r) for _, r in everywhere}
    )
    runs = world.allgather({event["args"]["run"] for event in told})
    assert len(set().union(*runs)) == 1


def test_clocks_are_compared_at_the_start_now_and_then_and_at_the_end(world, folder):
    with create_communicator("naive") as comm:
        for _ in range(300):
            comm.bcast_obj(0)
    found = [
        e["args"] for e in events(folder, world.rank) if e["name"] == "chainermn clock"
    ]
    last = max(call["args"].get("sequence", 0) for call in calls(folder, world.rank))
    assert last > 256
    assert len(found) == 1 + sum(2**power <= last for power in range(6, 20)) + 1
    zeros = [
        e["args"]["zero"]
        for e in events(folder, world.rank)
        if e["name"] == "chainermn"
    ]
    for one in found:
        # All processes of a machine share the clock.
        assert abs(one["ahead"] - zeros[0]) <= one["round_trip"] / 2 + 1
        assert (one["round_trip"] == 0) == (world.rank == 0)
    assert [one["at"] for one in found] == sorted(one["at"] for one in found)


def test_the_error_of_clocks_that_drift_apart_while_they_are_compared_is_told(
    world, folder
):
    with clock_at_speed(1 + 9 * world.rank), create_communicator("naive"):
        pass
    found = [
        e["args"] for e in events(folder, world.rank) if e["name"] == "chainermn clock"
    ]
    assert found
    for one in found:
        assert (one["round_trip"] > 0) == (world.rank > 0)


def test_other_threads_have_rows_of_their_own(world, folder):
    with create_communicator("naive") as comm:
        thread = threading.Thread(target=comm.bcast_obj, args=(0,))
        thread.start()
        thread.join()
        comm.bcast_obj(0)
    assert [call["tid"] for call in calls(folder, world.rank)] == [1, 0, 0]


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_folder_that_cannot_be_written_is_said_by_that_rank_alone_and_keeps_nobody_waiting(
    world, folder, monkeypatch, action
):
    bad = world.rank == (world.size - 1 if action == "always" else 0)
    if bad:
        monkeypatch.setenv(TRACE_VARIABLE, "/proc/nowhere")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter(action)
        with create_communicator("naive") as comm:
            assert comm.allreduce(1.0) == world.size
    texts = [str(one.message) for one in said if TRACE_VARIABLE in str(one.message)]
    assert len(texts) == (bad and action == "always")
    assert all(f"rank {world.rank}: no trace is written" in text for text in texts)
    world.Barrier()
    assert len(list(folder.glob("*.json"))) == world.size - 1


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
        if world.rank == 0:
            write_to("/dev/full")
        for _ in range(2):
            assert comm.allreduce(1.0) == world.size
    texts = [str(one.message) for one in said]
    assert len(texts) == (world.rank == 0)
    assert all("No space left" in text and "rank 0" in text for text in texts)
    names = [call["name"] for call in calls(folder, world.rank)]
    ends = [] if world.rank == 0 else ["allreduce", "allreduce", "finalize"]
    assert names == ["allreduce", *ends]


def test_without_the_variable_no_line_of_it_is_passed(world, folder, monkeypatch):
    for change, *value in (monkeypatch.setenv, ""), (monkeypatch.delenv,):
        change(TRACE_VARIABLE, *value)
        with create_communicator("naive") as comm:
            assert not is_traced(comm)
    assert not folder.exists()


@pytest.mark.sizes(2, 3)
def test_ranks_that_disagree_are_told(world, folder, monkeypatch):
    if world.rank == 1:
        monkeypatch.delenv(TRACE_VARIABLE)
    with pytest.raises(RankMismatchError, match=f"{TRACE_VARIABLE}.*unset on rank 1"):
        create_communicator("naive")
