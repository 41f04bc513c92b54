"""A CUDA or NCCL error at any call is raised with its words, and nothing waits afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from chainermn_comm import CommunicationError
from tests.support.doubles import gpus
from tests.support.doubles.device_double import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from tests.support.doubles.nccl_double import NcclError
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

# Calls that are made when gradients first come, and in each step.
FIRST = ("eventCreate", "streamCreate", "hostAlloc")
EACH = ("eventRecord", "streamWaitEvent", "eventQuery", "work")
KERNELS_FIRST = ("malloc", "compile", "memcpyAsync to device")
NCCL_FIRST, NCCL_EACH = (
    ("getUniqueId", "commInitRank"),
    ("getAsyncError", "launchKernel"),
)
GROUPED = ("groupStart", "groupEnd")
COPIES = ("memcpyAsync to host", "memcpyAsync to device")
# Of each algorithm: how it is made, the nodes by number of ranks, and further calls of
# both kinds.
ALGORITHMS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "nccl_only": ("pure_nccl", (0, 0, 0, 0), NCCL_FIRST, (*NCCL_EACH, "allReduce")),
    "single_leader": (
        "hierarchical",
        (0, 0, 1, 1),
        (),  # where NCCL doesn't connect nodes at first, host memory serves
        (*NCCL_EACH, *GROUPED, "reduce", "broadcast", "allReduce"),
    ),
    "multi_leader": (
        "two_dimensional",
        (0, 0, 1, 1),
        (),
        (*NCCL_EACH, "reduceScatter", "allGather", "allReduce"),
    ),
    "staged": (
        "non_cuda_aware",
        (0, 0, 1, 1),
        NCCL_FIRST,
        (*NCCL_EACH, *GROUPED, "reduce", "broadcast", *COPIES),
    ),
    "mpi": ("flat", (0, 0, 0, 0), (), COPIES),
}
LEAST_RANKS = {"single_leader": 3, "staged": 3, "multi_leader": 4}
LEADERS_ONLY = ("allReduce", *COPIES)  # in the algorithms by nodes


def cases() -> list:
    found = []
    for algorithm, (_, _, first, each) in ALGORITHMS.items():
        kernels = () if algorithm == "mpi" else KERNELS_FIRST
        for when, calls in (
            ("first", (*FIRST, *kernels, *first)),
            ("later", (*EACH, *each)),
        ):
            for call in calls:
                for who in ("one", "all"):
                    few = who == "all" or algorithm == "staged"
                    ranks = LEAST_RANKS.get(algorithm, 2)
                    sizes = [
                        pytest.mark.sizes(*range(ranks, 5)),
                        pytest.mark.ranks(ranks),
                    ]
                    marks = [*sizes, *([pytest.mark.full] if few else [])]
                    found.append(pytest.param(algorithm, when, call, who, marks=marks))
    return found


def error_of(call: Callable[..., None], *args: object) -> str:
    """What it raises, which is a CommunicationError; empty where it raises nothing."""
    try:
        call(*args)
    except CommunicationError as error:
        return str(error)
    return ""


def error_at(call: str) -> BaseException:
    """What that call may raise."""
    if call[:5] in ("group", "getUn", "getAs", "commI") or call in (
        *("allReduce", "reduce", "broadcast", "reduceScatter", "allGather"),
    ):
        return NcclError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: it failed")
    return ILLEGAL_ADDRESS if call == "work" else OUT_OF_MEMORY


def fails_here(comm, algorithm: str, when: str, call: str, who: str) -> bool:
    """Whether it is planted on this rank, which makes that call.

    Once ranks have agreed it is on all: the job may not end here, and others would wait
    for ever.
    """
    if call == "getUniqueId":
        return comm.rank == 0
    if algorithm in LEAST_RANKS and call in LEADERS_ONLY:
        return comm.intra_rank == 0
    return have_agreed(when, call) or who == "all" or comm.rank == 1


def have_agreed(when: str, call: str) -> bool:
    """Whether the call is made where an error can't be raised on all ranks any more."""
    return when == "later" or call == "compile"


@pytest.mark.ci
@pytest.mark.parametrize(("algorithm", "when", "call", "who"), cases())
def test_an_error_at_any_call_is_raised_and_none_waits(
    world, double, algorithm, when, call, who
):
    name, nodes, _, _ = ALGORITHMS[algorithm]
    models = []
    for step in range(4):
        grads = [gpus.put(np.full(size, step, "f4")) for size in (3, 2000)]
        models.append(
            Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)})
        )
    error = error_at(call)
    comm = on_nodes(nodes[: world.size], name)
    if when == "later":
        for model in models[:2]:
            comm.allreduce_grad(model)
        gpus.settle(world, comm)
    fails = fails_here(comm, algorithm, when, call, who)
    if fails:
        double.plant(call, error)
    raised = [error_of(comm.allreduce_grad, models[2])]
    if not raised[0]:
        gpus.wait_for_failure(comm)
        raised.append(error_of(comm.allreduce_obj, 1))
    if not have_agreed(when, call):
        assert raised[0]
        assert comm.allreduce_obj(1) == world.size
        if call != "work":
            comm.allreduce_grad(models[3])
    assert any(re.search("cudaError|NCCL_ERROR", text) for text in raised), raised
    # Others may have heard before.
    assert True in world.allgather(fails and double.recover())
    comm.finalize()
    # It was for this communicator alone.
    with on_nodes(nodes[: world.size], "flat") as comm:
        if call != "work":
            gpus.assert_mean(comm)


@pytest.mark.ci
@pytest.mark.parametrize("call", [*EACH, *NCCL_EACH, "allReduce"])
def test_an_error_beside_backward_is_raised_and_none_waits(world, double, call):
    grads = [gpus.put(np.full(2000, step, "f4")) for step in range(3)]
    with on_nodes([0] * world.size, "pure_nccl") as comm:
        channel, raised = comm.split(0, comm.rank), []
        for step, grad in enumerate(grads):
            reducer = comm.make_reducer(channel=channel)
            work = reducer.start(planned=1)
            reducer.add(Model(w=Param(grad, grad)), True)
            if step == 2:
                gpus.settle(world, channel)
                double.plant(call, error_at(call))
            raised.append(error_of(work.wait))
        assert not any(raised[:2])
        gpus.wait_for_failure(channel)
        raised.append(error_of(channel.allreduce_obj, 1))
        assert any(re.search("cudaError|NCCL_ERROR", text) for text in raised), raised
        assert True in world.allgather(double.recover())
        assert comm.allreduce_obj(1) == world.size


def test_an_error_of_a_cupy_that_raises_it_is_told_likewise(world, double, monkeypatch):
    """Others than 14.2 raise what cudaEventQuery returns, also that work isn't over."""
    from cupy.cuda import runtime

    query = runtime.eventQuery

    def raising(event: int) -> int:
        status = query(event)
        if status:
            raise runtime.CUDARuntimeError(status)
        return 0

    monkeypatch.setattr(runtime, "eventQuery", raising)
    with on_nodes([0] * world.size, "flat") as comm:
        gpus.assert_mean(comm)
        grad = gpus.put(np.ones(3, "f4"))
        gpus.settle(world, comm)
        double.plant("eventQuery", ILLEGAL_ADDRESS)
        for _ in range(2):
            with pytest.raises(CommunicationError, match="cudaErrorIllegalAddress"):
                comm.allreduce_grad(Model(w=Param(grad, grad)))
