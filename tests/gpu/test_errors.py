"""An error at any call of CUDA's or NCCL's is raised on all ranks or ends the job, in its words."""

from __future__ import annotations

import gc
import re
import time
from contextlib import suppress
from itertools import product

import numpy as np
import pytest

from chainermn_comm import CommunicationError, PeerError, create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.device_double import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from tests.support.doubles.nccl_double import NcclError
from tests.support.jobs.runner import run_text
from tests.support.oracles import verbs
from tests.support.oracles.samples import same
from tests.support.worlds.topologies import on_nodes

world_of = pytest.mark.world
WORDS = "cudaError|NCCL_ERROR"
OUT = "memcpyAsync to host"
BACK = "memcpyAsync to device"
OF_NCCL = ("allReduce", "reduce", "broadcast")

# Before ranks agree, an error of one rank is raised on all. By name.
PREPARING = {
    "flat": ("hostAlloc",),
    "pure_nccl": ("malloc", BACK),
}
# Later, what is enqueued on the current stream, and what the thread asks for.
ENQUEUED = ("compile", "launchKernel", "streamWaitEvent", "groupStart")
ENQUEUED += ("groupEnd", "work", "eventQuery", "getAsyncError")
# By name: the nodes, and calls of its own. Of nodes, those of the ranks that there are.
NAMES = {
    "flat": ((0, 0, 0, 0), ("work", "eventQuery", OUT, BACK)),
    "pure_nccl": ((0, 0, 0, 0), (*ENQUEUED, "allReduce")),
    "hierarchical": (
        (0, 0, 1, 1),
        ("reduce", "broadcast", "allReduce", "getAsyncError"),
    ),
    "two_dimensional": ((0, 0, 1, 1), ("reduce", "allReduce")),
    "non_cuda_aware": ((0, 0, 1, 1), ("reduce", "broadcast", OUT, "launchKernel")),
}
# Planted on the nodes' leaders: what they alone call, and what the others call at once,
# who would then abort a leader's work before its exchange with the other node's.
LEADERS_ONLY = [(name, "allReduce") for name in ("hierarchical", "two_dimensional")]
LEADERS_ONLY += [("non_cuda_aware", OUT), ("non_cuda_aware", "broadcast")]
RANKS = {"hierarchical": (3, 4), "two_dimensional": (4,), "non_cuda_aware": (4,)}


def ranks(name):
    """The numbers of ranks for which a name makes all of its calls."""
    sizes = RANKS.get(name, (2, 3, 4))
    return pytest.mark.sizes(*sizes), pytest.mark.ranks(sizes[0])


def error_at(call):
    if call[:5] in ("group", "getUn", "getAs", "commI") or call in OF_NCCL:
        return NcclError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: it failed")
    if call == "work":
        return ILLEGAL_ADDRESS
    return OUT_OF_MEMORY


def model_of(rank):
    return gpus.model_of([np.full(size, rank, "f4") for size in (3, 5, 2000)])


def error_of(call, *args):
    """What it raises, which is a CommunicationError; empty where it raises nothing."""
    try:
        call(*args)
    except CommunicationError as error:
        return str(error)
    return ""


@world_of
@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(name, call, marks=ranks(name))
        for name, calls in PREPARING.items()
        for call in calls
    ],
)
def test_what_fails_in_preparation_is_raised_on_all_ranks(world, double, name, call):
    """When gradients of some shapes come first, and when they come again."""
    with on_nodes(NAMES[name][0][: world.size], name) as comm:
        for _ in range(3):
            model = model_of(comm.rank)
            fails = comm.rank == world.size - 1
            if fails:
                double.plant(call, OUT_OF_MEMORY)
            with pytest.raises(CommunicationError, match="cudaErrorMemory") as caught:
                comm.allreduce_grad(model)
            assert isinstance(caught.value, PeerError) != fails
            assert double.recover()
            gpus.assert_mean(comm)


@world_of
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(name, call, marks=ranks(name))
        for name, (_, calls) in NAMES.items()
        for call in calls
    ],
)
def test_what_fails_later_is_raised_and_a_new_communicator_serves(
    world, double, name, call
):
    """It fails on all ranks, as the job may not end here, and others would wait for ever."""
    nodes = NAMES[name][0][: world.size]
    comm = on_nodes(nodes, name)
    if call != "compile":
        comm.allreduce_grad(model_of(comm.rank))
        gpus.settle(world, comm)
    models = [model_of(comm.rank) for _ in range(2)]
    if comm.intra_rank == 0 or (name, call) not in LEADERS_ONLY:
        double.plant(call, error_at(call))
    raised = error_of(comm.allreduce_grad, models[0])
    gpus.wait_for_failure(comm)
    raised += error_of(comm.allreduce_obj, 1)
    assert re.search(WORDS, raised)
    with pytest.raises(CommunicationError, match="interrupted on this rank"):
        comm.allreduce_grad(models[1])
    assert "stuck abort" not in double.calls
    world.Barrier()
    double.recover()
    comm.finalize()
    with on_nodes(nodes, name) as comm:
        gpus.assert_mean(comm)


@world_of
@pytest.mark.sizes(2, 3)
def test_what_fails_between_calls_is_printed_and_raised_by_the_next(
    world, double, capsys
):
    comm = on_nodes([0] * world.size, "pure_nccl")
    gpus.assert_mean(comm)
    gpus.settle(world, comm)
    double.delay = 40
    comm.allreduce_grad(model_of(comm.rank))
    double.nccl_fails = True
    gpus.wait_for_failure(comm)
    told = f"rank {world.rank}: averaging gradients on GPUs failed: .*NCCL_ERROR_REMOTE"
    with pytest.raises(CommunicationError, match=f"interrupted on this rank .*{told}"):
        gpus.finalize_or_hear(comm)
    printed = ""
    while not re.search(f"ChainerMN: {told}", printed):  # by the thread
        printed += capsys.readouterr().err


@world_of
@pytest.mark.sizes(2, 3)
def test_without_threads_in_mpi_each_call_waits_and_raises_itself(
    world, double, monkeypatch
):
    gpus.without_thread(monkeypatch)
    with on_nodes([0] * world.size, "pure_nccl") as comm:
        for _ in range(2):
            comm.allreduce_grad(model_of(comm.rank))
            # all is over
            for stream in double.streams:
                assert not stream.queue
        double.plant("allReduce")
        with pytest.raises(CommunicationError, match=WORDS):
            comm.allreduce_grad(model_of(comm.rank))


@world_of
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_a_block_left_by_an_exception_frees_the_gpu_and_waits_for_nobody(
    world, double, name
):
    with create_communicator(name) as other:
        comm = create_communicator(name)
        for each in (comm, other):
            gpus.means_of(each, [np.ones(3, "f4"), np.ones(5, "f4")])
        gpus.settle(world, comm)
        if world.rank == world.size - 1:  # the others never leave the block
            before = sum(double.memory.values())
            with suppress(ZeroDivisionError), comm:
                raise ZeroDivisionError
            gc.collect()
            while name != "flat" and sum(double.memory.values()) == before:
                time.sleep(1e-3)  # the thread frees it
            assert "abort" in double.calls or name == "flat"
        gpus.assert_mean(other)


# Users' arrays through host memory.
SUMS = (verbs.allreduce, verbs.reduce_scatter, verbs.multi_node_mean)
VERBS = (*verbs.MOVES[1:], *SUMS, verbs.bcast_data)  # all but send
COPYING = ("malloc", "hostAlloc", "eventRecord", "eventQuery", "work", OUT, BACK)


@world_of
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("call", COPYING)
@pytest.mark.parametrize("verb", VERBS)
def test_an_error_in_a_verb_is_raised_on_all_ranks(world, double, verb, call):
    """The first such call and later ones, some of them after data have moved."""
    with gpus.small_buffers(4096), create_communicator("naive") as comm:
        arrays = [gpus.put(np.ones((2000, 4), "f4"))[:, ::2] for _ in range(8)]
        # Of a model rank 0 sends, and the others receive.
        failing = comm.size - 1
        if call == OUT:
            failing = 0
        fails = comm.rank == failing
        for after in range(4):
            if fails:
                double.plant(call, ILLEGAL_ADDRESS, after)
            raised = None
            try:
                verb(comm, lambda _: np.ones((2000, 2), "f4"), arrays.__getitem__)
            except CommunicationError as error:
                raised = error
            happened = True in comm.allgather_obj(fails and double.recover())
            assert happened or after, "the call isn't made"
            assert (raised is not None) == happened
            if raised is not None:
                assert "cudaErrorIllegalAddress: an illegal memory" in str(raised)
                assert isinstance(raised, PeerError) != fails


SENDING = [call for call in COPYING if call != BACK]
RECEIVING = ["no device", *(call for call in COPYING if call != OUT)]


@world_of
@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("rank", "call"), [*product([0], SENDING), *product([1], RECEIVING)]
)
def test_a_sender_or_receiver_that_fails_raises_alone(world, double, rank, call):
    """The sender sends nothing then, and the receiver gets the next message."""
    fails = world.rank == rank
    with create_communicator("naive") as comm:
        array = gpus.put(np.ones((3, 4), "f4"))[:, ::2]
        if fails and call == "no device":
            double.count = 0
        elif fails:
            double.plant(call, ILLEGAL_ADDRESS)
        raised = ""
        if comm.rank == 0:
            raised = error_of(comm.send, array, 1)
        elif rank == 1:
            raised = error_of(comm.recv, 0)
        assert bool(raised) == fails
        told = f"rank {rank}: .*(IllegalAddress|CUDA finds no device)"
        assert re.search(told, raised) or not fails
        double.recover()
        double.count = 1
        if comm.rank == 0:
            comm.send(array, 1)
        else:
            same(gpus.to_host(comm.recv(0)), np.ones((3, 2), "f4"))


SCRIPT = """
import sys, time
from contextlib import nullcontext
import numpy as np
from mpi4py import MPI
from tests.gpu.test_errors import error_at, model_of
from tests.support.doubles import gpus
from tests.support.doubles.cupy_double import installed
from tests.support.worlds.topologies import on_nodes

name, where, nodes, how = sys.argv[1:]
context = installed()
with context if how != "leave" else nullcontext(context.__enter__()) as double:
    comm = on_nodes(map(int, nodes), name)
    model, array = model_of(comm.rank), gpus.put(np.full(9, comm.rank, "f4"))
    def call():
        if "verb" in how:
            comm.bcast(comm.allreduce(array))
        else:
            comm.allreduce_grad(model)
    for _ in range(0 if "first" in how else 2):
        call()
        gpus.to_host(array)
    MPI.COMM_WORLD.Barrier()
    print("BEGIN", flush=True)
    if comm.rank == (where != "getUniqueId"):
        double.plant(where, error_at(where))
    call()
    if how == "finalize":
        comm.finalize()
    elif how == "leave":
        sys.exit()
    while True:  # long beside what the thread takes to see it, also on a busy machine
        time.sleep(0.5)
        gpus.to_host(array)
"""
# Where MPI takes the sums, a call waits for its end; elsewhere a thread sees what fails
# after it.
JOBS = [
    ("flat", BACK, "00", "go on"),
    ("flat", "work", "01", "go on"),
    ("pure_nccl", "commInitRank", "00", "first"),
    ("hierarchical", "getUniqueId", "01", "first"),
    ("hierarchical", "commInitRank", "01", "first verb"),
    ("pure_nccl", "allReduce", "00", "go on"),
    ("pure_nccl", "work", "00", "go on"),
    ("pure_nccl", "getAsyncError", "00", "finalize"),
    ("pure_nccl", "work", "00", "leave"),
    ("hierarchical", "getAsyncError", "01", "go on"),
    ("hierarchical", "broadcast", "01", "verb"),
]


@pytest.mark.ci
@pytest.mark.parametrize("case", JOBS, ids=" ".join)
def test_an_error_on_one_rank_ends_the_job_with_its_words(case):
    name, where, _, how = case
    job = run_text(2, SCRIPT, *case, seconds=60.0)
    assert job.out.count("BEGIN") == 2, job
    assert job.returncode == 1, job
    rank = int(where != "getUniqueId")
    assert re.search(rf"rank {rank} of 2: uncaught CommunicationError", job.err), job
    doing = "averaging gradients on GPUs"
    if "verb" in how:
        doing = "moving arrays between GPUs"
    elif name == "flat":  # the call itself fails
        doing = "allreduce_grad"
    told = rf"rank {rank}: {doing} failed: .*({WORDS})"
    if where in ("getUniqueId", "commInitRank"):
        told = (
            rf"rank {rank} of 2 can't be connected by NCCL: .*{WORDS}.*'non_cuda_aware'"
        )
    assert re.search(told, job.err), job
