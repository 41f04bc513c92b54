"""What goes wrong on GPUs is told on every rank: disagreement, devices, NCCL, CUDA, exceptions."""

from __future__ import annotations

import contextlib
import gc
import re
from itertools import product

import numpy as np
import pytest

from chainermn_comm import (
    CommunicationError,
    PeerError,
    RankMismatchError,
    create_communicator,
)
from tests.support.doubles import gpus
from tests.support.doubles.gpus import NCCL, assert_mean, have_one_each, mean_of, put
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

ALGORITHMS = ("flat", "pure_nccl", "hierarchical", "two_dimensional")


@pytest.fixture(params=ALGORITHMS)
def name(request, gpu, world) -> str:
    """A communicator's name for each algorithm."""
    if request.param in NCCL:
        gpus.one_each(world)
    return request.param


def grads(first: object, rank: int, dtype: str = "f4") -> Model:
    """A model with the gradient `first` on rank 0 and one on the GPU elsewhere."""
    grad = put(np.ones(3, dtype))
    return Model(w=Param(put(np.zeros(3, dtype)), grad if rank else first))


# What rank 0 has where the others have float32 on a GPU, and what is told of it.
DISAGREEMENTS = {
    "none": (
        lambda: None,
        r"/w float32 \(3,\).*no gradient|no gradient.*/w float32 \(3,\)",
    ),
    "dtype": (lambda: put(np.ones(3)), r"/w float64 \(3,\).*/w float32 \(3,\)"),
    "place": (
        lambda: np.ones(3, "f4"),
        r"/w float32 \(3,\) on rank 0; .* \(3,\) on a GPU on rank",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_and_go_on(world, one_each, what):
    give, told = DISAGREEMENTS[what]
    with create_communicator("hierarchical") as comm:
        with pytest.raises(RankMismatchError, match=told):
            comm.allreduce_grad(grads(give(), comm.rank))
        assert_mean(comm)


def test_gradients_missing_on_all_ranks_stay_so_and_integers_are_told(world, gpu):
    with create_communicator("flat") as comm:
        model = Model(
            w=Param(put(np.zeros(2)), None), v=Param(put(np.zeros(1)), put(np.ones(1)))
        )
        comm.allreduce_grad(model)
        assert model["w"].grad is None
        with pytest.raises(TypeError, match="/w has dtype int32"):
            comm.allreduce_grad(grads(put(np.ones(3, "i4")), comm.rank, "i4"))


def test_pure_nccl_refuses_numpy_gradients(world, one_each):
    with create_communicator("pure_nccl") as comm:
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"pure_nccl.*NumPy arrays.*to_gpu.*hierarchical"
            ):
                comm.allreduce_grad(Model(w=Param(np.ones(2), np.ones(2))))
        assert_mean(comm)


# All names check before they make an algorithm.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ALGORITHMS[1:3] else pytest.mark.full)
        for n in NCCL
    ],
)
def test_ranks_on_one_device_are_told_by_each_name_and_others_serve(world, gpu, name):
    with create_communicator(name) as comm:
        with gpus.on_one_device(gpu), create_communicator("flat") as other:
            told = r"ranks \[0, 1.* use device .*get_device_from"
            for _ in range(2):
                with pytest.raises(ValueError, match=told):
                    assert_mean(comm)
            assert_mean(other)
        if have_one_each(world):
            assert_mean(comm)
        assert comm.allreduce_obj(1) == world.size


def test_one_device_number_on_two_nodes_is_no_clash(world, gpu):
    with gpus.on_one_device(gpu), on_nodes(range(world.size), "hierarchical") as comm:
        assert_mean(comm)


@pytest.mark.parametrize("name", ["pure_nccl", "flat"])
def test_one_rank_on_another_device_than_before_raises_on_all(world, gpu, name):
    import cupy

    gpu.count = 2
    gpus.one_each(world)
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("takes two devices")
    here = cupy.cuda.Device().id
    with create_communicator(name) as comm:
        assert_mean(comm)
        odd = comm.rank == 0
        told = r"lies on device \d.*first used on device \d"
        with (
            cupy.cuda.Device((here + odd) % count),
            pytest.raises(ValueError if odd else PeerError, match=told),
        ):
            assert_mean(comm)
        assert_mean(comm)


# When the algorithm is made; each call.
@pytest.mark.parametrize("place", ["stream", "pinned memory"])
def test_a_device_that_fails_at_first_raises_on_every_rank(world, one_each, place):
    with create_communicator("pure_nccl") as comm:
        failing = comm.rank == 1
        error, told = (RuntimeError, "") if failing else (PeerError, "rank 1.*")
        told += "cudaErrorMemoryAllocation"
        how = gpus.failing(place, told) if failing else contextlib.nullcontext()
        with how, pytest.raises(error, match=told):
            assert_mean(comm)
        assert_mean(comm)


def means(comm) -> None:
    """Means of gradients that are packed and unpacked, which have been taken when this returns."""
    gpus.means_of(comm, [np.full(size, comm.rank, "f4") for size in (2000, 3)])


def error_of(comm) -> str:
    """What a call raises, empty where it doesn't."""
    try:
        means(comm)
    except RuntimeError as error:
        return str(error)
    return ""


def raises_in_this_call_or_the_next(comm, told: str) -> None:
    """Where everything is enqueued, a rank hears of a failure after its call; and so ever after.

    Where another rank fails first, NCCL says so.
    """
    found = error_of(comm)
    gpus.wait_for_failure(comm)
    assert re.search(f"{told}|NCCL", found or error_of(comm))
    for _ in range(2):
        with pytest.raises(
            CommunicationError, match=f"interrupted on this rank .*({told}|NCCL)"
        ):
            means(comm)


@pytest.mark.parametrize(
    ("name", "kernel"),
    list(product(ALGORITHMS[1:], ("pack", "unpack"))),
    indirect=["name"],
)
def test_a_kernel_that_fails_is_raised_and_a_new_communicator_serves(
    world, gpu, name, kernel
):
    gpu.delay, told = 40, "cudaErrorIllegalAddress"
    with create_communicator(name) as comm:
        means(comm)
        gpus.settle(world, comm)
        with gpus.failing(kernel, told):
            raises_in_this_call_or_the_next(comm, told)
    with create_communicator(name) as comm:
        assert_mean(comm)


def test_a_mean_that_is_interrupted_leaves_a_communicator_that_says_so(world, one_each):
    with on_nodes((0, 0, 1, 1)[: world.size], "hierarchical") as comm:
        means(comm)
        world.Barrier()
        interrupted = gpus.failing("pack", "Ctrl-C", KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            means(comm)
        with pytest.raises(
            CommunicationError, match=r"interrupted on this rank .*KeyboardInterr"
        ):
            assert_mean(comm)


@pytest.mark.parametrize(
    ("name", "how", "by_nccl"),
    [
        ("pure_nccl", "nccl_fails", True),
        *[
            pytest.param(
                "hierarchical", how, by_nccl, marks=pytest.mark.sizes(4 - by_nccl, 4)
            )
            for how in ("nccl_fails", "group_fails")
            for by_nccl in (False, True)
        ],
    ],
)
def test_what_nccl_says_of_a_failure_is_raised(world, double, name, how, by_nccl):
    """Also where NCCL, or MPI, connects nodes; a rank without a neighbour hears of the others."""
    nodes = (0, 0, 1, 1)[: world.size]
    with gpus.nccl_between_nodes(by_nccl), on_nodes(nodes, name) as comm:
        means(comm)
        gpus.settle(world, comm)
        setattr(double, how, True)
        raises_in_this_call_or_the_next(comm, "NCCL_ERROR")


WHY_NOT = {
    "no device": ("count", 0),
    "InsufficientDriver": ("count", -1),
    "available is False": ("available", False),
    "version is 2804, and 2.10 is the oldest": ("version", 2804),
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_pure_nccl_says_why_it_cannot(world, double, monkeypatch, why):
    from cupy.cuda import nccl

    odd, (what, value) = world.rank == world.size - 1, WHY_NOT[why]
    if odd:
        monkeypatch.setattr(double if what in vars(double) else nccl, what, value)
    with pytest.raises(
        ValueError if odd else PeerError, match=f"{why}.*on CPUs use one of: flat"
    ):
        create_communicator("pure_nccl")


def test_bfloat16_needs_no_name_for_it_in_cupy(world, one_each, monkeypatch):
    from cupy.cuda import nccl

    monkeypatch.delattr(nccl, "NCCL_BFLOAT16", raising=False)
    with create_communicator("pure_nccl", allreduce_grad_dtype="bfloat16") as comm:
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2, "f4"))


@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_a_block_left_by_an_exception_frees_the_gpu_and_waits_for_nobody(
    world, double, name
):
    with create_communicator(name) as other:
        comm = create_communicator(name)
        for each in (comm, other):
            assert_mean(each)
        if world.rank == world.size - 1:  # the others never leave the block
            before = sum(double.memory.values()), sum(double.pinned.values())
            with pytest.raises(ZeroDivisionError):  # noqa: SIM117
                with comm:
                    raise ZeroDivisionError
            gc.collect()
            assert sum(double.memory.values()) < before[0] or name == "flat"
            assert sum(double.pinned.values()) < before[1]
            assert "abort" in double.calls or name == "flat"
        assert_mean(other)
