"""A mean of gradients in steps: the bits of the whole model's, whatever goes between them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_comm.mean_in_progress import in_background
from tests.support.freed import freed_at_once
from tests.support.models import Model, Param, check_mean, with_grads
from tests.support.synchronizations import written_down
from tests.support.third_party import PlainCommunicator
from tests.support.topologies import on_nodes

pytestmark = pytest.mark.world

# Small and large (more than 1 MiB) arrays, 0-d, empty, and of several dtypes.
ARRAYS = {
    "a": ((7, 5), "f4"),
    "b": (((1 << 18) + 3,), "f4"),
    "c": ((), "f8"),
    "d": ((0,), "f4"),
    "e": ((300, 500), "f8"),
    "f": ((9,), "f4"),
    "g": ((40,), "f2"),
    "h": ((3, 2), "f4"),
}
# In no order of names. Two are of one dtype, one large and one small, and two are of several.
BUCKETS = ("b", "fe", "gca", "hd")
OURS = {
    "flat": lambda world: create_communicator("flat", world),
    "one node": lambda world: create_communicator("hierarchical", world),
    "nodes": lambda world: on_nodes(range(world.size)),
}
MAKERS = {**OURS, "third party": lambda world: PlainCommunicator(world.Dup())}
with_third_party = pytest.mark.parametrize("comm", MAKERS, indirect=True)
several_ranks = pytest.mark.sizes(2, 3, 4)


@pytest.fixture(params=OURS)
def comm(request, world) -> Iterator[Any]:
    with MAKERS[request.param](world) as communicator:
        check_mean(communicator)  # all is made that a test may need while a thread communicates
        yield communicator


def buckets_of(rank: int, missing: str = "") -> list[Model]:
    """A rank's gradients, some of which are missing."""
    random = np.random.default_rng(rank)
    params = {}
    for name, (shape, dtype) in ARRAYS.items():
        grad = np.asarray(random.standard_normal(shape), dtype)
        params[name] = Param(np.zeros_like(grad), None if name in missing else grad)
    return [Model(**{name: params[name] for name in names}) for names in BUCKETS]


def whole(buckets: list[Model]) -> Model:
    return Model(**{name: param for bucket in buckets for name, param in bucket.params.items()})


def bits(*buckets: Model) -> dict[str, Any]:
    grads = {name: param.grad for bucket in buckets for name, param in bucket.params.items()}
    return {
        name: None if grad is None else (grad.dtype.str, grad.shape, grad.tobytes())
        for name, grad in grads.items()
    }


def expected(comm: Any, missing: str = "", zero_fill: bool = False) -> dict[str, Any]:
    """The bits of the whole model's mean, taken at once (collective)."""
    model = whole(buckets_of(comm.rank, missing))
    comm.multi_node_mean_grad(model, zero_fill)
    return bits(model)


def finish(mean: Any, *buckets: Model, payload: bytes = b"") -> list[bytes]:
    """Hand in the buckets and take all steps up to the end (collective)."""
    for bucket in buckets:
        mean.add(bucket)
    payloads = mean.agree(payload=payload)
    mean.reduce()
    mean.assign()
    return payloads


@with_third_party
def test_buckets_get_the_bits_of_the_whole_model(comm):
    buckets = buckets_of(comm.rank)
    mean = comm.start_mean()
    assert not mean.complete
    assert finish(mean, *buckets) == [b""] * comm.size
    assert mean.complete
    assert bits(*buckets) == expected(comm)


@with_third_party
@pytest.mark.parametrize("agree_again", [True, False])
def test_a_mean_takes_more_buckets_after_the_first_were_reduced(comm, agree_again):
    first, second, *rest = buckets_of(comm.rank)
    mean = comm.start_mean()
    finish(mean, first, second)
    means = bits(first, second)
    for param in [*first.params.values(), *second.params.values()]:
        param.grad[...] = comm.rank  # used, and not to be averaged again
    if agree_again:
        assert finish(mean, *rest, payload=b"x") == [b"x"] * comm.size
    else:
        for bucket in rest:
            mean.add(bucket)
        mean.reduce()
        mean.assign()
    assert means | bits(*rest) == expected(comm)
    for param in [*first.params.values(), *second.params.values()]:
        np.testing.assert_array_equal(param.grad, comm.rank)


@with_third_party
def test_a_mean_that_another_thread_takes_is_known_until_the_main_one_has_it(comm):
    """Also of a communicator that isn't ours; meanwhile users' arrays don't go by NCCL."""
    in_background.clear()
    with ThreadPoolExecutor(1) as thread, comm.split(0, comm.rank) as channel:
        finish(comm.start_mean(), *buckets_of(comm.rank))
        assert not in_background
        mean = comm.start_mean(through=channel)
        assert mean in in_background
        thread.submit(mean.assign).result()
        assert mean in in_background
        mean.assign()
        assert not in_background
        mean = comm.start_mean(through=channel)
        del mean
        assert not in_background


def test_a_gradient_that_cannot_be_written_is_replaced_in_the_last_step(comm):
    model = with_grads(w=np.full(9, comm.rank, "f4"))
    own = model["w"].grad
    own.flags.writeable = False
    mean = comm.start_mean()
    mean.add(model)
    mean.agree()
    mean.reduce()
    assert model["w"].grad is own
    mean.assign()
    np.testing.assert_array_equal(own, comm.rank)
    np.testing.assert_array_equal(model["w"].grad, (comm.size - 1) / 2)


@several_ranks
def test_a_gradient_that_fails_is_kept_no_longer_than_its_error(comm):
    """A caller that skips a batch would run out of memory."""
    model = with_grads(w=np.ones(3, "f4" if comm.rank else "i8"))
    with freed_at_once(model):
        with suppress(TypeError, PeerError):
            comm.allreduce_grad(model)
        del model


@pytest.mark.parametrize("comm", OURS, indirect=True)
def test_a_method_in_the_place_of_ours_takes_the_means(comm, monkeypatch):
    with create_communicator("flat", comm.mpi_comm, allreduce_grad_dtype="float16") as other:
        monkeypatch.setattr(comm, "multi_node_mean_grad", other.multi_node_mean_grad)
        model = with_grads(w=np.full(9, 0.1 + comm.rank, "f4"))
        finish(comm.start_mean(zero_fill=True), model)
        found = model["w"].grad
        np.testing.assert_array_equal(found, found.astype("f2"))


@with_third_party
def test_payloads_come_back_in_rank_order(comm):
    missing = "" if comm.rank else "a"  # of which ranks tell beside the payload
    for least in (0, 5, 65 - comm.size):
        payloads = [bytes([65 + rank]) * (least + rank) for rank in range(comm.size)]
        buckets = buckets_of(comm.rank, missing)
        mean = comm.start_mean(zero_fill=True)
        assert finish(mean, *buckets, payload=payloads[comm.rank]) == payloads
    assert bits(*buckets) == expected(comm, missing, zero_fill=True)


@with_third_party
def test_a_rank_without_gradients_is_known_to_all(comm):
    for without in range(comm.size), [comm.size - 1]:
        mean = comm.start_mean()
        if comm.rank not in without:
            mean.add(with_grads(w=np.ones(3)))
        assert mean.agree(payload=b"equal") == [b"equal"] * comm.size
        assert not mean.complete
        if len(without) < comm.size:
            with pytest.raises(RankMismatchError, match=r"gradients: .*none on rank"):
                mean.reduce()
        else:  # nothing is to be taken
            mean.reduce()
    check_mean(comm)


@several_ranks
@pytest.mark.parametrize("agree_again", [True, False])
def test_more_buckets_may_follow_one_whose_gradients_were_missing_differently(comm, agree_again):
    size = comm.size
    for_all = [Param(np.zeros(3), np.full(3, float(rank))) for rank in range(size)]
    for_all[comm.rank].grad = None
    first, second = Model(w=for_all[0], x=for_all[1]), with_grads(y=np.full(2, float(comm.rank)))
    mean = comm.start_mean(zero_fill=True)
    finish(mean, first)
    mean.add(second)
    if agree_again:
        mean.agree()
    mean.reduce()
    mean.assign()
    np.testing.assert_allclose(second["y"].grad, (size - 1) / 2)
    for number, param in enumerate(for_all[:2]):
        np.testing.assert_allclose(param.grad, number * (size - 1) / size)


@pytest.mark.sizes(2)
def test_two_threads_may_take_their_first_means_at_once(world):
    """Nothing that mpi4py does with the interpreter held waits for other ranks."""
    for _ in range(40):
        with (
            OURS["one node"](world) as comm,
            comm.split(0, comm.rank) as channel,
            ThreadPoolExecutor(1) as thread,
        ):
            other = thread.submit(check_mean, channel)
            check_mean(comm)
            other.result()
    assert comm.size == 2


@several_ranks
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize(
    ("name", "param", "told"),
    [
        ("w", Param(np.ones(4, "f4"), np.ones(4, "f4")), r"/w float32 \(4,\)"),
        ("w", Param(np.ones(3, "f8"), np.ones(3, "f8")), r"/w float64 \(3,\)"),
        ("x", Param(np.ones(3, "f4"), np.ones(3, "f4")), r"/x float32 \(3,\)"),
        ("w", Param(np.ones(3, "f4")), r"/w float32 \(3,\) no gradient"),
    ],
    ids=["shape", "dtype", "name", "missing"],
)
def test_gradients_that_differ_are_told_on_all(comm, through, name, param, told):
    last = comm.rank == comm.size - 1
    with comm.split(0, comm.rank) as channel:
        mean = comm.start_mean(through=channel if through else None)
        mean.add(with_grads(first=np.ones(2, "f4")))
        mean.add(Model(**{name: param}) if last else with_grads(w=np.ones(3, "f4")))
        with pytest.raises(RankMismatchError, match=rf"/w float32 \(3,\) on rank.*; {told} on"):
            mean.agree()
        check_mean(comm)
        check_mean(channel)


@several_ranks
@with_third_party
def test_operations_and_signatures_that_differ_are_told_on_all(comm):
    last = comm.rank == comm.size - 1
    model = with_grads(w=np.full(9, comm.rank, "f4"))
    for entry in "operation", "step":
        mean = comm.start_mean(operation=f"save {last and entry == 'operation'}")
        mean.add(model)
        with pytest.raises(RankMismatchError, match=f"ranks disagree on {entry}: "):
            mean.agree((("step", 3 + (last and entry == "step")),))
    np.testing.assert_array_equal(model["w"].grad, comm.rank)
    check_mean(comm)


@with_third_party
@pytest.mark.parametrize(
    ("on_all", "on_one", "zero_fill"),
    [("ahdb", "", False), ("ahdb", "", True), ("ah", "ceb", True)],
)
def test_missing_gradients_stay_so_or_count_as_zeros(comm, on_all, on_one, zero_fill):
    missing = on_all + on_one[comm.rank % 3 :][:1]
    buckets = buckets_of(comm.rank, missing)
    finish(comm.start_mean(zero_fill), *buckets)
    found = bits(*buckets)
    assert found == expected(comm, missing, zero_fill)
    if not (zero_fill and isinstance(comm, PlainCommunicator)):  # which can't ask the others
        nowhere = on_all if comm.size > 1 else missing
        assert {name for name in found if found[name] is None} == set(nowhere)


@several_ranks
@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_gradients_that_all_ranks_lack_take_no_agreement_more(name):
    with written_down(name) as (comm, calls):

        def agreements(missing: str, payload: bytes) -> int:
            for _ in range(2):  # until all is made
                model = with_grads(v=np.ones(1000, "f4"), w=np.ones(1000, "f4"))
                for each in missing:
                    model[each].grad = None
                calls.clear()
                finish(comm.start_mean(zero_fill=True), model, payload=payload)
            return sum(call.is_agreement for call in calls)

        for payload in b"equal", bytes([comm.rank]):
            assert agreements("", payload) == agreements("v", payload) == 1
            assert agreements("" if comm.rank else "v", payload) > 1


@pytest.mark.parametrize(("on_all", "on_one"), [("", ""), ("ah", ""), ("a", "ebf")])
def test_planned_buckets_are_reduced_in_a_thread_as_they_come(comm, on_all, on_one):
    """What a rank has stays as it was, until it takes the means."""
    missing = on_all + on_one[comm.rank % 3 :][:1]
    with comm.split(0, comm.rank) as channel, ThreadPoolExecutor(1) as thread:
        for _ in range(2):  # what was made is used again
            buckets = buckets_of(comm.rank, missing)
            params = whole(buckets).params
            own = {name: param.grad for name, param in params.items()}
            mean = comm.start_mean(on_one != "", through=channel)
            reduced = thread.submit(mean.reduce_planned, len(buckets))
            for number, bucket in enumerate(buckets):
                if number in (0, 3):  # the thread waits meanwhile
                    check_mean(comm)
                mean.add(bucket, planned=True)
            payloads = [bytes([rank]) for rank in range(comm.size)]
            assert mean.agree(payload=payloads[comm.rank]) == payloads
            reduced.result()
            assert bits(*buckets) == bits(*buckets_of(comm.rank, missing))
            assert all(param.grad is own[name] for name, param in params.items())
            mean.assign()
            assert bits(*buckets) == expected(comm, missing, on_one != "")
            kept = [name for name in own if own[name] is not None]
            assert not any(np.shares_memory(params[name].grad, own[name]) for name in kept)
            assert all(params[name].grad.flags.writeable for name in kept)


@several_ranks
def test_planned_gradients_that_one_rank_lacks_are_told_on_all_without_zero_fill(comm):
    """They travelled as zeros, but no parameter gets the means."""
    buckets = buckets_of(comm.rank, missing := "" if comm.rank else "e")
    with comm.split(0, comm.rank) as channel, ThreadPoolExecutor(1) as thread:
        mean = comm.start_mean(through=channel)
        reduced = thread.submit(mean.reduce_planned, len(buckets))
        for bucket in buckets:
            mean.add(bucket, planned=True)
        with pytest.raises(RankMismatchError, match=r"/e .* no gradient on rank 0"):
            mean.agree()
        reduced.result()
        assert bits(*buckets) == bits(*buckets_of(comm.rank, missing))
        check_mean(comm)
        check_mean(channel)


@with_third_party
def test_what_is_not_planned_goes_through_another_communicator_too(comm):
    buckets = buckets_of(comm.rank, missing := "ceb"[comm.rank % 3])
    with comm.split(0, comm.rank) as channel, ThreadPoolExecutor(1) as thread:
        mean = comm.start_mean(zero_fill=True, through=channel)
        for bucket in buckets:
            mean.add(bucket)
        mean.agree()
        reduced = thread.submit(mean.reduce)
        check_mean(comm)
        reduced.result()
        mean.assign()
    assert bits(*buckets) == expected(comm, missing, zero_fill=True)


@with_third_party
def test_nothing_is_planned_without_another_communicator_or_on_a_third_partys(comm):
    model = with_grads(w=np.full(9, comm.rank, "f4"))
    third_party = isinstance(comm, PlainCommunicator)
    told = "PlainCommunicator takes no plans" if third_party else "through another communicator"
    with comm.split(0, comm.rank) as channel:
        mean = comm.start_mean(through=channel if third_party else None)
        assert mean.takes_plans != third_party
        with pytest.raises(NotImplementedError, match=told):
            mean.add(model, planned=True)
        if third_party:
            with pytest.raises(NotImplementedError, match=told):
                mean.reduce_planned(1)
        finish(mean, model)
    np.testing.assert_array_equal(model["w"].grad, (comm.size - 1) / 2)


@several_ranks
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_what_is_no_float_gradient_is_told_on_all(comm, through, number):
    """In whichever bucket: where it is handed in, and where the others agree."""
    buckets = [with_grads(v=np.ones(3, "f4")), with_grads(w=np.ones(3, "f4"))]
    wrong = comm.rank == 1
    if wrong:
        buckets[number] = with_grads(w=np.ones(3, "i4"))
    with comm.split(0, comm.rank) as channel:
        mean = comm.start_mean(through=channel if through else None)
        error = TypeError if wrong else PeerError
        with pytest.raises(error, match=r"rank 1: .*/w has dtype int32") as caught:
            finish(mean, *buckets)
        assert any(entry.name == ("add" if wrong else "agree") for entry in caught.traceback)
        check_mean(comm)
        check_mean(channel)
