"""What the doctor's ranks try with arrays on GPUs."""

from __future__ import annotations

import sys

import pytest

from chainermn_tools.doctor.ranks import gpu_tests
from tests.support import gpus
from tests.support.device_double import ILLEGAL_ADDRESS

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

SMALL = (("f4", 123), ("f2", 9), ("f8", 1))


def test_means_are_tried_by_each_way_that_there_is(world, gpu, monkeypatch):
    monkeypatch.setattr(gpu_tests, "GPU_GRADIENTS", SMALL)
    shared = not gpus.have_one_each(world)
    names = ("flat",) if shared else ("hierarchical", "pure_nccl", "non_cuda_aware", "flat")
    assert gpu_tests.try_gpu_means(world) == {"ways": dict.fromkeys(names), "shared": shared}


def test_a_way_that_fails_is_told_and_the_others_are_tried(world, double, monkeypatch):
    """On all ranks, since one alone would end the job."""
    monkeypatch.setattr(gpu_tests, "GPU_GRADIENTS", SMALL)
    double.plant("allReduce", ILLEGAL_ADDRESS, after=2)
    ways = gpu_tests.try_gpu_means(world)["ways"]
    assert "cudaErrorIllegalAddress" in ways.pop("hierarchical")
    assert ways == dict.fromkeys(("pure_nccl", "non_cuda_aware", "flat"))


def test_wrong_means_are_noticed(world, double, monkeypatch):
    monkeypatch.setattr(gpu_tests, "GPU_GRADIENTS", SMALL)
    double.bus_id = "0000:00:00.0"
    real = gpu_tests.devices.to_host
    monkeypatch.setattr(gpu_tests.devices, "to_host", lambda array: real(array) + (world.rank == 1))
    found = gpu_tests.try_gpu_means(world)
    assert found == {
        "ways": {"flat": "rank 1: ValueError: the means are wrong"},
        "shared": True,
    }


def test_without_gpus_all_is_left_out(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # its import fails
    assert set(gpu_tests.try_gpu_means(world)) == {"reason"}
