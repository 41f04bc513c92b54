"""Failures that are noticed while ranks wait in NCCL, behind other work, or not at all any more."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from chainermn_comm import CommunicationError
from chainermn_comm.gpu import watcher
from tests.support import gpus
from tests.support.models import Model, Param
from tests.support.nccl_double import NcclError
from tests.support.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

SIZES = (2000, 3)  # packed, so that there is work after the sum


def raises(comm) -> None:
    """Assert that means raise, the second at the latest, and go on to."""
    arrays = [np.full(size, comm.rank, "f4") for size in SIZES]
    with contextlib.suppress(CommunicationError):
        gpus.means_of(comm, arrays)
    for _ in range(2):
        with pytest.raises(CommunicationError):
            gpus.means_of(comm, arrays)


def test_a_rank_that_waits_inside_of_a_call_of_nccl_is_freed(world, double, monkeypatch):
    """NCCL connects ranks in the first call that needs it, which then waits for them."""
    from cupy.cuda import nccl

    def waiting(self, *_: object) -> None:
        for _ in range(10_000):
            if self.aborted:
                break
            time.sleep(1e-3)
        else:
            double.calls.append("stuck")
        raise nccl.NcclError("NCCL_ERROR_UNHANDLED: it was aborted")

    with on_nodes([0] * world.size, "pure_nccl") as comm:
        gpus.assert_mean(comm)
        world.Barrier()
        if comm.rank == 1:
            time.sleep(0.1)  # the others are in there
            double.plant("allReduce")
        else:
            monkeypatch.setattr(nccl.NcclCommunicator, "allReduce", waiting)
        raises(comm)
        assert "stuck" not in double.calls


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_communicators_whose_work_is_behind_one_another_are_aborted_at_once(
    world, double, name, failing
):
    with on_nodes((0, 0, 1, 1)[: world.size], name) as comm:
        gpus.assert_mean(comm)
        world.Barrier()
        if comm.rank == failing:
            double.plant("launchKernel")
        raises(comm)
        assert "stuck abort" not in double.calls


def test_what_fails_on_one_rank_alone_is_told_on_all_by_finalize(world, double):
    grads = [gpus.put(np.full(size, world.rank, "f4")) for size in SIZES]
    model = Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)})
    comm = on_nodes([0] * world.size, "pure_nccl")
    for _ in range(2):
        comm.allreduce_grad(model)
        gpus.to_host(model["p0"].grad)
    world.Barrier()
    if world.rank == 1:  # the others have done all of theirs
        double.plant("getAsyncError", NcclError("NCCL_ERROR_REMOTE_ERROR: it failed"))
    with pytest.raises(CommunicationError, match="NCCL_ERROR_REMOTE_ERROR"):
        comm.finalize()


def test_what_no_call_can_raise_any_more_is_printed_at_exit(world, double, capsys):
    comm = on_nodes([0] * world.size, "pure_nccl")
    gpus.assert_mean(comm)
    world.Barrier()
    double.delay = 40
    grad = gpus.put(np.ones(3, "f4"))
    comm.allreduce_grad(Model(w=Param(grad, grad)))
    double.nccl_fails = True
    watcher.stop_all()
    told = capsys.readouterr().err
    assert f"rank {world.rank}: averaging gradients on GPUs failed in the last call" in told
    with pytest.raises(CommunicationError, match=r"NCCL_ERROR|Nccl"):
        comm.finalize()


def test_tables_of_many_calls_are_made_once(world, double):
    """With `overlap` a step has a call for each of many buckets."""
    with on_nodes([0] * world.size, "pure_nccl") as comm:
        models = []
        for number in range(20):
            grads = [gpus.put(np.full(5 + number, world.rank, dtype)) for dtype in ("f4", "f8")]
            models.append(Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)}))
        for step in range(3):
            if step == 2:
                double.made.clear()
            for model in models:
                comm.allreduce_grad(model)
            gpus.to_host(models[-1]["p0"].grad)
        assert not {"hostAlloc", "malloc", "memcpyAsync to device"} & set(double.made)
