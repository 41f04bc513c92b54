"""When users' arrays go by NCCL, and when by the host; beside means, on streams, to the end."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.testing import assert_allclose

from chainermn_comm import create_communicator
from tests.support.doubles import gpus
from tests.support.jobs.scripts import ROOT
from tests.support.oracles.samples import same, sample
from tests.support.oracles.verbs import check
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.ranks(1, 2, 3, 4)]


@pytest.fixture
def comm(double):
    with create_communicator("hierarchical") as communicator:
        yield communicator


def by_host(comm, double):
    """Assert that arrays on GPUs go through host memory (collective)."""
    double.copied_to_host = 0
    check_allgather(comm)
    assert double.copied_to_host > 0


def check_allgather(comm):
    for rank, array in enumerate(comm.allgather(gpus.put_sample(comm.rank))):
        same(gpus.to_host(array), sample(rank, "float32"))


def by_nccl(comm, double):
    double.copied_to_host = 0
    check_allgather(comm)
    assert double.copied_to_host == 0


@pytest.mark.sizes(2, 3, 4)
def test_one_rank_decides_for_all(comm, double):
    """That has means taken in a thread of its own, or calls in another one."""
    last = comm.rank == comm.size - 1
    by_nccl(comm, double)
    with gpus.nccl_in_background(last):
        by_host(comm, double)
    with ThreadPoolExecutor(1) as thread:
        if last:
            thread.submit(by_host, comm, double).result()
        else:
            by_host(comm, double)
    by_nccl(comm, double)


@pytest.mark.sizes(2, 3, 4)
def test_nothing_uses_nccl_where_gradients_do_not(world, double):
    for name, nodes in (("naive", 0), ("flat", 0), ("non_cuda_aware", 1)):
        with on_nodes([rank * nodes for rank in range(world.size)], name) as comm:
            by_host(comm, double)
    with create_communicator("hierarchical", reproducible=True) as comm:
        by_host(comm, double)
    assert "commInitRank" not in double.made


def test_results_are_enqueued_on_the_current_stream(comm, double):
    import cupy

    comm.allreduce(gpus.put(np.ones(1, "f4")))  # NCCL connects
    with cupy.cuda.Stream(non_blocking=True):
        double.host_waits = 0
        found = comm.bcast(comm.allreduce(gpus.put_sample(comm.rank)))
        assert double.host_waits == 0
        expected = sum(sample(rank, "float32") for rank in range(comm.size))
        same(gpus.to_host(found), expected)


def test_what_ranks_get_of_a_sum_may_differ_in_shape(comm, double):
    def given(rank, to):
        return np.full((2 + 3 * to, 5), 7 * rank + to, "f4")

    me = comm.rank
    ranks = range(comm.size)
    found = comm.reduce_scatter([gpus.put(given(me, to)) for to in ranks])
    assert double.copied_to_host == 0
    expected = sum(given(rank, me) for rank in ranks)
    same(gpus.to_host(found), expected)


def full(comm, size, number):
    """A rank's array, whose mean over ranks :func:`check_means` knows."""
    return np.full(size, comm.rank + number, "f4")


def check_means(comm, model, number):
    for param in model.params.values():
        mean = number + (comm.size - 1) / 2
        assert_allclose(gpus.to_host(param.grad), mean, rtol=1e-6)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("during_backward", [True, False])
def test_sums_beside_means_in_a_thread_do_not_deadlock(world, gpu, during_backward):
    """As batch normalization's, while gradients leave: NCCL works at one of both at a time."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)

    def take(work):
        with stream:
            work.wait()

    with (
        create_communicator("hierarchical") as comm,
        comm.split(0, comm.rank) as channel,
        ThreadPoolExecutor(1) as thread,
    ):
        for step in range(6):
            thread_begins = (comm.rank + step) % 2 == 0  # not on all ranks
            models = [
                gpus.model_of([full(comm, size, step)]) for size in (3000, 5, 700)
            ]
            reducer = comm.make_reducer(False, "allreduce_grad", channel)
            if not during_backward:
                for model in models:
                    reducer.add(model)
                reducer.agree()
            works = []
            done = []
            for model in models if during_backward else models[:1]:
                if during_backward:
                    works.append(reducer.add_planned(model))
                else:
                    works.append(reducer.start())
                if not thread_begins:
                    check_sum(comm)
                done.append(thread.submit(take, works[-1]))
                if thread_begins:
                    check_sum(comm)
            for each in done:
                each.result()
            if during_backward:
                reducer.agree()
            cupy.cuda.get_current_stream().wait_event(event_of(stream))
            for work in works:
                work.assign()
            check_sum(comm)
            for model in models:
                check_means(comm, model, step)


def event_of(stream):
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def check_sum(comm):
    found = comm.allreduce(gpus.put(np.full(9, comm.rank, "f4")))
    assert set(gpus.to_host(found)) == {sum(range(comm.size))}


@pytest.fixture
def by_pickles():
    """The backend that CONTRIBUTING.md shows, and its communicator's name meanwhile."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = {}
    block = re.search(r"^### A backend\n.*?```python\n(.*?)```", text, re.S | re.M)[1]
    exec(
        block,
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
