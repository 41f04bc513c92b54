"""What the doctor's ranks try on GPUs."""

from __future__ import annotations

import sys

import pytest

from chainermn_tools.doctor import rank_tests
from tests.support.doubles import gpus
from tests.support.doubles.device_double import ILLEGAL_ADDRESS

SMALL = (("f4", 123), ("f2", 9), ("f8", 1))
NAMES = ["flat", "hierarchical", "pure_nccl", "dummy"]
OTHERS = ["naive", "two_dimensional", "single_node", "non_cuda_aware"]
SHARED = {"reason": "there are fewer GPUs than ranks"}
LIMIT_SECONDS = 600

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(rank_tests, "GPU_GRADIENTS", SMALL)


@pytest.mark.parametrize(
    "name", NAMES + [pytest.param(n, marks=pytest.mark.full) for n in OTHERS]
)
def test_every_communicator_is_right_on_gpus(world, gpu, name):
    found = rank_tests.try_on_gpus(world, name)
    if name in rank_tests.SHARING_GPUS or gpus.have_one_each(world):
        assert found == {"problem": None}
    else:
        assert found == SHARED


def test_nccl_is_really_tried_and_a_wrong_mean_noticed(world, double, monkeypatch):
    kind = sys.modules["cupy"].ndarray
    real = kind.get

    def get(array):
        return real(array) + (world.rank == 1)

    monkeypatch.setattr(kind, "get", get)
    found = rank_tests.try_on_gpus(world, "pure_nccl")
    assert found == {"problem": "rank 1: wrong values of mean_grad arrived"}
    assert "allReduce" in double.calls


@pytest.mark.parametrize("name", ["hierarchical", "pure_nccl"])
def test_a_communicator_that_fails_on_gpus_is_told(world, double, name):
    """On all ranks, since one alone would end the job."""
    double.plant("allReduce", ILLEGAL_ADDRESS, after=2)
    found = rank_tests.try_on_gpus(world, name)
    assert "cudaErrorIllegalAddress" in found["problem"]
    assert rank_tests.try_on_gpus(world, "flat") == {"problem": None}


def test_ranks_that_share_a_gpu_leave_nccl_alone(world, double):
    double.bus_id = "0000:00:00.0"
    assert rank_tests.try_on_gpus(world, "pure_nccl") == SHARED
    assert rank_tests.try_on_gpus(world, "flat") == {"problem": None}
    assert not [call for call in double.made if "Init" in call]
