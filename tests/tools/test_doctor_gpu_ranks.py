"""What the doctor's ranks try on GPUs, with a double of CuPy and NCCL in place of a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chainermn_tools.doctor.live import steps, trying
from tests.support.cupy_double import Gpu, installed

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The process's device."""
    with installed() as device:
        yield device


@pytest.mark.parametrize("name", steps.COMMUNICATORS)
def test_every_communicator_is_right_on_gpus(world, gpu, monkeypatch, name):
    monkeypatch.setattr(trying, "COUNT", 10_000)
    found = trying.communicator(world, name)
    assert "why_not" not in found
    assert (found["right"], found["wrong"], found["problem"]) == (True, [], None)
    if name in ("pure_nccl", "single_node"):
        assert "allReduce" in gpu.calls, "it was really tried there"


def test_a_wrong_mean_on_gpus_is_noticed(world, gpu, monkeypatch):
    real = trying.devices.to_host
    monkeypatch.setattr(trying.devices, "to_host", lambda array: real(array) + (world.rank == 1))
    found = trying.communicator(world, "pure_nccl")
    assert (found["right"], found["wrong"]) == (False, ["mean_grad on GPUs"])


def test_ranks_that_share_a_gpu_leave_nccl_alone(world, gpu, monkeypatch):
    gpu.bus_id = "0000:00:00.0"
    assert trying.communicator(world, "pure_nccl") == {"why_not": "there are fewer GPUs than ranks"}
    assert gpu.calls == []


def test_without_gpus_pure_nccl_says_so(world):
    assert set(trying.communicator(world, "pure_nccl")) == {"why_not"}
    assert set(trying.device_reduce(world)) == {"aware", "why_not"}


def test_device_memory_is_given_to_mpi_only_where_it_is_taken(world, gpu, monkeypatch):
    monkeypatch.setattr(trying, "mpi_takes_gpu_memory", lambda: world.rank == 0)
    assert trying.device_reduce(world) == {"aware": False}
