"""Failures that are noticed while ranks wait in NCCL, behind other work, or not at all any more."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest

from chainermn_comm import CommunicationError
from chainermn_comm.gpu import watcher
from tests.support.doubles import gpus
from tests.support.doubles.nccl_double import NcclError
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

SIZES = (2000, 3)  # packed, so that there is work after the sum


def raises(comm) -> None:
    """Assert that means raise, the second at the latest, and all that follows."""
    arrays = [np.full(size, comm.rank, "f4") for size in SIZES]
    with contextlib.suppress(CommunicationError):
        gpus.means_of(comm, arrays)
    gpus.wait_for_failure(comm)
    for _ in range(2):
        with pytest.raises(CommunicationError, match="interrupted on this rank"):
            gpus.means_of(comm, arrays)
    with pytest.raises(CommunicationError, match="interrupted on this rank"):
        comm.allreduce_obj(1)


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_communicators_whose_work_is_behind_one_another_are_aborted_at_once(
    world, double, name
):
    with on_nodes((0, 0, 1, 1)[: world.size], name) as comm:
        gpus.assert_mean(comm)
        gpus.settle(world, comm)
        double.plant("launchKernel", after=world.rank % 2)
        raises(comm)
        assert "stuck abort" not in double.calls


def test_what_fails_after_the_last_call_is_raised_by_finalize(world, double):
    grads = [gpus.put(np.full(size, world.rank, "f4")) for size in SIZES]
    model = Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)})
    comm = on_nodes([0] * world.size, "pure_nccl")
    for _ in range(2):
        comm.allreduce_grad(model)
        gpus.to_host(model["p0"].grad)
    gpus.settle(world, comm)
    double.plant("getAsyncError", NcclError("NCCL_ERROR_REMOTE_ERROR: it failed"))
    with pytest.raises(CommunicationError, match="NCCL_ERROR_REMOTE_ERROR: it failed"):
        gpus.finalize_or_hear(comm)


def test_what_fails_between_calls_is_printed_at_once_and_raised_by_the_next(
    world, double, capsys
):
    comm = on_nodes([0] * world.size, "pure_nccl")
    gpus.assert_mean(comm)
    gpus.settle(world, comm)
    double.delay = 40
    grad = gpus.put(np.ones(3, "f4"))
    comm.allreduce_grad(Model(w=Param(grad, grad)))
    double.nccl_fails = True
    watcher.stop_all()
    told = f"rank {world.rank}: averaging gradients on GPUs failed: .*NCCL_ERROR_REMOTE"
    assert re.search(f"ChainerMN: {told}", capsys.readouterr().err)
    with pytest.raises(CommunicationError, match=f"interrupted on this rank .*{told}"):
        comm.allreduce_obj(1)


def test_tables_of_many_calls_are_made_once(world, double):
    """With `overlap` a step has a call for each of many buckets."""
    with on_nodes([0] * world.size, "pure_nccl") as comm:
        models = []
        for number in range(20):
            grads = [
                gpus.put(np.full(5 + number, world.rank, dtype))
                for dtype in ("f4", "f8")
            ]
            models.append(
                Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)})
            )
        for step in range(3):
            if step == 2:
                double.made.clear()
            for model in models:
                comm.allreduce_grad(model)
            gpus.to_host(models[-1]["p0"].grad)
        assert not {"hostAlloc", "malloc", "memcpyAsync to device"} & set(double.made)
