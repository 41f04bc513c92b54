"""A mean of gradients in steps: the bits of the whole model's, whatever goes between them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chainermn_comm import (
    CommunicationError,
    FinalizedError,
    PeerError,
    RankMismatchError,
    create_communicator,
)
from tests.support.doubles.synchronizations import written_down
from tests.support.oracles.freed import freed_at_once
from tests.support.oracles.raised import raises_on_all
from tests.support.worlds.models import Model, Param, check_mean, with_grads
from tests.support.worlds.planted import interrupted_in_handshakes
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
    "f": ((9,), "f4"),
    "g": ((40,), "f2"),
    "h": ((3, 2), "f4"),
}
# In no order of names. Two are of one dtype, one large and one small, and two are of
# several.
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
        # All is made that a test may need while a thread communicates.
        check_mean(communicator)
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
    return Model(
        **{name: param for bucket in buckets for name, param in bucket.params.items()}
    )


def bits(*buckets: Model) -> dict[str, Any]:
    grads = {
        name: param.grad for bucket in buckets for name, param in bucket.params.items()
    }
    return {
        name: None if grad is None else (grad.dtype.str, grad.shape, grad.tobytes())
        for name, grad in grads.items()
    }


def expected(comm: Any, missing: str = "", zero_fill: bool = False) -> dict[str, Any]:
    """The bits of the whole model's mean, taken at once (collective)."""
    model = whole(buckets_of(comm.rank, missing))
    comm.multi_node_mean_grad(model, zero_fill)
    return bits(model)


def finish(reducer: Any, *buckets: Model, payload: bytes = b"") -> list[bytes]:
    """Hand in the buckets and take all steps up to the end (collective)."""
    for bucket in buckets:
        reducer.add(bucket)
    payloads = reducer.agree(payload=payload)
    take(reducer)
    return payloads


def take(reducer: Any) -> None:
    """Take the means of what was handed in, and give them to the parameters (collective)."""
    work = reducer.start()
    work.wait()
    work.assign()


@with_third_party
def test_buckets_get_the_bits_of_the_whole_model(comm):
    buckets = buckets_of(comm.rank)
    reducer = comm.make_reducer()
    assert not reducer.complete
    assert finish(reducer, *buckets) == [b""] * comm.size
    assert reducer.complete
    assert bits(*buckets) == expected(comm)


@pytest.mark.sizes(2, 3)
def test_settings_that_change_meanwhile_are_of_later_means(world):
    value = 1 + 2**-12  # 1 in float16
    with create_communicator("flat") as comm, comm.split(0, comm.rank) as channel:
        missing = None if comm.rank == 0 else np.full(9, value, "f4")
        model = Model(a=Param(np.zeros(9, "f4"), missing))
        reducer = comm.make_reducer(zero_fill=True, channel=channel)
        reducer.add(model)
        reducer.agree()
        if comm.rank == 1:
            comm.set_config("allreduce_grad_dtype", "float16")
        take(reducer)
        expected = np.float32(value * (comm.size - 1)) / comm.size
        np.testing.assert_allclose(model["a"].grad, expected, rtol=1e-6)


@with_third_party
@pytest.mark.parametrize("through", [False, True])
def test_a_second_wait_returns_at_once_wherever_it_is_called(comm, through):
    """On one rank alone, and in another thread than the first one."""
    buckets = buckets_of(comm.rank)
    with ThreadPoolExecutor(1) as thread, comm.split(0, comm.rank) as channel:
        reducer = comm.make_reducer(channel=channel if through else None)
        for bucket in buckets:
            reducer.add(bucket)
        reducer.agree()
        work = reducer.start()
        thread.submit(work.wait).result()
        if comm.rank == 0:
            work.wait()
            thread.submit(work.wait).result()
        work.assign()
        assert bits(*buckets) == expected(comm)


def test_two_threads_may_wait_for_one_work(comm):
    """Both return once its means are there; one of them takes them."""
    with ThreadPoolExecutor(2) as threads, comm.split(0, comm.rank) as channel:
        for _ in range(20):
            buckets = buckets_of(comm.rank)
            reducer = comm.make_reducer(channel=channel)
            for bucket in buckets:
                reducer.add(bucket)
            reducer.agree()
            work = reducer.start()
            for each in [threads.submit(work.wait) for _ in range(2)]:
                each.result()
            work.assign()
            assert bits(*buckets) == expected(comm)


class Refused(Exception):
    """An error that can't be made of its text alone."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number}: {reason}")
        self.reason = reason


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of a user"),
        KeyError("name"),
        OSError(28, "no space", "file"),
        Refused(3, reason="none"),
        PeerError("rank 1: of a peer"),
        RankMismatchError("ranks disagree", "step"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_wait_raised_it_and_assign_raise_again(world, error):
    class Failing(PlainCommunicator):
        calls = 0

        def multi_node_mean_grad(self, model, zero_fill=False):
            self.calls += 1
            raise error

    comm = Failing(world.Dup())
    reducer = comm.make_reducer()
    model = with_grads(w=np.ones(3, "f4"))
    reducer.add(model)
    reducer.agree()
    work = reducer.start()
    for call in (work.wait, work.wait, work.assign, work.wait):
        with pytest.raises(type(error)) as caught:
            call()
        assert str(caught.value) == str(error)
        assert caught.value.args == error.args
        assert vars(caught.value) == vars(error)
        del caught
    assert comm.calls == 1


@several_ranks
def test_an_error_that_wait_raises_keeps_no_gradients(comm):
    """Though the same is raised again, for as long as somebody has the work."""
    with comm.split(0, comm.rank) as channel:
        reducer = comm.make_reducer(channel=channel)
        reducer.add(with_grads(w=np.ones(3, "f4")))
        reducer.agree()
        work = reducer.start()
    # Its mean can't be taken any more.
    for _ in range(3):
        batch = Model()
        with freed_at_once(batch):
            with suppress(FinalizedError):
                wait_beside(work, batch)
            del batch


def wait_beside(work: Any, batch: Model) -> None:
    """Wait in a frame that refers to a batch."""
    work.wait()


def test_a_gradient_that_cannot_be_written_is_replaced_in_the_last_step(comm):
    model = with_grads(w=np.full(9, comm.rank, "f4"))
    own = model["w"].grad
    own.flags.writeable = False
    reducer = comm.make_reducer()
    reducer.add(model)
    reducer.agree()
    work = reducer.start()
    work.wait()
    assert model["w"].grad is own
    work.assign()
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
    with create_communicator(
        "flat", comm.mpi_comm, allreduce_grad_dtype="float16"
    ) as other:
        monkeypatch.setattr(comm, "multi_node_mean_grad", other.multi_node_mean_grad)
        model = with_grads(w=np.full(9, 0.1 + comm.rank, "f4"))
        finish(comm.make_reducer(zero_fill=True), model)
        found = model["w"].grad
        np.testing.assert_array_equal(found, found.astype("f2"))


@with_third_party
def test_payloads_come_back_in_rank_order(comm):
    missing = "" if comm.rank else "a"  # of which ranks tell beside the payload
    for least in (0, 5, 65 - comm.size):
        payloads = [bytes([65 + rank]) * (least + rank) for rank in range(comm.size)]
        buckets = buckets_of(comm.rank, missing)
        reducer = comm.make_reducer(zero_fill=True)
        assert finish(reducer, *buckets, payload=payloads[comm.rank]) == payloads
    assert bits(*buckets) == expected(comm, missing, zero_fill=True)


@several_ranks
def test_a_payload_that_is_none_or_too_long_raises_on_all(comm):
    wrong = comm.rank == 1
    for payload in (b"1" * 300, "words"):
        with raises_on_all(wrong, ValueError, "a payload is bytes, 64 at most"):
            comm.make_reducer().agree(payload=payload if wrong else b"1")
    check_mean(comm)


@with_third_party
def test_steps_in_another_order_are_refused(comm):
    model = with_grads(w=np.full(3, comm.rank, "f4"))
    # From the second one on, no barrier stands between packing and summing.
    check_mean(comm)
    reducer = comm.make_reducer()
    reducer.add(model)
    with pytest.raises(RuntimeError, match="allreduce_grad: agree\\(\\) before start"):
        reducer.start()
    reducer.agree()
    with pytest.raises(RuntimeError, match="allreduce_grad: add\\(\\) after agree"):
        reducer.add(model)
    work = reducer.start()
    with pytest.raises(RuntimeError, match="once its wait\\(\\) has ended"):
        work.assign()
    work.wait()
    work.assign()
    np.testing.assert_array_equal(
        model.params["w"].grad, np.full(3, (comm.size - 1) / 2)
    )


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_after_finalize_it_says_so(world, name):
    comm = create_communicator(name, world)
    check_mean(comm)
    late, reducer = comm.make_reducer(), comm.make_reducer()
    for each in (late, reducer):
        each.add(with_grads(w=np.ones(3, "f4")))
    reducer.agree()
    work = reducer.start()
    comm.finalize()
    for call in (late.agree, work.wait):
        with pytest.raises(FinalizedError, match=f"rank {world.rank}: .*finalized"):
            call()


@with_third_party
def test_a_rank_without_gradients_is_known_to_all(comm):
    for without in range(comm.size), [comm.size - 1]:
        reducer = comm.make_reducer()
        if comm.rank not in without:
            reducer.add(with_grads(w=np.ones(3)))
        assert reducer.agree(payload=b"equal") == [b"equal"] * comm.size
        assert not reducer.complete
        if len(without) < comm.size:
            with pytest.raises(RankMismatchError, match=r"gradients: .*none on rank"):
                reducer.start()
        else:  # nothing is to be taken
            take(reducer)
    check_mean(comm)


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
        reducer = comm.make_reducer(channel=channel if through else None)
        reducer.add(with_grads(first=np.ones(2, "f4")))
        reducer.add(Model(**{name: param}) if last else with_grads(w=np.ones(3, "f4")))
        with pytest.raises(
            RankMismatchError, match=rf"/w float32 \(3,\) on rank.*; {told} on"
        ):
            reducer.agree()
        check_mean(comm)
        check_mean(channel)


@several_ranks
@with_third_party
def test_operations_and_signatures_that_differ_are_told_on_all(comm):
    last = comm.rank == comm.size - 1
    model = with_grads(w=np.full(9, comm.rank, "f4"))
    for entry in "operation", "step":
        reducer = comm.make_reducer(operation=f"save {last and entry == 'operation'}")
        reducer.add(model)
        with pytest.raises(RankMismatchError, match=f"ranks disagree on {entry}: "):
            reducer.agree((("step", 3 + (last and entry == "step")),))
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
    finish(comm.make_reducer(zero_fill), *buckets)
    found = bits(*buckets)
    assert found == expected(comm, missing, zero_fill)
    # Which can't ask the others.
    if not (zero_fill and isinstance(comm, PlainCommunicator)):
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
                finish(comm.make_reducer(zero_fill=True), model, payload=payload)
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
            reducer = comm.make_reducer(on_one != "", channel=channel)
            works, reduced = [], []
            for number, bucket in enumerate(buckets):
                if number in (0, 3):  # the thread may wait meanwhile
                    check_mean(comm)
                works.append(reducer.add_planned(bucket))
                reduced.append(thread.submit(works[-1].wait))
            payloads = [bytes([rank]) for rank in range(comm.size)]
            assert reducer.agree(payload=payloads[comm.rank]) == payloads
            for each in reduced:
                each.result()
            assert bits(*buckets) == bits(*buckets_of(comm.rank, missing))
            assert all(param.grad is own[name] for name, param in params.items())
            for work in works:
                work.assign()
            assert bits(*buckets) == expected(comm, missing, on_one != "")
            kept = [name for name in own if own[name] is not None]
            assert not any(
                np.shares_memory(params[name].grad, own[name]) for name in kept
            )
            assert all(params[name].grad.flags.writeable for name in kept)


@several_ranks
def test_planned_gradients_that_one_rank_lacks_are_told_on_all_without_zero_fill(comm):
    """They travelled as zeros, but no parameter gets the means."""
    buckets = buckets_of(comm.rank, missing := "" if comm.rank else "e")
    with comm.split(0, comm.rank) as channel, ThreadPoolExecutor(1) as thread:
        reducer = comm.make_reducer(channel=channel)
        works = [reducer.add_planned(bucket) for bucket in buckets]
        reduced = [thread.submit(work.wait) for work in works]
        with pytest.raises(RankMismatchError, match=r"/e .* no gradient on rank 0"):
            reducer.agree()
        for each in reduced:
            each.result()
        assert bits(*buckets) == bits(*buckets_of(comm.rank, missing))
        check_mean(comm)
        check_mean(channel)


@with_third_party
def test_what_is_not_planned_goes_through_another_communicator_too(comm):
    buckets = buckets_of(comm.rank, missing := "ceb"[comm.rank % 3])
    with comm.split(0, comm.rank) as channel, ThreadPoolExecutor(1) as thread:
        reducer = comm.make_reducer(zero_fill=True, channel=channel)
        for bucket in buckets:
            reducer.add(bucket)
        reducer.agree()
        work = reducer.start()
        reduced = thread.submit(work.wait)
        check_mean(comm)
        reduced.result()
        work.assign()
    assert bits(*buckets) == expected(comm, missing, zero_fill=True)


def test_nothing_is_planned_on_a_third_partys_communicator(world):
    comm = PlainCommunicator(world.Dup())
    reducer = comm.make_reducer()
    assert not reducer.takes_plans
    with pytest.raises(NotImplementedError, match="PlainCommunicator takes no plans"):
        reducer.add_planned(with_grads(w=np.ones(9)))


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
        reducer = comm.make_reducer(channel=channel if through else None)
        error = TypeError if wrong else PeerError
        with pytest.raises(error, match=r"rank 1: .*/w has dtype int32") as caught:
            finish(reducer, *buckets)
        assert any(
            entry.name == ("add" if wrong else "agree") for entry in caught.traceback
        )
        check_mean(comm)
        check_mean(channel)


@several_ranks
@pytest.mark.parametrize("buckets", [1, 2])
def test_a_name_that_one_rank_has_twice_is_told_on_all(comm, buckets):
    grads = [np.full(3, float(comm.rank), "f4") for _ in range(4)]
    twice = SimpleNamespace(
        namedparams=lambda: [("/w", Param(g, g)) for g in grads[:2]]
    )
    once = with_grads(w=grads[2])
    reducer = comm.make_reducer()
    for number in range(buckets):
        reducer.add(with_grads(v=grads[3]) if number else once if comm.rank else twice)
    with pytest.raises(RankMismatchError, match="parameter: /w float32"):
        reducer.agree()
    check_mean(comm)


@several_ranks
def test_errors_name_this_rank_where_the_channel_numbers_others_otherwise(world):
    with create_communicator("flat") as comm, comm.split(0, -comm.rank) as channel:
        reducer = comm.make_reducer(channel=channel)
        kind, text = PeerError, "rank 0: TypeError: parameter"
        if comm.rank == 0:
            kind, text = TypeError, "rank 0: parameter /w has dtype int32"

        def hand_in() -> None:
            reducer.add(with_grads(w=np.ones(3, "i4" if comm.rank == 0 else "f4")))
            reducer.agree()

        with pytest.raises(kind, match=text):
            hand_in()


@several_ranks
def test_what_callers_have_is_freed_after_an_interruption():
    class Interrupted(BaseException):
        pass

    class Array(np.ndarray):
        """An array that a weak reference can show to be gone."""

    def train(comm: Any) -> weakref.ref[Any]:
        own = np.ones(9).view(Array)
        alive = weakref.ref(own)
        with suppress(Interrupted):
            comm.allreduce_grad(with_grads(w=np.ones(3)))
        return alive

    comm = create_communicator("flat")
    with interrupted_in_handshakes(Interrupted):
        alive = train(comm)
    gc.collect()
    assert alive() is None
    with pytest.raises(CommunicationError, match="was interrupted on this rank"):
        comm.allreduce(np.ones(1))
