"""What communicators write where CHAINERMN_TRACE names a folder, and what can go wrong there."""

from __future__ import annotations

import os
import threading
import time
import warnings

import numpy as np
import pytest

from chainermn_comm import RankMismatchError, create_communicator
from chainermn_comm.trace import TRACE_VARIABLE, flush_trace
from tests.support.models import with_grads
from tests.support.topologies import by_name
from tests.support.tracing import calls, events

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2, 3), pytest.mark.ranks(3)]


def test_every_verb_is_traced(world, folder):
    with create_communicator("naive") as comm:
        x, root = np.arange(6, dtype="f4"), world.size - 1
        comm.bcast(x, root=root)
        comm.gather(x, root)
        comm.allgather(x)
        comm.alltoall((x,) * world.size)
        comm.scatter((x,) * world.size)
        comm.allreduce(x)
        comm.multi_node_mean(x)
        comm.bcast_obj("text")
        comm.gather_obj(1)
        comm.allgather_obj(1)
        comm.alltoall_obj([1] * world.size)
        comm.scatter_obj([1] * world.size)
        comm.allreduce_obj(1)
        model = with_grads(a=np.ones((3, 5), "f4"), b=np.ones(7, "f4"))
        comm.bcast_data(model)
        comm.multi_node_mean_grad(model)
        comm.allreduce_grad(model)
        if world.rank < 2 <= world.size:
            for send, recv in ((comm.send, comm.recv), (comm.send_obj, comm.recv_obj)):
                (send(x, 1, 7) if world.rank == 0 else recv(0, 7))
    found = calls(folder, world.rank)
    names = [call["name"] for call in found]
    arrays = ["bcast", "gather", "allgather", "alltoall", "scatter", "allreduce", "multi_node_mean"]
    objects = ["bcast_obj", "gather_obj", "allgather_obj", "alltoall_obj", "scatter_obj"]
    verbs = [*arrays, *objects, "allreduce_obj", "bcast_data", "allreduce_grad", "allreduce_grad"]
    messages = (["send", "send_obj"], ["recv", "recv_obj"])[world.rank] if world.rank < 2 else []
    assert names == [*verbs, *(messages if world.size > 1 else []), "finalize"]
    by_name = {call["name"]: call["args"] for call in found}
    assert by_name["bcast"]["root"] == by_name["gather"]["root"] == root
    assert by_name["allreduce"]["bytes"] == by_name["multi_node_mean"]["bytes"] == 24
    assert by_name["allreduce_grad"]["bytes"] == 4 * (15 + 7)
    numbers = [call["args"]["sequence"] for call in found if call["cat"] == "collective"]
    assert numbers == sorted(set(numbers))
    for call in found:
        assert (call["pid"], call["tid"]) == (world.rank, 0)
        assert call["dur"] >= call["args"].get("waited", 0) >= 0
        assert "error" not in call["args"]
        if call["cat"] == "message":
            assert call["args"]["tag"] == 7
            assert call["args"]["peer"] == 1 - world.rank
    starts = [call["ts"] for call in found]
    assert starts == sorted(starts)


@pytest.mark.parametrize("name", by_name("naive", "hierarchical"))
def test_gradients_of_every_communicator_are_traced(world, folder, name):
    with create_communicator(name) as comm:
        for size in (10, 300_000):
            model = with_grads(w=np.full(size, world.rank, "f4"))
            comm.allreduce_grad(model)
            assert (model["w"].grad == (world.size - 1) / 2).all()
    sizes = [c["args"]["bytes"] for c in calls(folder, world.rank) if c["name"] == "allreduce_grad"]
    assert sizes == [40, 1_200_000]


def test_calls_wait_for_the_rank_that_is_late(world, folder):
    with create_communicator("naive") as comm:
        comm.bcast_obj(0)
        late = world.rank == world.size - 1
        if late:  # the others are about to wait
            for other in range(world.rank):
                world.recv(source=other)
            time.sleep(0.3)
        else:
            world.send(None, world.size - 1)
        comm.bcast_obj(0)
    waited = calls(folder, world.rank)[1]["args"]["waited"] / 1e6
    assert late or waited > 0.05


def test_errors_are_noted_and_the_next_call_is_traced_again(world, folder):
    with create_communicator("naive") as comm:
        with pytest.raises(TypeError):
            comm.allreduce(np.array(["text"]))
        with pytest.raises(ValueError, match="dest"):
            comm.send(1, 99)  # before anything is waited for
        comm.allreduce(1.0)
    found = calls(folder, world.rank)
    errors = [(call["name"], call["args"].get("error")) for call in found]
    assert errors == [("allreduce", "TypeError"), ("allreduce", None), ("finalize", None)]


class Unreadable:
    def __setstate__(self, state):
        raise ValueError(state)


@pytest.mark.sizes(2)
def test_the_errors_of_messages_are_noted_too(world, folder):
    unreadable = Unreadable()
    unreadable.state = "some"  # type: ignore[attr-defined]
    with create_communicator("naive") as comm:
        if world.rank == 0:
            comm.send_obj("text", 1)
            comm.send(np.ones(2), 1)
            comm.send_obj(unreadable, 1)
        else:
            for receive, error in (
                (comm.recv, TypeError),
                (comm.recv_noted, TypeError),
                (comm.recv_obj, ValueError),
            ):
                with pytest.raises(error):
                    receive(0)
    found = [call["args"].get("error") for call in calls(folder, world.rank)]
    errors = ["TypeError", "TypeError", "ValueError"] if world.rank else [None] * 3
    assert found == [*errors, None]


def test_parts_of_a_communicator_have_names_and_members(world, folder):
    with create_communicator("naive") as comm, comm.split(world.rank % 2, -world.rank) as part:
        part.allreduce(1.0)
    told = {
        event["args"]["communicator"]: event["args"]
        for event in events(folder, world.rank)
        if event["name"] == "chainermn communicator"
    }
    whole, mine = told.values()
    assert whole["ranks"] == list(range(world.size))
    assert mine["ranks"] == [r for r in reversed(range(world.size)) if r % 2 == world.rank % 2]
    assert mine["ranks"][mine["rank"]] == world.rank
    named = {c["name"]: c["args"]["communicator"] for c in calls(folder, world.rank)}
    assert named["allreduce"] == mine["communicator"]
    assert named["split"] == whole["communicator"]
    everywhere = world.allgather((mine["communicator"], mine["ranks"]))
    assert len({name for name, _ in everywhere}) == len({tuple(r) for _, r in everywhere})
    runs = world.allgather({event["run"] for event in told.values()})
    assert len(set().union(*runs)) == 1


def test_clocks_are_compared_at_the_start_now_and_then_and_at_the_end(world, folder):
    with create_communicator("naive") as comm:
        while comm._record.sequence < 256:
            comm.bcast_obj(0)
    found = [e["args"] for e in events(folder, world.rank) if e["name"] == "chainermn clock"]
    assert len(found) == 1 + 3 + 1  # 64, 128, 256
    zeros = [e["args"]["zero"] for e in events(folder, world.rank) if e["name"] == "chainermn"]
    for one in found:
        # All processes of a machine share the clock.
        assert abs(one["ahead"] - zeros[0]) <= one["round_trip"] / 2 + 1
        assert (one["round_trip"] == 0) == (world.rank == 0)
    assert [one["at"] for one in found] == sorted(one["at"] for one in found)


def test_other_threads_have_rows_of_their_own(world, folder):
    with create_communicator("naive") as comm:
        thread = threading.Thread(target=comm.bcast_obj, args=(0,))
        thread.start()
        thread.join()
        comm.bcast_obj(0)
    assert [call["tid"] for call in calls(folder, world.rank)] == [1, 0, 0]
    named = {e["tid"] for e in events(folder, world.rank) if e["name"] == "thread_name"}
    assert named == {0, 1}


def test_a_folder_that_cannot_be_written_is_said_by_that_rank_alone(world, folder, monkeypatch):
    bad = world.rank == world.size - 1
    if bad:
        monkeypatch.setenv(TRACE_VARIABLE, "/proc/nowhere")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with create_communicator("naive") as comm:
            assert comm.allreduce(1.0) == world.size
    texts = [str(one.message) for one in said if TRACE_VARIABLE in str(one.message)]
    assert len(texts) == bad
    assert all(f"rank {world.rank}: no trace is written" in text for text in texts)
    world.Barrier()
    assert len(list(folder.glob("*.json"))) == world.size - 1


def test_the_same_warning_as_an_error_keeps_nobody_waiting(world, folder, monkeypatch):
    if world.rank == 0:
        monkeypatch.setenv(TRACE_VARIABLE, "/proc/nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with create_communicator("naive") as comm:
            assert comm.allreduce(1.0) == world.size


def test_forked_children_write_nothing(world, folder):
    with create_communicator("naive") as comm:
        comm.allreduce(1.0)
        pid = os.fork()
        if pid == 0:
            flush_trace()
            comm._record.leave()
            os._exit(0)
        os.waitpid(pid, 0)
        comm.allreduce(1.0)
    names = [call["name"] for call in calls(folder, world.rank)]
    assert names == ["allreduce", "allreduce", "finalize"]


def test_without_the_variable_no_line_of_it_is_passed(world, folder, monkeypatch):
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv(TRACE_VARIABLE)
        else:
            monkeypatch.setenv(TRACE_VARIABLE, value)
        with create_communicator("naive") as comm:
            for used in (comm._record, comm._group.agreement):
                assert "trace" not in type(used).__module__
    assert not folder.exists()


@pytest.mark.sizes(2, 3)
def test_ranks_that_disagree_are_told(world, folder, monkeypatch):
    if world.rank == 1:
        monkeypatch.delenv(TRACE_VARIABLE)
    with pytest.raises(RankMismatchError, match=f"{TRACE_VARIABLE}.*unset on rank 1"):
        create_communicator("naive")
