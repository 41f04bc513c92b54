"""The communicators' classes: what `create_communicator` returns, and ways to make it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm import (
    CommunicatorBase,
    RankMismatchError,
    create_communicator,
)
from chainermn_comm.named_communicators import (
    CLASSES,
    FlatCommunicator,
    MpiCommunicatorBase,
    NaiveCommunicator,
)
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.topologies import KNOWN

pytestmark = pytest.mark.world

ON_CPUS = [name for name in CLASSES if name != "pure_nccl"]


def test_each_name_has_a_class():
    assert tuple(CLASSES) == KNOWN
    for name, each in CLASSES.items():
        assert each.__name__ == name.title().replace("_", "") + "Communicator"


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_communicator_is_of_the_class_of_its_name(name):
    with (
        create_communicator(name) as comm,
        comm.split(comm.rank % 2, comm.rank) as part,
    ):
        assert type(comm) is type(part) is CLASSES[name]
        assert isinstance(comm, MpiCommunicatorBase)
        assert isinstance(comm, CommunicatorBase)


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_class_makes_the_communicator(name, world):
    with CLASSES[name](world) as comm, CLASSES[name](mpi_comm=world) as same:
        assert (comm.rank, same.size) == (world.rank, world.size)
        assert comm.mpi_comm is world
        if name != "dummy":
            check_mean(comm)
            check_mean(same)


def test_classes_take_what_create_communicator_takes(world):
    with FlatCommunicator(
        mpi_comm=world,
        allreduce_grad_dtype="float16",
        batched_copy=True,
        reproducible=True,
    ) as comm:
        assert comm.get_config("reproducible") is True
        assert comm.get_config("allreduce_grad_dtype") == np.float16
        assert comm.get_config("batched_copy") is True
    with pytest.raises(
        TypeError, match=r"mpi_comm must be an mpi4py intracommunicator.*got str"
    ):
        NaiveCommunicator("world")  # type: ignore[arg-type]


@pytest.mark.sizes(2, 3)
def test_ranks_that_make_different_ones_are_told(world):
    with pytest.raises(RankMismatchError, match=r"(?s)flat.*naive|naive.*flat"):
        (NaiveCommunicator, FlatCommunicator)[world.rank % 2](world)


class Counting(NaiveCommunicator):
    """Takes the mean itself, as classes of users did, and counts."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        self.means: list[str] = []

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        self.means.append("own")
        super().multi_node_mean_grad(model, zero_fill)


class CountingAsIn13(NaiveCommunicator):
    """The same by the name of ChainerMN 1.3."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        self.means: list[str] = []

    def allreduce_grad(self, model: Any) -> None:
        self.means.append("own")
        super().allreduce_grad(model)


@pytest.mark.parametrize("made", [Counting, CountingAsIn13])
def test_a_mean_of_the_users_own_is_taken_by_both_names_and_by_the_optimizers(
    made, world
):
    with made(world) as comm:
        for call in (comm.allreduce_grad, comm.multi_node_mean_grad):
            call(with_grads(w=np.ones(3)))
        reducer = comm.make_reducer()  # what optimizers call
        reducer.add(with_grads(w=np.ones(3)))
        reducer.agree()
        work = reducer.start()
        work.wait()
        work.assign()
        assert comm.means == ["own"] * 3
        with comm.split(0, world.rank) as part:
            assert type(part) is made
            assert part.means is comm.means  # what its own `__init__` set
            check_mean(part)
        assert len(comm.means) > 3


class CountingTwice(Counting):
    """A class of a user's class that has the mean by the other name."""

    def allreduce_grad(self, model: Any) -> None:
        self.means.append("outer")
        super().allreduce_grad(model)


class CountingTwiceFrom13(CountingAsIn13):
    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        self.means.append("outer")
        super().multi_node_mean_grad(model, zero_fill)


class CountingThrice(CountingTwice):
    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        self.means.append("outermost")
        super().multi_node_mean_grad(model, zero_fill)


@pytest.mark.parametrize(
    ("made", "levels"),
    [
        (CountingTwice, ["outer", "own"]),
        (CountingTwiceFrom13, ["outer", "own"]),
        (CountingThrice, ["outermost", "outer", "own"]),
    ],
)
def test_each_level_of_classes_takes_its_part_in_a_mean_once(made, levels, world):
    with made(world) as comm:
        for name in ("allreduce_grad", "multi_node_mean_grad"):
            comm.means.clear()
            model = with_grads(w=np.full(3, world.rank, "f4"))
            getattr(comm, name)(model)
            assert comm.means == levels
            np.testing.assert_array_equal(model["w"].grad, (world.size - 1) / 2)
        comm.means.clear()
        check_mean(comm)
        assert comm.means[: len(levels)] == levels


class Registered:
    """A user's mixin that has options of its own for its subclasses."""

    labels: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, label: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.labels.append(label)


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_mixin_of_a_users_class_hears_of_its_subclasses(order, world):
    bases = (Registered, NaiveCommunicator)[:: 1 if order == "first" else -1]
    made = type("Labelled", bases, {}, label=order)
    assert Registered.labels[-1] == order
    with made(world) as comm:
        check_mean(comm)


def by_chainer_7s_name(inner: Any) -> CommunicatorBase:
    """A communicator that defines the mean by Chainer 7's name only, and forwards to another."""

    def forward(name: str) -> Any:
        if isinstance(getattr(CommunicatorBase, name), property):
            return property(lambda self: getattr(inner, name))
        return lambda self, *args: getattr(inner, name)(*args)

    names = CommunicatorBase.__abstractmethods__ - {"allreduce_grad"} | {
        "multi_node_mean_grad"
    }
    kind = type(
        "OfChainer7", (CommunicatorBase,), {name: forward(name) for name in names}
    )
    made: CommunicatorBase = kind()
    return made


def test_either_name_of_the_mean_will_do(world):
    with NaiveCommunicator(world) as inner:
        check_mean(by_chainer_7s_name(inner))


def test_broadcast_data_is_bcast_data(world):
    with NaiveCommunicator(world) as comm:
        model = with_grads(w=np.ones(3))
        model["w"].data[...] = world.rank
        comm.broadcast_data(model)
        np.testing.assert_array_equal(model["w"].data, 0)
