"""What the doctor finds of GPUs, and what its ranks try there."""

from __future__ import annotations

import sys

import pytest

from chainermn_tools.doctor.ranks import rank_tests
from tests.support.doubles import gpus
from tests.support.doubles.device_double import ILLEGAL_ADDRESS

SMALL = (("f4", 123), ("f2", 9), ("f8", 1))
NAMES = ["flat", "hierarchical", "pure_nccl", "dummy"]
OTHERS = ["naive", "two_dimensional", "single_node", "non_cuda_aware"]
LIMIT_SECONDS = 600


def on_two_ranks(test):
    return pytest.mark.world(pytest.mark.sizes(2)(test))


@on_two_ranks
@pytest.mark.parametrize(
    "name", NAMES + [pytest.param(n, marks=pytest.mark.full) for n in OTHERS]
)
def test_every_communicator_is_right_on_gpus(world, gpu, monkeypatch, name):
    monkeypatch.setattr(rank_tests, "COUNT", 10_000)
    monkeypatch.setattr(rank_tests, "GPU_GRADIENTS", SMALL)
    found = rank_tests.try_communicator(world, name)
    if name == "pure_nccl" and not gpus.have_one_each(world):
        assert found == {"reason": "there are fewer GPUs than ranks"}
    else:
        assert (found["correct"], found["wrong"], found["problem"]) == (True, [], None)


@on_two_ranks
def test_nccl_is_really_tried_and_a_wrong_mean_noticed(world, double, monkeypatch):
    kind = sys.modules["cupy"].ndarray
    real = kind.get
    monkeypatch.setattr(kind, "get", lambda array: real(array) + (world.rank == 1))
    monkeypatch.setattr(rank_tests, "GPU_GRADIENTS", SMALL)
    found = rank_tests.try_communicator(world, "pure_nccl")
    assert (found["correct"], found["wrong"]) == (False, ["mean_grad on GPUs"])
    assert "allReduce" in double.calls


@on_two_ranks
@pytest.mark.parametrize("name", ["hierarchical", "pure_nccl"])
def test_a_communicator_that_fails_on_gpus_is_told(world, double, monkeypatch, name):
    """On all ranks, since one alone would end the job."""
    monkeypatch.setattr(rank_tests, "GPU_GRADIENTS", SMALL)
    double.plant("allReduce", ILLEGAL_ADDRESS, after=2)
    found = rank_tests.try_communicator(world, name)
    assert found["problem"].startswith("mean_grad on GPUs: rank ")
    assert "cudaErrorIllegalAddress" in found["problem"]
    assert rank_tests.try_communicator(world, "flat", timed=False)["correct"]


@on_two_ranks
def test_ranks_that_share_a_gpu_leave_nccl_alone(world, double, monkeypatch):
    double.bus_id = "0000:00:00.0"
    refusal = {"reason": "there are fewer GPUs than ranks"}
    assert rank_tests.try_communicator(world, "pure_nccl") == refusal
    monkeypatch.setattr(rank_tests, "GPU_GRADIENTS", SMALL)
    assert rank_tests.try_communicator(world, "flat", timed=False)["correct"]
    assert not [call for call in double.made if "Init" in call]
