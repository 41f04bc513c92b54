"""When users' arrays go by NCCL, and when by the host; beside means, on streams, to the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.doubles import gpus
from tests.support.jobs.scripts import ROOT
from tests.support.oracles.samples import same, sample
from tests.support.oracles.verbs import check
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.ranks(1, 2, 3, 4)]


@pytest.fixture
def comm(double) -> Iterator:
    with create_communicator("hierarchical") as communicator:
        yield communicator


def by_host(comm, double, mine) -> None:
    """Assert that such an array of this rank's goes through host memory (collective)."""
    double.copied_to_host = 0
    found = comm.allgather(mine)
    assert comm.allreduce_obj(double.copied_to_host) > 0
    assert [gpus.on_gpu(array) for array in found] == comm.allgather_obj(
        gpus.on_gpu(mine)
    )
    for rank, array in enumerate(found):
        same(
            gpus.to_host(array) if gpus.on_gpu(array) else array,
            sample(rank, "float32"),
        )


def by_nccl(comm, double) -> None:
    double.copied_to_host = 0
    found = comm.allgather(gpus.put(sample(comm.rank, "float32")))
    assert double.copied_to_host == 0
    for rank, array in enumerate(found):
        same(gpus.to_host(array), sample(rank, "float32"))


@pytest.mark.sizes(2, 3, 4)
def test_one_rank_decides_for_all(comm, double):
    """That has means taken in a thread of its own, or calls in another one."""
    array, last = sample(comm.rank, "float32"), comm.rank == comm.size - 1
    by_nccl(comm, double)
    with gpus.nccl_in_background(last):
        by_host(comm, double, gpus.put(array))
    with ThreadPoolExecutor(1) as thread:
        if last:
            thread.submit(by_host, comm, double, gpus.put(array)).result()
        else:
            by_host(comm, double, gpus.put(array))
    by_nccl(comm, double)


@pytest.mark.sizes(2, 3, 4)
def test_nothing_uses_nccl_where_gradients_do_not(world, double):
    for name, nodes in (("naive", 0), ("flat", 0), ("non_cuda_aware", 1)):
        with on_nodes([rank * nodes for rank in range(world.size)], name) as comm:
            by_host(comm, double, gpus.put(sample(comm.rank, "float32")))
    with create_communicator("hierarchical", reproducible=True) as comm:
        by_host(comm, double, gpus.put(sample(comm.rank, "float32")))
    assert "commInitRank" not in double.made


def test_what_ranks_get_of_a_sum_may_differ_in_shape(comm, double):
    def given(rank: int, to: int) -> np.ndarray:
        return np.full((2 + 3 * to, 5), 7 * rank + to, "f4")

    me, ranks = comm.rank, range(comm.size)
    found = comm.reduce_scatter([gpus.put(given(me, to)) for to in ranks])
    assert double.copied_to_host == 0
    same(gpus.to_host(found), sum(given(rank, me) for rank in ranks))


def test_results_follow_the_current_stream(comm, double):
    import cupy

    array, host = gpus.put(np.zeros(5000, "f4")), gpus.pinned(20_000)
    host.view("f4")[:] = comm.rank + 1
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gpus.copy_to_device(host, array, stream)  # later
        double.host_waits = 0
        found = comm.allreduce(array)
        found = comm.bcast(found)
        assert double.host_waits == 0
        assert set(gpus.to_host(found)) == {sum(range(comm.size + 1))}


def test_after_finalize_nothing_is_left(double):
    with create_communicator("hierarchical") as comm:
        by_nccl(comm, double)
        part = comm.split(0, comm.rank)
        by_nccl(part, double)
        part.finalize()
    assert double.calls.count("destroy") == 2
    assert gpus.memory_in_use() == (0, 0)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("during_backward", [True, False])
def test_sums_beside_means_in_a_thread_do_not_deadlock(world, gpu, during_backward):
    """As batch normalization's, while gradients leave: NCCL works at one of both at a time."""
    import cupy

    steps, sizes = 6, (3000, 5, 700)

    def take(stream, work) -> None:
        with stream:
            work.wait()

    with (
        create_communicator("hierarchical") as comm,
        comm.split(0, comm.rank) as channel,
        ThreadPoolExecutor(1) as thread,
    ):
        stream = cupy.cuda.Stream(non_blocking=True)
        for step in range(steps):
            check_sum(comm)
            grads = [gpus.put(np.full(size, comm.rank + step, "f4")) for size in sizes]
            params = [
                Param(gpus.put(np.zeros(grad.size, "f4")), grad) for grad in grads
            ]
            reducer = comm.make_reducer(False, "allreduce_grad", channel)
            models = [
                Model(**{f"p{number}": param}) for number, param in enumerate(params)
            ]
            if not during_backward:
                for model in models:
                    reducer.add(model)
                reducer.agree()
            works, done = [], []
            for model in models if during_backward else models[:1]:
                if during_backward:
                    works.append(reducer.add_planned(model))
                else:
                    works.append(reducer.start())
                if (comm.rank + step) % 2:  # on one rank the thread begins first
                    check_sum(comm)
                done.append(thread.submit(take, stream, works[-1]))
                if not (comm.rank + step) % 2:
                    check_sum(comm)
                check_sum(comm)
            for each in done:
                each.result()
            event = cupy.cuda.Event(disable_timing=True)
            event.record(stream)
            cupy.cuda.get_current_stream().wait_event(event)
            if during_backward:
                reducer.agree()
            for work in works:
                work.assign()
            check_sum(comm)
            for param in params:
                np.testing.assert_allclose(
                    gpus.to_host(param.grad), step + (comm.size - 1) / 2, rtol=1e-6
                )


@pytest.mark.sizes(2, 3)
def test_means_in_two_threads_and_the_main_one_keep_the_order_of_their_starts(
    world, gpu
):
    """As those of two optimizers with double buffering, and of a third one without."""
    import cupy

    def model_of(number: int) -> Model:
        grad = gpus.put(np.full(3000, world.rank + number, "f4"))
        return Model(w=Param(gpus.put(np.zeros(3000, "f4")), grad))

    def take(work) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            work.wait()
            work.assign()

    with (
        create_communicator("hierarchical") as comm,
        comm.split(0, comm.rank) as first,
        comm.split(0, comm.rank) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        for step in range(6):
            models, works = [model_of(number) for number in range(3)], []
            for model, channel in zip(models, (first, second), strict=False):
                reducer = comm.make_reducer(False, "allreduce_grad", channel)
                reducer.add(model)
                reducer.agree()
                works.append(reducer.start())
            for work in works:
                with pytest.raises(RuntimeError, match="once its wait"):
                    work.assign()
            on_odd_ranks = -1 if (comm.rank + step) % 2 else 1
            done = [threads.submit(take, work) for work in works[::on_odd_ranks]]
            comm.allreduce_grad(models[2])
            for work in works:
                work.assign()  # as its wait has ended
            for each in done:
                each.result()
            for number, model in enumerate(models):
                found = set(gpus.to_host(model["w"].grad))
                assert found == {np.float32(number + (comm.size - 1) / 2)}


def check_sum(comm) -> None:
    found = comm.allreduce(gpus.put(np.full(9, comm.rank, "f4")))
    assert set(gpus.to_host(found)) == {sum(range(comm.size))}


@pytest.fixture
def by_pickles() -> Iterator[type]:
    """The backend that CONTRIBUTING.md shows, and its communicator's name meanwhile."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = {}
    exec(
        re.search(r"^### A backend\n.*?```python\n(.*?)```", text, re.S | re.M)[1],
        names,
    )
    yield names["ByPickles"]
    del names["COMMUNICATORS"]["by_pickles"]


@pytest.mark.sizes(2, 3)
@pytest.mark.ranks(2)
def test_what_contributing_shows_is_a_backend(world, gpu, by_pickles):
    used = []
    by_pickles.connect = lambda _: used.append(1) or True
    with create_communicator("by_pickles") as comm:
        check(comm, [True] * comm.size, [("float32", "C"), ("float32", "F")])
        gpus.assert_mean(comm)
    assert used
