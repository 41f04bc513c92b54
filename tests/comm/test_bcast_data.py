"""Parameters of rank 0 reach every rank, those not initialised there yet too."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
from tests.support.models import Model, Param

pytestmark = pytest.mark.world


class Lazy(Param):
    """A parameter that learns its shape later, as Chainer's do."""

    def initialize(self, shape):
        self.data = np.full(shape, -1.0, "float32")


def test_parameters_become_those_of_rank_0(naive):
    model = Model(
        w=Param(np.full((30, 4), naive.rank, "float32")),
        big=Param(np.arange(400_000.0) + naive.rank),
        fortran=Param(np.asfortranarray(np.full((5, 6), naive.rank, "float64"))),
        scalar=Param(np.array(float(naive.rank))),
        empty=Param(np.zeros((0, 3))),
    )
    before = model["w"].data
    naive.bcast_data(model)
    assert model["w"].data is before
    for name, expected in {
        "w": np.zeros((30, 4), "float32"),
        "big": np.arange(400_000.0),
        "fortran": np.zeros((5, 6)),
        "scalar": np.array(0.0),
        "empty": np.zeros((0, 3)),
    }.items():
        np.testing.assert_array_equal(model[name].data, expected)
        assert model[name].data.dtype == expected.dtype


@pytest.mark.parametrize("kind", [Lazy, Param])
def test_the_lowest_rank_that_has_a_parameter_gives_it(naive, kind):
    for having in range(naive.size):
        param = kind()
        if naive.rank >= having:
            param.data = np.full((3, 2), naive.rank, "float64")
        model = Model(w=param, nowhere=kind())
        naive.bcast_data(model)
        np.testing.assert_array_equal(model["w"].data, np.full((3, 2), float(having)))
        assert model["w"].data.dtype == "float64"
        assert model["nowhere"].data is None


def test_frozen_parameters_are_replaced(naive):
    frozen = np.full(3, float(naive.rank))
    frozen.flags.writeable = False
    model = Model(w=Param(frozen))
    naive.bcast_data(model)
    np.testing.assert_array_equal(model["w"].data, np.zeros(3))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (np.zeros(4), r"parameter /w: float64 \(3,\) on rank 0; float64 \(4,\) on rank 1"),
        (np.zeros(3, "float32"), r"parameter /w: .*float32 \(3,\) on rank 1"),
    ],
)
def test_parameters_that_differ_are_told(naive, data, told):
    model = Model(w=Param(data if naive.rank == 1 else np.zeros(3)))
    with pytest.raises(RankMismatchError, match=told):
        naive.bcast_data(model)
    with pytest.raises(RankMismatchError, match="/v on rank 1"):
        naive.bcast_data(Model(**{"v" if naive.rank == 1 else "w": Param(np.zeros(3))}))
    naive.bcast_data(Model(w=Param(np.zeros(3))))


class Broken(Param):
    def initialize(self, shape):
        raise RuntimeError("no such initializer")


@pytest.mark.sizes(2, 3, 4)
def test_a_parameter_that_cannot_be_initialised_raises_on_all(naive):
    model = Model(w=Broken() if naive.rank == 1 else Param(np.zeros(3)))
    with pytest.raises(RuntimeError if naive.rank == 1 else PeerError, match="no such initializer"):
        naive.bcast_data(model)
    naive.bcast_data(Model(w=Param(np.zeros(3))))
