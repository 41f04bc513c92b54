"""Parameters of rank 0 reach every rank, those not initialised there yet too."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import RankMismatchError
from tests.support.oracles.raised import raises_on_all
from tests.support.oracles.samples import same
from tests.support.worlds.models import Model, Param

pytestmark = pytest.mark.world


class Lazy(Param):
    """A parameter that learns its shape later, as Chainer's do."""

    def initialize(self, shape):
        self.data = np.full(shape, -1.0, "float32")


class Broken(Param):
    def initialize(self, shape):
        raise RuntimeError("no such initializer")


def test_parameters_become_those_of_rank_0(naive):
    def data(rank):
        return {
            "big": np.arange(400_000.0) + rank,
            "fortran": np.asfortranarray(np.full((5, 6), rank, "float32")),
            "scalar": np.array(float(rank)),
            "empty": np.zeros((0, 3)),
            "frozen": np.broadcast_to(float(rank), 3),
        }

    own = data(naive.rank)
    model = Model(**{name: Param(array) for name, array in own.items()})
    naive.bcast_data(model)
    for name, expected in data(0).items():
        same(model[name].data, expected)
        # Only what can't be overwritten is replaced.
        is_own = model[name].data is own[name]
        assert is_own == (naive.rank == 0 or name != "frozen")


@pytest.mark.parametrize("kind", [Lazy, Param])
def test_the_lowest_rank_that_has_a_parameter_gives_it(naive, kind):
    for having in range(naive.size):
        param = kind()
        if naive.rank >= having:
            param.data = np.full((3, 2), naive.rank, "float64")
        model = Model(w=param, nowhere=kind())
        naive.bcast_data(model)
        same(model["w"].data, np.full((3, 2), float(having)))
        assert model["nowhere"].data is None


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "param", "error", "told"),
    [
        ("w", Param(np.zeros(4)), None, r"\(3,\) on rank.* 0.*; /w float64 \(4,\) on"),
        ("w", Param(np.zeros(3, "f4")), None, r"; /w float32 \(3,\) on rank 1"),
        ("v", Param(np.zeros(3)), None, "/v on rank 1"),
        ("w", Broken(), RuntimeError, "no such initializer"),
    ],
)
def test_what_differs_or_fails_on_one_rank_raises_on_all(
    naive, name, param, error, told
):
    model = Model(w=Param(np.zeros(3)))
    is_odd = naive.rank == 1
    if is_odd:
        model = Model(**{name: param})
    expected = pytest.raises(RankMismatchError, match=told)
    if error is not None:
        expected = raises_on_all(is_odd, error, told)
    with expected:
        naive.bcast_data(model)
    naive.bcast_data(Model(w=Param(np.zeros(3))))
