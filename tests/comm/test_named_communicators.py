"""The communicators' classes: what `create_communicator` returns, and ways to make it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_comm.named_communicators import (
    CLASSES,
    FlatCommunicator,
    MpiCommunicatorBase,
    NaiveCommunicator,
)
from tests.support.worlds.models import check_mean, finish, with_grads
from tests.support.worlds.third_party import PlainCommunicator
from tests.support.worlds.topologies import KNOWN

pytestmark = pytest.mark.world

ON_CPUS = [name for name in CLASSES if name != "pure_nccl"]


def test_each_name_has_a_class():
    assert tuple(CLASSES) == KNOWN
    for name, each in CLASSES.items():
        assert each.__name__ == name.title().replace("_", "") + "Communicator"


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_communicator_is_of_the_class_of_its_name_which_makes_it_too(name, world):
    with (
        create_communicator(name) as comm,
        comm.split(comm.rank % 2, comm.rank) as part,
        CLASSES[name](world) as same,
    ):
        assert type(comm) is type(part) is CLASSES[name]
        assert isinstance(comm, MpiCommunicatorBase)
        assert isinstance(comm, CommunicatorBase)
        assert same.mpi_comm is world
        assert same.allreduce_obj(1) == world.size


def test_classes_take_what_create_communicator_takes(world):
    settings = {
        "allreduce_grad_dtype": np.float16,
        "batched_copy": True,
        "reproducible": True,
    }
    with FlatCommunicator(mpi_comm=world, **settings) as comm:
        assert comm.get_config() == settings | {"chunk_bytes": None}
    with pytest.raises(TypeError, match=r"an mpi4py intracommunicator.*got str"):
        NaiveCommunicator("world")  # type: ignore[arg-type]


class Counting(NaiveCommunicator):
    """Takes the mean itself, as classes of users did, and counts."""

    def __init__(self, mpi_comm):
        super().__init__(mpi_comm)
        self.means: list[str] = []

    def multi_node_mean_grad(self, model, zero_fill=False):
        self.means.append("own")
        super().multi_node_mean_grad(model, zero_fill)


class CountingTwice(Counting):
    """A class of a user's class, by the name of ChainerMN 1.3."""

    def allreduce_grad(self, model):
        self.means.append("outer")
        super().allreduce_grad(model)


LEVELS = {
    Counting: ["own"],
    CountingTwice: ["outer", "own"],
}


@pytest.mark.parametrize("made", LEVELS)
def test_each_class_of_the_users_takes_its_part_in_a_mean_once(made, world):
    """By whichever name it is called, and by the optimizers."""
    with made(world) as comm:
        for call in (
            comm.allreduce_grad,
            comm.multi_node_mean_grad,
            partial(finish, comm.make_reducer()),
        ):
            comm.means.clear()
            model = with_grads(w=np.full(3, world.rank, "f4"))
            call(model)
            assert comm.means == LEVELS[made]
            assert_array_equal(model["w"].grad, (world.size - 1) / 2)
        with comm.split(0, world.rank) as part:
            assert type(part) is made
            assert part.means is comm.means  # what its own `__init__` set


def test_either_name_of_the_mean_will_do(world):
    """Here a class that extends the base has Chainer 7's name only."""
    methods = vars(PlainCommunicator)
    own = {name: methods[name] for name in methods if not name.startswith("_")}
    mean = own.pop("allreduce_grad")
    own["__init__"] = methods["__init__"]
    own["multi_node_mean_grad"] = lambda comm, model, zero_fill=False: mean(comm, model)
    made = type("OfChainer7", (CommunicatorBase,), own)
    check_mean(made(world))
