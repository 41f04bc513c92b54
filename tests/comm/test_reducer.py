"""A mean of gradients in steps: the bits of the whole model's, whatever goes between them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from chainermn_comm import (
    FinalizedError,
    RankMismatchError,
    create_communicator,
)
from tests.support.oracles.drawn_models import digest
from tests.support.worlds.models import Model, Param, check_mean, finish, with_grads
from tests.support.worlds.third_party import PlainCommunicator
from tests.support.worlds.topologies import on_nodes

pytestmark = pytest.mark.world

# Small and large (more than 1 MiB) arrays, 0-d, empty, and of several dtypes.
ARRAYS = {
    "a": ((7, 5), "f4"),
    "b": (((1 << 18) + 3,), "f4"),
    "c": ((), "f8"),
    "d": ((0,), "f4"),
    "e": ((300, 500), "f8"),
    "g": ((40,), "f2"),
    "h": ((3, 2), "f4"),
}
# In no order of names. Some are of one dtype, large and small, and one is of several.
BUCKETS = ("b", "e", "gca", "hd")
OURS = {
    "flat": lambda world: create_communicator("flat", world),
    "one node": lambda world: create_communicator("hierarchical", world),
    "nodes": lambda world: on_nodes(range(world.size)),
}
MAKERS = {**OURS, "third party": lambda world: PlainCommunicator(world.Dup())}
with_third_party = pytest.mark.parametrize("comm", MAKERS, indirect=True)
several_ranks = pytest.mark.sizes(2, 3, 4)


@pytest.fixture(params=OURS)
def comm(request, world):
    with MAKERS[request.param](world) as communicator:
        # All is made that a test may need while a thread communicates.
        check_mean(communicator)
        yield communicator


def buckets_of(rank, missing=""):
    """A rank's gradients, some of which are missing."""
    random = default_rng(rank)
    grads = {}
    for name, (shape, dtype) in ARRAYS.items():
        grads[name] = np.asarray(random.standard_normal(shape), dtype)
    model = with_grads(**grads)
    for name in missing:
        model[name].grad = None
    return [Model(**{name: model[name] for name in names}) for names in BUCKETS]


def whole(buckets):
    params = {}
    for bucket in buckets:
        params |= bucket.params
    return Model(**params)


def bits(*buckets):
    params = whole(buckets).params
    return {name: digest([param.grad]) for name, param in params.items()}


def expected(comm, missing="", zero_fill=False):
    """The bits of the whole model's mean, taken at once (collective)."""
    model = whole(buckets_of(comm.rank, missing))
    comm.multi_node_mean_grad(model, zero_fill)
    return bits(model)


@pytest.mark.sizes(2, 3)
def test_settings_that_change_meanwhile_are_of_later_means(world):
    value = np.float32(1 + 2**-12)  # 1 in float16
    with create_communicator("flat") as comm, comm.split(0, comm.rank) as channel:
        model = with_grads(a=np.full(9, value))
        reducer = comm.make_reducer(channel=channel)
        reducer.add(model)
        if comm.rank == 1:
            comm.set_config("allreduce_grad_dtype", "float16")
        finish(reducer)
        assert_array_equal(model["a"].grad, value)


@with_third_party
def test_any_thread_may_wait_for_means_through_another_communicator(comm):
    """A second wait returns with the first one, and a later one at once, on one rank alone."""
    missing = "ceb"[comm.rank % 3]
    buckets = buckets_of(comm.rank, missing)
    with ThreadPoolExecutor(2) as threads, comm.split(0, comm.rank) as channel:
        reducer = comm.make_reducer(zero_fill=True, channel=channel)
        for bucket in buckets:
            reducer.add(bucket)
        reducer.agree()
        work = reducer.start()
        waiting = [threads.submit(work.wait) for _ in range(2)]
        check_mean(comm)
        for each in waiting:
            each.result()
        if comm.rank == 0:
            work.wait()
        work.assign()
    assert bits(*buckets) == expected(comm, missing, zero_fill=True)


class Refused(Exception):
    """An error that can't be made of its text alone."""

    def __init__(self, number, *, reason):
        super().__init__(f"{number}: {reason}")
        self.reason = reason


@pytest.mark.parametrize(
    "error", [Refused(3, reason="none"), KeyboardInterrupt("by hand")]
)
def test_what_a_wait_raised_it_and_assign_raise_again(world, error):
    class Failing(PlainCommunicator):
        calls = 0

        def multi_node_mean_grad(self, model, zero_fill=False):
            self.calls += 1
            raise error

    comm = Failing(world.Dup())
    reducer = comm.make_reducer()
    reducer.add(with_grads(w=np.ones(3, "f4")))
    reducer.agree()
    work = reducer.start()
    for call in (work.wait, work.wait, work.assign):
        with pytest.raises(type(error), match=str(error)) as caught:
            call()
        assert vars(caught.value) == vars(error)
    assert comm.calls == 1


@with_third_party
def test_steps_in_another_order_are_refused(comm):
    model = with_grads(w=np.full(3, comm.rank, "f4"))
    own = model["w"].grad
    own.flags.writeable = False
    reducer = comm.make_reducer()
    reducer.add(model)
    with pytest.raises(RuntimeError, match=r"allreduce_grad: agree\(\) before start"):
        reducer.start()
    reducer.agree()
    with pytest.raises(RuntimeError, match=r"allreduce_grad: add\(\) after agree"):
        reducer.add(model)
    work = reducer.start()
    with pytest.raises(RuntimeError, match=r"once its wait\(\) has ended"):
        work.assign()
    work.wait()
    if not isinstance(comm, PlainCommunicator):  # which assigns as it waits
        assert model["w"].grad is own
    work.assign()
    assert_array_equal(own, comm.rank)
    assert_array_equal(model["w"].grad, (comm.size - 1) / 2)


def test_after_finalize_it_says_so(world):
    comm = create_communicator("hierarchical", world)
    check_mean(comm)
    late = comm.make_reducer()
    late.add(with_grads(w=np.ones(3, "f4")))
    reducer = comm.make_reducer()
    reducer.add(with_grads(w=np.ones(3, "f4")))
    reducer.agree()
    work = reducer.start()
    comm.finalize()
    for call in (late.agree, work.wait):
        with pytest.raises(FinalizedError, match=f"rank {world.rank}: .*finalized"):
            call()


@several_ranks
@with_third_party
def test_a_rank_without_gradients_is_known_to_all(comm):
    reducer = comm.make_reducer()
    if comm.rank < comm.size - 1:
        reducer.add(with_grads(w=np.ones(3)))
    assert reducer.agree(payload=b"equal") == [b"equal"] * comm.size
    assert not reducer.complete
    with pytest.raises(RankMismatchError, match=r"gradients: .*none on rank"):
        reducer.start()
    check_mean(comm)


GRAD = np.ones(3, "f4")
# Parameters of a later bucket, and those that differ from them.
RIGHT = [("/w", Param(GRAD, GRAD))]
WRONG = {"name": [("/x", RIGHT[0][1])], "missing": [("/w", Param(GRAD))]}
WRONG["twice"] = RIGHT * 2


@several_ranks
@pytest.mark.parametrize("what", ["operation", "step", *WRONG])
def test_what_differs_is_told_on_all(comm, what):
    odd = ""
    if comm.rank == comm.size - 1:
        odd = what
    params = WRONG.get(odd, RIGHT)
    entry = what
    if what in WRONG:
        entry = "parameter"
    with comm.split(0, comm.rank) as channel:
        operation = f"save {odd == 'operation'}"
        reducer = comm.make_reducer(operation=operation, channel=channel)
        reducer.add(with_grads(first=np.ones(2, "f4")))
        reducer.add(SimpleNamespace(namedparams=lambda: params))
        with pytest.raises(RankMismatchError, match=f"ranks disagree on {entry}: "):
            reducer.agree((("step", odd == "step"),))
        check_mean(comm)
        check_mean(channel)


@with_third_party
@pytest.mark.parametrize(
    ("on_all", "on_one", "zero_fill"),
    [("", "", False), ("ahdb", "", False), ("ah", "ceb", True)],
)
def test_buckets_get_the_bits_of_the_whole_model(comm, on_all, on_one, zero_fill):
    """Missing gradients stay so, or count as zeros; payloads are as long as they may be."""
    missing = on_all + on_one[comm.rank % 3 :][:1]
    buckets = buckets_of(comm.rank, missing)
    reducer = comm.make_reducer(zero_fill)
    assert not reducer.complete
    payloads = [bytes([rank]) * (64 - rank) for rank in range(comm.size)]
    found = finish(reducer, *buckets, payload=payloads[comm.rank])
    assert found == payloads
    assert reducer.complete
    assert bits(*buckets) == expected(comm, missing, zero_fill)


@pytest.mark.parametrize(("on_all", "on_one"), [("ah", ""), ("a", "ebg")])
def test_planned_buckets_are_reduced_in_a_thread_as_they_come(comm, on_all, on_one):
    """What a rank has stays as it was, until it takes the means."""
    missing = on_all + on_one[comm.rank % 3 :][:1]
    with comm.split(0, comm.rank) as channel, ThreadPoolExecutor(1) as thread:
        for _ in range(2):  # what was made is used again
            buckets = buckets_of(comm.rank, missing)
            own = {name: it.grad for name, it in whole(buckets).params.items()}
            reducer = comm.make_reducer(on_one != "", channel=channel)
            works = []
            for bucket in buckets:
                check_mean(comm)  # the thread may wait meanwhile
                works.append(reducer.add_planned(bucket))
                thread.submit(works[-1].wait)
            payloads = [bytes([rank]) for rank in range(comm.size)]
            assert reducer.agree(payload=payloads[comm.rank]) == payloads
            thread.submit(works[-1].wait).result()
            assert bits(*buckets) == bits(*buckets_of(comm.rank, missing))
            for work in works:
                work.assign()
            assert bits(*buckets) == expected(comm, missing, on_one != "")
            for name, param in whole(buckets).params.items():
                if own[name] is not None:
                    assert not np.shares_memory(param.grad, own[name])
                    assert param.grad.flags.writeable


@several_ranks
def test_planned_gradients_that_one_rank_lacks_are_told_on_all_without_zero_fill(comm):
    """They travelled as zeros, but no parameter gets the means."""
    model = with_grads(e=np.ones(9, "f4"))
    own = model["e"].grad
    if comm.rank == 0:
        model["e"].grad = None
    with comm.split(0, comm.rank) as channel:
        reducer = comm.make_reducer(channel=channel)
        reducer.add_planned(model).wait()
        with pytest.raises(RankMismatchError, match=r"/e .* no gradient on rank 0"):
            reducer.agree()
        assert_array_equal(own, 1)
