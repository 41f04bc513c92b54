"""Gradients on GPUs, over any topology, with a double of CuPy and NCCL in place of a device."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_comm import (
    CommunicationError,
    PeerError,
    RankMismatchError,
    cuda_aware,
    devices,
    kernels,
)
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology
from tests.support.cupy_double import Gpu, installed
from tests.support.drawn_models import DTYPES, check_model, gradients, has, models
from tests.support.models import Model, Param
from tests.support.topologies import IMPOSED

pytestmark = pytest.mark.world

NAMES = (
    *("naive", "flat", "hierarchical", "two_dimensional"),
    *("single_node", "pure_nccl", "non_cuda_aware"),
)
STAGED = ("naive", "flat")
# Small beside those of `test_plans`: the double is slow, and its chunks can be small too. Numbers
# of an array are alike, since NCCL's sums of others are worse than the bound: the manual says so.
MODELS = models([(20_001,), (70, 60)], 40, DTYPES[:3], (0,))


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The process's device."""
    with installed() as device:
        yield device


def topologies(name: str, size: int) -> list[tuple[int, ...]]:
    return IMPOSED[size][:1] if name == "single_node" else IMPOSED[size]


def put(array: np.ndarray, layout: str = "C"):
    """The array on the device, with a memory layout as the original's."""
    if layout == "reversed" and array.ndim:
        return devices.to_device(np.ascontiguousarray(array[::-1]))[::-1]
    if layout == "strided" and array.ndim:
        return devices.to_device(np.repeat(array, 2, axis=0))[::2]
    return devices.to_device(array)


def run(comm, entries, zero_fill) -> list:
    arrays = gradients(entries, comm.rank)
    on_device = {
        id(array): put(array, entry.layout) for entry, array in zip(entries, arrays, strict=True)
    }
    model = Model(
        **{
            f"p{index:03}": Param(
                devices.to_device(np.zeros(entry.shape, entry.dtype)),
                on_device[id(array)] if has(entry, comm.rank, zero_fill) else None,
            )
            for index, (entry, array) in enumerate(zip(entries, arrays, strict=True))
        }
    )
    comm.multi_node_mean_grad(model, zero_fill)
    grads = [param.grad for param in model.params.values()]
    assert all(grad is None or devices.on_gpu(grad) for grad in grads)
    return [None if grad is None else devices.to_host(grad) for grad in grads]


def mean_of(comm, array: np.ndarray) -> np.ndarray:
    model = Model(w=Param(put(np.zeros_like(array)), put(array)))
    comm.allreduce_grad(model)
    return devices.to_host(model["w"].grad)


def check_models(world, name: str, examples: int) -> None:
    """Check so many models over all topologies that the communicator takes."""
    with contextlib.ExitStack() as stack:
        comms = {
            nodes: stack.enter_context(make_communicator(name, topology=Topology.of(nodes)))
            for nodes in topologies(name, world.size)
        }

        @settings(max_examples=examples)
        @given(
            MODELS,
            st.sampled_from(list(comms)),
            st.sampled_from([None, *DTYPES]),
            st.booleans(),
        )
        def check(entries, nodes, wire, zero_fill):
            comm = comms[nodes]
            check_model(comm, lambda: run(comm, entries, zero_fill), entries, wire, zero_fill)

        check()


@pytest.mark.parametrize("name", NAMES)
def test_any_model_over_any_topology(world, gpu, name):
    # The other names take the same ways as these.
    examples = 25 if name in ("flat", "hierarchical", "two_dimensional", "pure_nccl") else 5
    check_models(world, name, examples)
    assert not any(stream.queue for stream in gpu.streams)


@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional", "pure_nccl"])
def test_models_of_many_chunks(world, gpu, monkeypatch, name):
    monkeypatch.setenv("CHAINERMN_CHUNK_BYTES", "16384")
    gpu.delay = 1
    check_models(world, name, 3 * len(topologies(name, world.size)))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_any_model_over_any_topology_at_length(world, gpu, name):
    check_models(world, name, 200)


@pytest.mark.parametrize("name", STAGED)
def test_staged_means_have_the_bits_of_cpus(world, gpu, name):
    with make_communicator(name) as comm, make_communicator("flat") as on_cpus:
        for dtype in ("float16", "float32", "float64"):
            mine = np.random.default_rng(world.rank).standard_normal(70_001).astype(dtype)
            model = Model(w=Param(np.zeros_like(mine), mine.copy()))
            on_cpus.allreduce_grad(model)
            np.testing.assert_array_equal(mean_of(comm, mine), model["w"].grad)
    assert not any(call.startswith("all") for call in gpu.calls)


@pytest.fixture
def aware(monkeypatch) -> None:
    """An MPI that takes GPU memory: the double's is host memory, which any MPI takes."""
    monkeypatch.setattr(cuda_aware, "mpi_takes_gpu_memory", lambda: True)


BETWEEN_NODES = ["flat", "hierarchical", "two_dimensional"]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", BETWEEN_NODES)
def test_a_cuda_aware_mpi_gets_gpu_memory_and_gives_the_same_bits(world, gpu, monkeypatch, name):
    rng = np.random.default_rng(world.rank)
    for nodes in topologies(name, world.size):
        several = name == "flat" or len(set(nodes)) > 1
        for dtype in ("float16", "float32", "float64"):
            mine = rng.standard_normal(3001).astype(dtype)
            mine[:9] = np.finfo(dtype).max  # whose sum overflows, and whose mean doesn't
            mine[9:12] = np.inf, np.nan, np.finfo(dtype).smallest_subnormal
            found = []
            for says in (False, True):
                monkeypatch.setattr(cuda_aware, "mpi_takes_gpu_memory", lambda says=says: says)
                with make_communicator(name, topology=Topology.of(nodes)) as comm:
                    mean = mean_of(comm, mine)  # copies it to the host, by another way
                    copied, gpu.copied_to_host = gpu.copied_to_host, 0
                    in_lane = name != "hierarchical" or comm.intra_rank == 0
                assert (copied > 0) == (
                    several and in_lane and not says
                ) or name == "two_dimensional"
                assert copied == 0 or not says
                found.append(mean)
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("name", BETWEEN_NODES)
def test_any_model_through_a_cuda_aware_mpi(world, gpu, aware, name):
    check_models(world, name, 12)
    assert gpu.copied_to_host == 0
    gc.collect()
    assert not gpu.memory
    assert not gpu.pinned


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", ["flat", "non_cuda_aware"])
def test_mpi_gets_host_memory_unless_all_ranks_and_the_name_agree(world, gpu, monkeypatch, name):
    says = name == "non_cuda_aware" or world.rank == 0
    monkeypatch.setattr(cuda_aware, "mpi_takes_gpu_memory", lambda: says)
    apart = Topology(tuple(range(world.size)))
    with make_communicator(name, topology=apart) as comm:
        mean = mean_of(comm, np.full(300, comm.rank, "f4"))
        np.testing.assert_array_equal(mean, np.full(300, (world.size - 1) / 2, "f4"))
        assert gpu.copied_to_host >= 1200


USED = {
    "pure_nccl": {"allReduce"},
    "single_node": {"allReduce"},
    "hierarchical": {"reduce", "broadcast"},
    "non_cuda_aware": {"reduce", "broadcast"},
    "two_dimensional": {"reduceScatter", "allGather"},
}


@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", USED)
def test_each_name_takes_the_verbs_that_it_promises(gpu, name):
    nodes = (0, 0, 0, 0) if name == "single_node" else (0, 1, 0, 1)
    with make_communicator(name, topology=Topology.of(nodes)) as comm:
        np.testing.assert_array_equal(
            mean_of(comm, np.full(9, comm.rank, "f4")), np.full(9, 1.5, "f4")
        )
        assert {call for call in gpu.calls if "pack" not in call} == USED[name]
        kernels = [call for call in gpu.calls if "pack" in call]
        assert kernels == ["pack_f", "unpack_f"]
    assert gpu.calls[-1] == "destroy"


@pytest.mark.sizes(4)
def test_uneven_nodes_exchange_as_many_shards_as_the_smallest_has_ranks(gpu):
    with make_communicator("two_dimensional", topology=Topology.of((0, 0, 0, 1))) as comm:
        mean = mean_of(comm, np.arange(10, dtype="f8") + comm.rank)
        np.testing.assert_array_equal(mean, np.arange(10) + 1.5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_travel_as_bfloat16(world, gpu, name):
    for nodes in topologies(name, world.size):
        with make_communicator(name, None, "bfloat16", topology=Topology.of(nodes)) as comm:
            for dtype in ("float16", "float32", "float64"):
                every = [
                    np.random.default_rng(rank).standard_normal(5000).astype(dtype)
                    for rank in range(world.size)
                ]
                mean = mean_of(comm, every[world.rank])
                assert mean.dtype == dtype
                wide = [grad.astype("f8") for grad in every]
                bound = 2.0**-8 * 4 * sum(map(np.abs, wide)) / world.size
                assert np.all(np.abs(mean - sum(wide) / world.size) <= bound)
                assert all(other == mean.tobytes() for other in comm.allgather_obj(mean.tobytes()))
                # In the wire's precision, and not by accident in a wider one.
                assert not np.any(mean.astype("f4").view("u4") & 0xFFFF)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("lacks", ["NCCL", "CuPy"])
def test_bfloat16_says_what_it_lacks(world, gpu, monkeypatch, lacks):
    odd = world.rank == 1
    if odd and lacks == "NCCL":
        gpu.version = 2908
    if odd and lacks == "CuPy":
        monkeypatch.delattr(nccl_module(), "NCCL_BFLOAT16")
    with make_communicator("pure_nccl") as comm, make_communicator("flat") as staged:
        comm.set_config("allreduce_grad_dtype", "bfloat16")
        staged.set_config("allreduce_grad_dtype", "bfloat16")
        told = r"takes NCCL 2\.10 .*NCCL_BFLOAT16.*the communicator 'flat'"
        with pytest.raises(ValueError if odd else PeerError, match=told):
            mean_of(comm, np.ones(2, "f4"))
        np.testing.assert_array_equal(mean_of(staged, np.ones(2, "f4")), np.ones(2, "f4"))
        comm.set_config("allreduce_grad_dtype", "float32")
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2, "f4"))


def test_values_are_divided_before_nccl_sums_them(world, gpu):
    large = np.finfo("float16").max * np.float16(0.99)  # the last bits of the range may be lost
    with make_communicator("pure_nccl", allreduce_grad_dtype="float16") as comm:
        mean = mean_of(comm, np.array([large, 1], "float16"))
    np.testing.assert_allclose(mean, [large, 1], rtol=4 * np.finfo("float16").eps)


@pytest.mark.sizes(2, 3, 4)
def test_the_double_shows_when_streams_are_not_ordered(world, gpu):
    # A check of the tests: without the waits that the library asks for, sums are wrong.
    gpu.ignores_events, gpu.delay = True, 40
    wrong = 0
    with make_communicator("pure_nccl") as comm:
        for call in range(20):
            mean = mean_of(comm, np.full(3, comm.rank + call, "f4"))
            wrong += not np.array_equal(mean, np.full(3, call + (world.size - 1) / 2, "f4"))
            devices.current_stream().gpu.drain(gpu.streams[1])
    assert wrong


def test_back_to_back_calls_do_not_mix(world, gpu, monkeypatch):
    monkeypatch.setenv("CHAINERMN_CHUNK_BYTES", "1024")
    for name in ("pure_nccl", "two_dimensional", "flat"):
        for nodes in topologies(name, world.size):
            with make_communicator(name, topology=Topology.of(nodes)) as comm:
                for call in range(12):
                    n = (call % 3) * 256 + 5
                    mean = mean_of(comm, np.full(n, comm.rank + call, "f4"))
                    expected = np.full(n, call + (world.size - 1) / 2, "f4")
                    np.testing.assert_array_equal(mean, expected)


def test_mixed_models_go_both_ways(world, gpu):
    with make_communicator("hierarchical") as comm:
        model = Model(
            a=Param(np.zeros(3), np.full(3, float(comm.rank))),
            b=Param(put(np.zeros(3)), put(np.full(3, float(comm.rank)))),
        )
        comm.allreduce_grad(model)
        expected = np.full(3, (world.size - 1) / 2)
        np.testing.assert_array_equal(model["a"].grad, expected)
        np.testing.assert_array_equal(devices.to_host(model["b"].grad), expected)


def test_a_gradient_is_averaged_in_place_or_replaced(world, gpu):
    plain, other = put(np.full((2, 3), world.rank, "f4")), put(np.full((2, 3), world.rank, "f4"))
    both = put(np.full(4, world.rank, "f4"))
    with make_communicator("pure_nccl") as comm:
        model = Model(
            plain=Param(plain, plain),
            turned=Param(other.T, other.T),
            one=Param(both, both),
            two=Param(both, both),
        )
        comm.allreduce_grad(model)
    assert model["plain"].grad is plain
    for name in ("turned", "one", "two"):
        assert model[name].grad.flags.c_contiguous
        np.testing.assert_array_equal(devices.to_host(model[name].grad), (world.size - 1) / 2)
    assert devices.address(model["one"].grad) != devices.address(model["two"].grad)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree_where_gradients_lie(world, gpu):
    mine = np.ones(3, "f4")
    with make_communicator("hierarchical") as comm:
        where = put if comm.rank == 0 else np.array
        model = Model(b=Param(where(mine), where(mine)))
        told = r"/b float32 \(3,\) on a GPU on rank 0; /b float32 \(3,\) on rank"
        with pytest.raises(RankMismatchError, match=told):
            comm.allreduce_grad(model)
        np.testing.assert_array_equal(mean_of(comm, mine), mine)


@pytest.mark.sizes(2, 3, 4)
def test_two_ranks_on_one_device_are_told_before_nccl_is_asked(world, gpu):
    gpu.bus_id = "0000:17:00.0"
    with make_communicator("pure_nccl") as comm:
        told = r"ranks \[0, 1.* use device 0000:17:00.0.*get_device_from_id"
        with pytest.raises(ValueError, match=told):
            mean_of(comm, np.ones(2, "f4"))
        gpu.bus_id = f"0000:{comm.rank:02x}:00.0"
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


@pytest.mark.sizes(2, 3, 4)
def test_one_device_number_on_two_nodes_is_no_clash(world, gpu):
    gpu.bus_id = "0000:17:00.0"
    apart = Topology(tuple(range(world.size)))
    with make_communicator("hierarchical", topology=apart) as comm:
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


def test_one_rank_on_another_device_than_before_raises_on_all(world, gpu):
    with make_communicator("pure_nccl") as comm:
        mean_of(comm, np.ones(2, "f4"))
        gpu.current_device = 1 if comm.rank == 0 else 0
        error = ValueError if comm.rank == 0 else PeerError
        with pytest.raises(error, match=r"lies on device 1.*first used on device 0"):
            mean_of(comm, np.ones(2, "f4"))
        gpu.current_device = 0
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


@pytest.mark.parametrize("name", ["pure_nccl", "two_dimensional", "hierarchical"])
@pytest.mark.sizes(2, 3, 4)
def test_a_failed_peer_raises_on_every_rank(world, gpu, name):
    with make_communicator(name, topology=Topology((0,) * world.size)) as comm:
        mean_of(comm, np.ones(2, "f4"))
        failing = comm.rank == world.size - 1
        gpu.nccl_fails = failing
        told = "NCCL_ERROR_REMOTE_ERROR" if failing else f"rank {world.size - 1} failed: Nccl"
        with pytest.raises(CommunicationError, match=told):
            mean_of(comm, np.ones(2, "f4"))
        assert gpu.calls[-1] == "abort"
        gpu.nccl_fails = False
        with pytest.raises(CommunicationError, match="failed in an earlier call"):
            mean_of(comm, np.ones(2, "f4"))
        assert comm.allreduce_obj(1) == world.size  # all else goes on
    with make_communicator(name) as comm:
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("how", ["nccl_fails", "group_fails"])
@pytest.mark.sizes(3, 4)
def test_a_failed_peer_raises_on_other_nodes(world, gpu, monkeypatch, how, aware):
    monkeypatch.setattr(cuda_aware, "mpi_takes_gpu_memory", lambda: aware)
    nodes = (0, 0, 1, 1)[: world.size]
    with make_communicator("hierarchical", topology=Topology.of(nodes)) as comm:
        mean_of(comm, np.ones(2, "f4"))
        failing = comm.rank == 1
        setattr(gpu, how, failing)
        told = "NCCL_ERROR" if failing else "rank 1 failed: NcclError"
        with pytest.raises(CommunicationError, match=told):
            mean_of(comm, np.ones(2, "f4"))
        setattr(gpu, how, False)
        assert comm.allreduce_obj(1) == world.size


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.sizes(2, 3, 4)
def test_a_peer_that_fails_before_its_messages_raises_on_every_rank(world, gpu, monkeypatch, aware):
    monkeypatch.setattr(cuda_aware, "mpi_takes_gpu_memory", lambda: aware)
    failing = world.rank == world.size - 1

    def fail(*_) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    gpu.delay = 40

    with make_communicator("flat") as comm:
        mean_of(comm, np.ones(2000, "f4"))
        if failing:  # the others have sent it their shards, and wait for its own
            monkeypatch.setattr(kernels, "launch", fail)
        told = "cudaErrorIllegalAddress" if failing else f"rank {world.size - 1} failed: Runtime"
        with pytest.raises(CommunicationError, match=told):
            mean_of(comm, np.ones(2000, "f4"))
        monkeypatch.undo()
        assert comm.allreduce_obj(1) == world.size
    # Nothing is left in the streams that would work on memory which is gone by now.
    gc.collect()
    assert not any(stream.queue for stream in gpu.streams)
    with make_communicator("flat") as comm:
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


def test_a_split_goes_through_nccl_too(world, gpu):
    with make_communicator("pure_nccl") as comm:
        part = comm.split(comm.rank % 2, comm.rank)
        mean = mean_of(part, np.full(2, comm.rank, "f4"))
        np.testing.assert_array_equal(mean, np.full(2, np.mean(part.allgather_obj(comm.rank))))
        part.finalize()


WHY_NOT = {
    "no device": lambda gpu: setattr(gpu, "count", 0),
    "InsufficientDriver": lambda gpu: setattr(gpu, "count", -1),
    "available is False": lambda gpu: setattr(nccl_module(), "available", False),
    "NCCL is 2.3, and 2.4 is the oldest": lambda gpu: setattr(gpu, "version", 2307),
}


def nccl_module():
    from cupy.cuda import nccl

    return nccl


@pytest.mark.parametrize("why", WHY_NOT)
def test_pure_nccl_says_why_it_cannot(world, gpu, why):
    odd = world.rank == world.size - 1
    if odd:
        WHY_NOT[why](gpu)
    with pytest.raises(ValueError if odd else PeerError, match=f"{why}.*on CPUs use one of: dum"):
        make_communicator("pure_nccl")


def test_pure_nccl_refuses_numpy_gradients(world, gpu):
    with make_communicator("pure_nccl") as comm:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"pure_nccl.*NumPy arrays.*to_gpu.*hierarchical"):
                comm.allreduce_grad(Model(w=Param(np.ones(2), np.ones(2))))
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


def test_dtypes_that_gpus_do_not_take_are_told(world, gpu):
    with make_communicator("flat") as comm, pytest.raises(TypeError, match="/w has dtype int32"):
        comm.allreduce_grad(Model(w=Param(put(np.ones(2, "i4")), put(np.ones(2, "i4")))))


def test_device_memory_is_a_few_chunks(world, gpu, monkeypatch):
    monkeypatch.setenv("CHAINERMN_CHUNK_BYTES", str(1 << 16))
    with make_communicator("hierarchical") as comm:
        grad = put(np.ones(1 << 20, "f4"))
        before = sum(gpu.memory.values())
        model = Model(w=Param(grad, grad))
        comm.allreduce_grad(model)
        assert sum(gpu.memory.values()) - before < 3 << 16


@pytest.mark.sizes(2, 3, 4)
def test_a_device_that_fails_at_first_raises_on_every_rank(world, gpu, monkeypatch):
    def fail() -> None:
        raise RuntimeError("cudaErrorMemoryAllocation")

    with make_communicator("pure_nccl") as comm:
        for place in ("new_stream", "pinned"):  # when the way is made, and at each call
            with monkeypatch.context() as patch:
                if comm.rank == 1:
                    patch.setattr(devices, place, lambda *_: fail())
                error = RuntimeError if comm.rank == 1 else PeerError
                with pytest.raises(error, match="cudaErrorMemoryAllocation"):
                    mean_of(comm, np.ones(2, "f4"))
        np.testing.assert_array_equal(mean_of(comm, np.ones(2, "f4")), np.ones(2))


@pytest.mark.parametrize("name", ["flat", "two_dimensional", "pure_nccl"])
def test_finalize_frees_all_memory(world, gpu, name):
    for _ in range(20):
        with make_communicator(name, topology=Topology.of(IMPOSED[world.size][-1])) as comm:
            mean_of(comm, np.ones(1000, "f4"))
    gc.collect()
    assert not gpu.memory
    assert not gpu.pinned
    if name == "pure_nccl" and world.size > 1:
        assert gpu.calls.count("destroy") == 20


@pytest.mark.full
@pytest.mark.sizes(1, 2)  # more ranks than cores take minutes
@pytest.mark.parametrize("name", ["pure_nccl", "flat"])
def test_a_thousand_communicators_leak_nothing(world, gpu, name):
    streams, numbers = len(gpu.streams), set()
    gpu.delay = 0
    for _ in range(500):
        with make_communicator(name) as comm, comm.split(0, 0) as part:
            for each in (comm, part):
                mean_of(each, np.ones(100, "f4"))
        own = world.Dup()
        numbers.add(own.py2f())
        own.Free()
        del gpu.streams[streams:]  # the double's own list
    gc.collect()
    assert not gpu.memory
    assert not gpu.pinned
    assert gpu.calls.count("destroy") == (1000 if name == "pure_nccl" and world.size > 1 else 0)
    assert len(numbers) < 100


@pytest.mark.parametrize("name", ["flat", "two_dimensional", "pure_nccl"])
def test_a_block_left_by_an_exception_frees_the_gpu_and_waits_for_nobody(world, gpu, name):
    with make_communicator(name) as other:
        comm = make_communicator(name)
        for each in (comm, other):
            mean_of(each, np.ones(1000, "f4"))
        if world.rank == world.size - 1:  # the others never leave the block
            before = sum(gpu.memory.values()), sum(gpu.pinned.values())
            with pytest.raises(ZeroDivisionError):  # noqa: SIM117
                with comm:
                    raise ZeroDivisionError
            gc.collect()
            after = sum(gpu.memory.values()), sum(gpu.pinned.values())
            assert after[0] < before[0]
            if world.size > 1:
                assert after[1] < before[1] or name != "flat"  # only that is staged
                assert "abort" in gpu.calls or name == "flat"
        np.testing.assert_array_equal(mean_of(other, np.ones(3, "f4")), np.ones(3, "f4"))


def test_numpy_gradients_need_no_cupy(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # its import fails
    with make_communicator("hierarchical") as comm:
        comm.allreduce_grad(Model(w=Param(np.ones(2), np.ones(2))))
        with pytest.raises(ValueError, match=r"CuPy can't be imported.*use one of"):
            make_communicator("pure_nccl")
