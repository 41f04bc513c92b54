"""A job with gradients in flight ends as any other; and what happens where MPI bears no threads."""

from __future__ import annotations

import pytest

from tests.support.jobs.runner import run_text
from tests.support.plugins.pairwise import in_full

pytestmark = pytest.mark.ci

SCRIPT = """
import sys, warnings
import chainer, numpy as np
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer

def update():
    model.cleargrads()
    model.w.grad = np.full_like(model.w.array, comm.rank)
    optimizer.update()

comm = create_communicator()
model = chainer.Link()
with model.init_scope():
    model.w = chainer.Parameter(np.zeros(3_000_000, np.float32))
optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1.0), comm, True).setup(model)
for _ in range(4):
    update()
assert optimizer.t == 2
assert (model.w.array == -2 * (comm.size - 1) / 2).all()
"""


@pytest.mark.parametrize(
    ("how", "hook"),
    [
        ("raise ValueError('planted')", "0"),
        *in_full(("if comm.rank: raise ValueError('planted')", "1")),
    ],
)
def test_ranks_that_fail_end_the_job(how, hook):
    """The exchange that all ranks have begun is waited for; with the hook nobody waits."""
    environment = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": hook}
    job = run_text(2, SCRIPT + how, environment=environment)
    assert job.returncode not in (0, None), job
    assert "ValueError: planted" in job.err, job


@pytest.mark.parametrize(("level", "warnings"), [("multiple", 0), ("funneled", 2)])
def test_a_job_may_end_with_gradients_in_flight(level, warnings):
    """Without threads in MPI they are as stale, and each rank says so once."""
    job = run_text(2, f"import mpi4py; mpi4py.rc.thread_level = {level!r}\n" + SCRIPT)
    assert job.returncode == 0, job
    assert job.err.count("RuntimeWarning: this MPI was not started with") == warnings, (
        job
    )
    assert job.err.count("gradients are left that no step has used") == 1, job


ORPHAN = """
import threading
import chainer, numpy as np
from chainermn_comm import RankMismatchError, create_communicator
from chainermn_train import create_multi_node_optimizer

comm = create_communicator()
model = chainer.links.Linear(1000, 1000)
optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1.0), comm, overlap=True)
optimizer.setup(model)
update = lambda: optimizer.update(lambda: chainer.functions.sum(model(np.ones((2, 1000), "f"))))
for _ in range(3):
    update()
try:
    update() if comm.rank else comm.bcast_obj("elsewhere")
except RankMismatchError:
    names = [thread.name for thread in threading.enumerate()]
    assert "ChainerMN" not in names
    print("all have raised")
"""


def test_nobody_sends_gradients_that_others_do_not_wait_for():
    """Ranks that are elsewhere learn of one another before backward."""
    job = run_text(2, ORPHAN)
    assert job.returncode == 0, job
    assert job.out.count("all have raised") == 2, job
