"""What the doctor finds and tries where there are GPUs."""

from __future__ import annotations

import time

import pytest

from chainermn_comm import cuda_aware
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.here import gpus
from chainermn_tools.doctor.live import steps, trying

pytestmark = pytest.mark.gpu
LIMIT_SECONDS = 100


@pytest.mark.parametrize("check", [gpus.driver, gpus.cupy, gpus.nccl, gpus.visible_gpus])
def test_a_machine_with_gpus_is_well(check):
    answer = check.look(Context(time.monotonic() + LIMIT_SECONDS))
    assert answer.status == "ok", answer


@pytest.mark.world
@pytest.mark.parametrize("name", steps.COMMUNICATORS)
def test_communicators_are_right(world, name):
    found = trying.communicator(world, name)
    shared = {"why_not": "there are fewer GPUs than ranks"}
    assert found == shared or (found["right"], found["problem"]) == (True, None)


@pytest.mark.world
def test_device_memory_is_summed_where_mpi_takes_it(world):
    found = trying.device_reduce(world)
    aware = all(world.allgather(cuda_aware.mpi_takes_gpu_memory()))
    assert found == ({"aware": True, "right": True} if aware else {"aware": False})
