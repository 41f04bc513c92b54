"""Means of gradients on GPUs: any model over any topology, by the algorithms that names promise."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose

from chainermn_comm import create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.gpus import (
    NCCL,
    STAGED,
    assert_mean,
    mean_of,
    put,
)
from tests.support.oracles.drawn_models import (
    DTYPES,
    check_model,
    gradients,
    has,
    models,
)
from tests.support.worlds.models import Model, Param
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


def named(*names):
    marks = {name: pytest.mark.ranks(ranks) for name, ranks in RANKS.items()}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks.get(name, ())) for name in names]
    )


# Each name of these has an algorithm of its own.
ALGORITHMS = named("flat", "hierarchical", "two_dimensional", "pure_nccl")


def on_two_nodes(world, name):
    """A communicator over two nodes; skips where NCCL has no device for each rank."""
    if name in NCCL:
        gpus.one_each(world)
    return on_nodes(IMPOSED[world.size][:2][-1], name)


def run(comm, entries, zero_fill):
    arrays = gradients(entries, comm.rank)
    # Those that are one array in host memory are one on the device, too.
    there = {
        id(a): put(a, entry.layout) for entry, a in zip(entries, arrays, strict=True)
    }
    model = Model()
    for index, (entry, array) in enumerate(zip(entries, arrays, strict=True)):
        param = Param(put(np.zeros(entry.shape, entry.dtype)))
        if has(entry, comm.rank, zero_fill):
            param.grad = there[id(array)]
        model.params[f"p{index:03}"] = param
    comm.multi_node_mean_grad(model, zero_fill)
    grads = [param.grad for param in model.params.values()]
    for grad in grads:
        assert grad is None or gpus.on_gpu(grad)
    return [None if grad is None else gpus.to_host(grad) for grad in grads]


# The other names take the algorithms of these.
EXAMPLES = dict(naive=5, single_node=5, non_cuda_aware=5)


@pytest.mark.ci
@pytest.mark.parametrize(
    "times", [1, pytest.param(10, marks=pytest.mark.full, id="at length")]
)
@named(*STAGED, *NCCL)
def test_any_model_over_any_topology(world, gpu, name, times):
    if name in NCCL:
        gpus.one_each(world)
    comms = {}
    with ExitStack() as stack:
        topologies = IMPOSED[world.size]
        if name not in BY_NODES:
            topologies = topologies[:1]
        for case in product(topologies, (None, 1 << 14)):  # one chunk, or many
            comms[case] = stack.enter_context(on_nodes(case[0], name))
            comms[case].set_config("chunk_bytes", case[1])
        wires = st.sampled_from([None, *DTYPES])

        @settings(max_examples=times * EXAMPLES.get(name, 20))
        @given(MODELS, st.sampled_from(list(comms)), wires, st.booleans())
        def check(entries, case, wire, zero_fill):
            comm = comms[case]
            check_model(
                comm, lambda: run(comm, entries, zero_fill), entries, wire, zero_fill
            )

        check()


# For a chunk, on the first rank of a node.
CALLS = {
    "naive": "",
    "flat": "",
    "pure_nccl": "pack_f allReduce unpack_f",
    "single_node": "pack_f allReduce unpack_f",
    "hierarchical": "pack_f reduce allReduce broadcast unpack_f",
    "non_cuda_aware": "pack_f reduce broadcast unpack_f",
    "two_dimensional": "pack_f reduce reduce allReduce broadcast broadcast unpack_f",
}


@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", CALLS)
def test_each_name_makes_the_nccl_calls_that_it_promises(world, double, name):
    nodes = (0, 1, 0, 1)
    if name == "single_node":
        nodes = (0, 0, 0, 0)
    expected = CALLS[name].split()
    with on_nodes(nodes, name) as comm:
        assert_mean(comm)
        if name == "hierarchical" and comm.intra_rank:
            expected.remove("allReduce")
        assert double.calls == expected


def test_values_are_divided_before_nccl_sums_them(world, one_each):
    # The last bits of the range may be lost.
    large = np.finfo("float16").max * np.float16(0.99)
    with create_communicator("pure_nccl", allreduce_grad_dtype="float16") as comm:
        mean = mean_of(comm, np.array([large, 1], "float16"))
    assert_allclose(mean, [large, 1], rtol=4 * np.finfo("float16").eps)


# The unit of rounding, and the smallest number.
SIXTEEN_BITS = {"float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-133)}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("exponent", [0, -12, -20, 10])
@pytest.mark.parametrize("wire", SIXTEEN_BITS)
def test_in_16_bits_a_mean_is_within_its_bound(world, one_each, wire, exponent):
    """That of docs/decisions/gpus.md."""
    rows = []
    for rank in range(world.size):
        numbers = default_rng(rank).standard_normal(5000)
        rows.append(np.ldexp(numbers, exponent).astype("f4"))
    nodes = IMPOSED[world.size][-1]
    with on_nodes(nodes, allreduce_grad_dtype=wire) as comm:
        mean = mean_of(comm, rows[comm.rank])
    terms = np.array(rows).astype("f8")
    unit, smallest = SIXTEEN_BITS[wire]
    each = unit * abs(terms).mean(0) + smallest / 2
    bound = 1.01 * world.size * each
    assert np.all(abs(mean - terms.mean(0)) <= bound)


@pytest.mark.sizes(2, 3, 4)
@named("flat", "hierarchical", "pure_nccl")
def test_planned_buckets_come_after_their_gradients_on_another_stream(world, gpu, name):
    """With zeros where one is missing; parameters get the means when they are assigned."""
    import cupy

    with on_two_nodes(world, name) as comm, comm.split(0, comm.rank) as channel:
        null = cupy.cuda.get_current_stream()
        pinned = gpus.pinned(2000)
        pinned.view("f4")[:] = comm.rank
        params = [Param(put(np.zeros(500, "f4"))) for _ in range(3)]
        reducer = comm.make_reducer(True, "allreduce_grad", channel)
        works = []
        for number, param in enumerate(params):
            if comm.rank or number:
                param.grad = put(np.zeros(500, "f4"))
                # Which the null stream does late.
                gpus.copy_to_device(pinned, param.grad, null)
            works.append(reducer.add_planned(Model(w=param)))
        grads = [param.grad for param in params]
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for work in works:
                work.wait()
        over = cupy.cuda.Event(disable_timing=True)
        over.record(stream)
        null.wait_event(over)
        reducer.agree()
        for param, grad in zip(params, grads, strict=True):
            assert param.grad is grad
        for work in works:
            work.assign()
        for param in params:
            mean = gpus.to_host(param.grad)
            assert_allclose(mean, (comm.size - 1) / 2, rtol=1e-6)
        assert set(gpus.to_host(grads[1])) == {comm.rank}


def test_a_gradient_is_averaged_in_place_or_replaced(world, one_each):
    plain = put(np.full((2, 3), world.rank, "f4"))
    other = put(np.full((2, 3), world.rank, "f4"))
    both = put(np.full(4, world.rank, "f4"))
    grads = {"plain": plain, "turned": other.T, "one": both, "two": both}
    model = Model(**{name: Param(grad, grad) for name, grad in grads.items()})
    with create_communicator("pure_nccl") as comm:
        comm.allreduce_grad(model)
    assert model["plain"].grad is plain
    for name in ("turned", "one", "two"):
        assert model[name].grad.flags.c_contiguous
        assert_allclose(gpus.to_host(model[name].grad), (world.size - 1) / 2)
    assert gpus.address(model["one"].grad) != gpus.address(model["two"].grad)


@pytest.mark.sizes(2, 3, 4)
def test_new_gradients_lie_on_their_parameters_device_whichever_is_current(
    world, double
):
    """Means of what is transposed, and zeros where one is missing."""
    import cupy

    double.count = 2
    with create_communicator("pure_nccl") as comm:
        assert_mean(comm)  # on device 0
        turned = put(np.full((2, 3), comm.rank, "f4")).T
        model = Model(a=Param(put(np.zeros((3, 2), "f4")), turned))
        model.params["b"] = Param(put(np.zeros(2, "f4")))
        if comm.rank:
            model["b"].grad = put(np.full(2, comm.rank, "f4"))
        with cupy.cuda.Device(1):
            comm.allreduce_grad(model, zero_fill=True)
        for param in model.params.values():
            assert param.grad.device.id == 0
            mean = gpus.to_host(param.grad)
            assert_allclose(mean, (comm.size - 1) / 2, rtol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("times", [3, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("name", ["flat", "two_dimensional", "pure_nccl"])
def test_communicators_leave_nothing_behind(world, double, name, times):
    double.delay = 0
    numbers = set()
    for _ in range(times):
        with on_two_nodes(world, name) as comm, comm.split(0, comm.rank) as part:
            for each in (comm, part):
                assert_mean(each, 100)
                each.allreduce(put(np.ones(3, "f4")))
        own = world.Dup()
        numbers.add(own.py2f())
        own.Free()
        del double.streams[1:]  # the double's own list
    assert gpus.memory_in_use() == (0, 0)
    assert not double.pinned
    assert double.calls.count("destroy") == double.made.count("commInitRank")
    assert len(numbers) < 100  # MPI's communicators were freed, too
