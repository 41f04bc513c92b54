"""Means of gradients on GPUs: any model over any topology, by the algorithms that names promise."""

from __future__ import annotations

import contextlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_comm import create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.gpus import DTYPES as GPU_DTYPES
from tests.support.doubles.gpus import (
    NCCL,
    STAGED,
    Real,
    assert_mean,
    mean_of,
    means_of,
    put,
)
from tests.support.oracles.drawn_models import (
    DTYPES,
    check_model,
    gradients,
    has,
    models,
)
from tests.support.worlds.models import Model, Param, with_grads
from tests.support.worlds.topologies import IMPOSED, on_nodes

pytestmark = pytest.mark.world

# Small beside those on CPUs: the double is slow, and its chunks can be small too.
# Numbers of an array are alike, since NCCL's sums of others are worse than the bound:
# the manual says so.
MODELS = models([(20_001,), (70, 60)], 40, DTYPES[:3], (0,))
# By default a name runs on as few ranks as tell something of it: two leaders on two
# nodes take 4.
RANKS = dict(
    naive=2, single_node=2, flat=3, hierarchical=3, non_cuda_aware=3, two_dimensional=4
)
BY_NODES = ("hierarchical", "two_dimensional", "non_cuda_aware")


def named(*names: str):
    marks = {name: pytest.mark.ranks(ranks) for name, ranks in RANKS.items()}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks.get(name, ())) for name in names]
    )


ALL = named(*STAGED, *NCCL)
# Each name of these has an algorithm of its own.
ALGORITHMS = named("flat", "hierarchical", "two_dimensional", "pure_nccl")


def two_nodes(size: int) -> tuple[int, ...]:
    """The first has a rank more where they can't have as many."""
    return tuple(rank * 2 // size for rank in range(size)) if size > 1 else (0,)


def on_two_nodes(world, name: str, uneven: bool = False, **how):
    """A communicator over two nodes; skips where NCCL has no device for each rank.

    Where they are uneven the second has the last rank alone.
    """
    if name in NCCL:
        gpus.one_each(world)
    nodes = two_nodes(world.size)
    if uneven:
        nodes = tuple(int(rank == world.size - 1) for rank in range(world.size))
    return on_nodes(nodes if name != "single_node" else (0,) * world.size, name, **how)


def run(comm, entries, zero_fill) -> list:
    arrays = gradients(entries, comm.rank)
    # Those that are one array in host memory are one on the device, too.
    there = {
        id(a): put(a, entry.layout) for entry, a in zip(entries, arrays, strict=True)
    }
    model = Model()
    for index, (entry, array) in enumerate(zip(entries, arrays, strict=True)):
        grad = there[id(array)] if has(entry, comm.rank, zero_fill) else None
        model.params[f"p{index:03}"] = Param(
            put(np.zeros(entry.shape, entry.dtype)), grad
        )
    comm.multi_node_mean_grad(model, zero_fill)
    grads = [param.grad for param in model.params.values()]
    assert all(grad is None or gpus.on_gpu(grad) for grad in grads)
    return [None if grad is None else gpus.to_host(grad) for grad in grads]


def check_models(world, name: str, examples: int) -> None:
    """Check so many models over the topologies that make a difference to the name."""
    if name in NCCL:
        gpus.one_each(world)
    comms = {}
    with contextlib.ExitStack() as stack:
        nodes = IMPOSED[world.size] if name in BY_NODES else IMPOSED[world.size][:1]
        for case in product(nodes, (None, 1 << 14)):  # one chunk, or many
            comms[case] = stack.enter_context(on_nodes(case[0], name))
            comms[case].set_config("chunk_bytes", case[1])
        wires = st.sampled_from([None, *DTYPES])

        @settings(max_examples=examples)
        @given(MODELS, st.sampled_from(list(comms)), wires, st.booleans())
        def check(entries, case, wire, zero_fill):
            comm = comms[case]
            check_model(
                comm, lambda: run(comm, entries, zero_fill), entries, wire, zero_fill
            )

        check()


@pytest.mark.ci
@pytest.mark.parametrize(
    "at_length", [False, pytest.param(True, marks=pytest.mark.full)]
)
@ALL
def test_any_model_over_any_topology(world, gpu, name, at_length):
    # The names with fewer examples take the algorithms of others.
    few = 5 if name in ("naive", "single_node", "non_cuda_aware") else 20
    check_models(world, name, 200 if at_length else few)


@pytest.mark.parametrize("name", STAGED)
def test_staged_means_have_the_bits_of_cpus(world, gpu, name):
    with create_communicator(name) as comm, create_communicator("flat") as on_cpus:
        for dtype in GPU_DTYPES:
            mine = (
                np.random.default_rng(world.rank).standard_normal(70_001).astype(dtype)
            )
            model = with_grads(w=mine.copy())
            on_cpus.allreduce_grad(model)
            np.testing.assert_array_equal(mean_of(comm, mine), model["w"].grad)


NCCL_CALLS = {
    "naive": set(),
    "flat": set(),
    "pure_nccl": {"allReduce"},
    "single_node": {"allReduce"},
    "hierarchical": {"reduce", "allReduce", "broadcast"},
    "non_cuda_aware": {"reduce", "broadcast"},
    "two_dimensional": {"reduceScatter", "allReduce", "allGather"},
}


@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", NCCL_CALLS)
def test_each_name_makes_the_nccl_calls_that_it_promises(world, double, name):
    nodes = (0, 0, 0, 0) if name == "single_node" else (0, 1, 0, 1)
    with on_nodes(nodes, name) as comm:
        means_of(comm, [np.ones(3, "f4"), np.ones(5, "f4")])
        kernels = [call for call in double.calls if call.endswith("_f")]
        leads = name != "hierarchical" or comm.intra_rank == 0
        assert {*double.calls} - {*kernels} == NCCL_CALLS[name] - (
            set() if leads else {"allReduce"}
        )
        assert kernels[:1] + kernels[-1:] == (
            ["pack_f", "unpack_f"] if NCCL_CALLS[name] else []
        )
    assert (double.calls[-1:] == ["destroy"]) == bool(NCCL_CALLS[name])


def test_values_are_divided_before_nccl_sums_them(world, one_each):
    # The last bits of the range may be lost.
    large = np.finfo("float16").max * np.float16(0.99)
    with create_communicator("pure_nccl", allreduce_grad_dtype="float16") as comm:
        mean = mean_of(comm, np.array([large, 1], "float16"))
    np.testing.assert_allclose(mean, [large, 1], rtol=4 * np.finfo("float16").eps)


@pytest.mark.parametrize(
    ("gpu", "step", "calls"),
    [
        ("double", 256, 12),
        pytest.param("device", 256, 100, marks=pytest.mark.gpu),
        pytest.param("device", 9_000_000, 100, marks=pytest.mark.gpu),
    ],
    indirect=["gpu"],
)
@ALGORITHMS
def test_back_to_back_calls_do_not_mix(world, gpu, name, step, calls):
    with on_two_nodes(world, name) as comm:
        comm.set_config("chunk_bytes", 1024 if step == 256 else None)
        for call in range(calls):
            mean = mean_of(comm, np.full(call % 3 * step + 5, comm.rank + call, "f4"))
            # NCCL's terms are divided before they are summed, so that thirds are
            # rounded.
            np.testing.assert_allclose(mean, call + (world.size - 1) / 2, rtol=1e-6)


@pytest.mark.sizes(2, 3, 4)
@named("flat", "hierarchical", "pure_nccl")
def test_planned_buckets_come_after_their_gradients_on_another_stream(world, gpu, name):
    """With zeros where one is missing; parameters get the means when they are assigned."""
    import cupy

    with on_two_nodes(world, name) as comm, comm.split(0, comm.rank) as channel:
        null = cupy.cuda.get_current_stream()
        hosts = [np.full(size, comm.rank + size, "f4") for size in (5, 700, 9)]
        grads = [put(np.zeros_like(host)) for host in hosts]
        pinned = [gpus.pinned(host.nbytes) for host in hosts]
        a, b, c = (
            Param(put(np.zeros_like(host)), grad)
            for host, grad in zip(hosts, grads, strict=True)
        )
        c.grad = None if comm.rank == 0 else grads[2]
        reducer = comm.make_reducer(True, "allreduce_grad", channel)
        works = []
        for bucket in (Model(a=a, c=c), Model(b=b)):
            for host, memory, grad in zip(hosts, pinned, grads, strict=True):
                memory[...] = host.view(np.uint8)
                # Which the null stream does late.
                gpus.copy_to_device(memory, grad, null)
            works.append(reducer.add_planned(bucket))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for work in works:
                work.wait()
        over = cupy.cuda.Event(disable_timing=True)
        over.record(stream)
        null.wait_event(over)
        reducer.agree()
        assert a.grad is grads[0]
        assert b.grad is grads[1]
        for work in works:
            work.assign()
        means = [gpus.to_host(param.grad) for param in (a, b, c)]
        average = (comm.size - 1) / 2
        np.testing.assert_allclose(means[0], average + 5, rtol=1e-6)
        np.testing.assert_allclose(means[1], average + 700, rtol=1e-6)
        np.testing.assert_allclose(
            means[2], average + 9 * (comm.size - 1) / comm.size, rtol=1e-6
        )
        assert [gpus.to_host(grad)[0] for grad in grads] == [host[0] for host in hosts]


def test_a_gradient_is_averaged_in_place_or_replaced(world, one_each):
    plain, other = (put(np.full((2, 3), world.rank, "f4")) for _ in range(2))
    both = put(np.full(4, world.rank, "f4"))
    grads = {"plain": plain, "turned": other.T, "one": both, "two": both}
    model = Model(**{name: Param(grad, grad) for name, grad in grads.items()})
    with create_communicator("pure_nccl") as comm:
        comm.allreduce_grad(model)
    assert model["plain"].grad is plain
    for name in ("turned", "one", "two"):
        assert model[name].grad.flags.c_contiguous
        np.testing.assert_allclose(gpus.to_host(model[name].grad), (world.size - 1) / 2)
    assert gpus.address(model["one"].grad) != gpus.address(model["two"].grad)


@pytest.mark.sizes(2, 3, 4)
def test_new_gradients_lie_on_their_parameters_device_whichever_is_current(
    world, double
):
    import cupy

    double.count = 2
    with create_communicator("pure_nccl") as comm:
        for zero_fill in (False, True):
            turned = put(np.full((2, 3), comm.rank, "f4")).T
            missing = put(np.ones(2, "f4")) if comm.rank or not zero_fill else None
            data = [put(np.zeros((3, 2), "f4")), put(np.zeros(2, "f4"))]
            model = Model(a=Param(data[0], turned), b=Param(data[1], missing))
            comm.allreduce_grad(Model(a=Param(data[0], put(np.ones((3, 2), "f4")))))
            with cupy.cuda.Device(1):
                comm.allreduce_grad(model, zero_fill)
            assert [model[name].grad.device.id for name in "ab"] == [0, 0]
            mean = gpus.to_host(model["a"].grad)
            np.testing.assert_allclose(mean, (world.size - 1) / 2, rtol=1e-6)


def test_a_split_takes_the_same_way_and_keeps_settings(world, one_each):
    with create_communicator("pure_nccl", allreduce_grad_dtype="float16") as comm:
        with comm.split(comm.rank % 2, -comm.rank) as part:
            assert part.get_config() == comm.get_config()
            assert_mean(part)
            mean = mean_of(part, np.full(2, comm.rank, "f4"))
            expected = np.mean(part.allgather_obj(comm.rank))
            np.testing.assert_allclose(mean, [expected, expected], rtol=2e-3)
        np.testing.assert_allclose(mean_of(comm, np.ones(2, "f4")), 1, rtol=2e-3)


def test_device_memory_is_a_few_chunks(world, one_each):
    with create_communicator("hierarchical") as comm:
        comm.set_config("chunk_bytes", 1 << 16)
        grad = put(np.ones(1 << 17, "f4"))
        before, _ = gpus.memory_in_use()
        comm.allreduce_grad(Model(w=Param(grad, grad)))
        after, _ = gpus.memory_in_use()
        assert 0 < after - before < 3 << 16


# NCCL and CUDA may keep some memory for later; one communicator of NCCL's takes
# megabytes.
MIB_LEFT = 64
LENGTHS = [
    pytest.param(3, marks=pytest.mark.ranks(2)),
    # More take minutes.
    pytest.param(500, marks=[pytest.mark.full, pytest.mark.sizes(1, 2)]),
]


@pytest.mark.ci
@pytest.mark.parametrize("times", LENGTHS)
@pytest.mark.parametrize("name", ["flat", "two_dimensional", "pure_nccl"])
def test_communicators_leave_nothing_behind(world, gpu, name, times):
    real, numbers, in_nccl = isinstance(gpu, Real), set(), {}

    def make(times: int) -> tuple[int, int]:
        for _ in range(times):
            with on_two_nodes(world, name) as comm, comm.split(0, comm.rank) as part:
                assert_mean(comm, 100)
                assert_mean(part, 100)
                between = (comm.intra_size > 1) + (comm.inter_size > 1)
                in_nccl.update(pure_nccl=comm.size > 1, two_dimensional=between)
            own = world.Dup()
            numbers.add(own.py2f())
            own.Free()
            if not real:
                del gpu.streams[1:]  # the double's own list
        world.Barrier()  # ranks may share the device
        found = gpus.memory_in_use()
        world.Barrier()
        return found

    gpu.delay = 0
    # Where ranks share a device, NCCL takes half a second to connect them.
    few = real and gpu.is_shared
    before = make((2 if few else 10) if real else 1)
    after = make((10 if few else 60) if real else times)
    if real:
        assert after[0] <= before[0]
        assert after[1] - before[1] < MIB_LEFT << 20
    else:
        assert after == (0, 0)
        assert not gpu.pinned
        assert gpu.calls.count("destroy") == (2 * times + 2) * in_nccl.get(name, 0)
    assert len(numbers) < 100  # MPI's communicators were freed, too
