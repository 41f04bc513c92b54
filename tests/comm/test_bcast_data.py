"""Parameters of rank 0 reach every rank, those not initialised there yet too."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
from tests.support.oracles.samples import same
from tests.support.worlds.models import Model, Param

pytestmark = pytest.mark.world


class Lazy(Param):
    """A parameter that learns its shape later, as Chainer's do."""

    def initialize(self, shape):
        self.data = np.full(shape, -1.0, "float32")


def test_parameters_become_those_of_rank_0(naive):
    def data(rank: int) -> dict[str, np.ndarray]:
        return {
            "w": np.full((30, 4), rank, "float32"),
            "big": np.arange(400_000.0) + rank,
            "fortran": np.asfortranarray(np.full((5, 6), rank, "float64")),
            "scalar": np.array(float(rank)),
            "empty": np.zeros((0, 3)),
            "frozen": np.broadcast_to(float(rank), 3),
        }

    own = data(naive.rank)
    model = Model(**{name: Param(array) for name, array in own.items()})
    naive.bcast_data(model)
    assert model["w"].data is own["w"]
    if naive.rank == 0:  # nothing of its own is replaced
        assert all(model[name].data is array for name, array in own.items())
    for name, expected in data(0).items():
        same(model[name].data, expected)


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


class Broken(Param):
    def initialize(self, shape):
        raise RuntimeError("no such initializer")


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("params", "error", "told"),
    [
        (
            {"w": Param(np.zeros(4))},
            None,
            r"/w float64 \(3,\) on rank.* 0.*; /w float64 \(4,\) on rank 1",
        ),
        (
            {"w": Param(np.zeros(3, "f4"))},
            None,
            r"parameter: /w .*; /w float32 \(3,\) on rank 1",
        ),
        ({"v": Param(np.zeros(3))}, None, "/v on rank 1"),
        ({"w": Broken()}, RuntimeError, "no such initializer"),
    ],
)
def test_what_differs_or_fails_on_one_rank_raises_on_all(naive, params, error, told):
    odd = naive.rank == 1
    expected = RankMismatchError if error is None else error if odd else PeerError
    with pytest.raises(expected, match=told):
        naive.bcast_data(Model(**params if odd else {"w": Param(np.zeros(3))}))
    naive.bcast_data(Model(w=Param(np.zeros(3))))
