"""The arithmetic of PowerSGD: that of the paper, with bits that depend on no processor."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_train import PowerSGD, create_multi_node_optimizer
from chainermn_train.optimizers.exchanges.power_sgd import (
    first_matrix,
    orthonormal,
    whole,
)
from tests.support.jobs.runner import run_text
from tests.support.training.trainers import same_everywhere

ROWS = 12
COLUMNS = 10
RANK = 2
STEPS = 8
FACTORED = PowerSGD(RANK, start_step=0, min_ratio=0)


def planted(rank, number):
    """A rank's gradient, of a direction that all ranks have and of noise."""
    common = np.random.RandomState(number // 4).normal(size=(2, ROWS + COLUMNS))
    noise = np.random.RandomState((rank, number)).normal(size=(ROWS, COLUMNS))
    return common[0, :ROWS, None] * common[1, ROWS:] + 0.3 * noise


def as_in_the_paper(size, right):
    """Return the sum of the steps' products in double precision, with the first factor *Q*."""
    errors = [np.zeros((ROWS, COLUMNS))] * size
    total = 0
    for number in range(STEPS):
        sums = [planted(rank, number) + errors[rank] for rank in range(size)]
        left, _ = np.linalg.qr(sum(each @ right for each in sums) / size)
        own = [each.T @ left for each in sums]
        errors = [each - left @ it.T for each, it in zip(sums, own, strict=True)]
        right = sum(own) / size
        total = total + left @ right.T
    return total, errors


@pytest.mark.world
@pytest.mark.sizes(1, 2, 3)
def test_ranks_step_as_in_the_paper(naive):
    model = L.Linear(COLUMNS, ROWS)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(1), naive, compression=FACTORED
    ).setup(model)
    optimizer.synchronize()
    before = model.W.array.copy()
    right = first_matrix(FACTORED, "/W", model.W).right.T
    expected, errors = as_in_the_paper(naive.size, right.astype(float))
    for number in range(STEPS):
        model.W.grad = planted(naive.rank, number).astype("f")
        model.b.grad = np.full(ROWS, naive.rank, "f")
        optimizer.update()
        assert same_everywhere(naive, model)
    np.testing.assert_allclose(before - model.W.array, expected, atol=1e-4)
    np.testing.assert_allclose(model.b.array, -STEPS * (naive.size - 1) / 2, rtol=1e-6)
    norm = np.linalg.norm(errors[naive.rank])
    assert optimizer.compression_error == pytest.approx(norm, rel=1e-3)


def test_rows_become_orthonormal():
    rows = np.random.RandomState(0).normal(size=(4, 50)).astype("f")
    rows[1] = rows[0] + 1e-3 * rows[1]  # nearly the same
    found = orthonormal(rows)
    np.testing.assert_allclose(found @ found.T, np.eye(4), atol=1e-6)
    assert found.dtype == np.float32


def test_a_row_that_depends_on_others_becomes_zeros():
    rows = np.random.RandomState(0).normal(size=(4, 50)).astype("f")
    rows[1] = 0
    rows[2] = 3 * rows[0]
    found = orthonormal(rows)
    assert found.any(axis=1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(number):
    rows = np.ones((2, 3), "f")
    rows[0, 1] = number
    with np.errstate(all="ignore"):
        assert not np.isfinite(orthonormal(rows)).all(axis=1).any()
        assert not np.isfinite(whole(rows)).all()


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 32])
def test_products_are_exact_in_any_order(rank):
    """In whatever order and precision the terms are added."""
    random = np.random.RandomState(rank)
    left = orthonormal(random.normal(size=(rank, 60)).astype("f"))
    scales = 10.0 ** random.uniform(-6, 3, (rank, 1))
    right = (scales * random.normal(size=(rank, 50))).astype("f")
    factors = whole(left), whole(right)
    for given, rounded in zip((left, right), factors, strict=True):
        assert abs(rounded - given).max() <= 2.0**-24 * abs(given).max()
    product = factors[0].T @ factors[1]
    terms = [np.multiply.outer(*pair) for pair in zip(*factors, strict=True)]
    for order in terms, terms[::-1], random.permutation(terms):
        assert np.array_equal(sum(order), product)
        exact = sum(each.astype(np.longdouble) for each in order)
        assert np.array_equal(exact, product)
    # Unrounded factors have products that do depend on it, or the test shows nothing.
    plain = [np.multiply.outer(*pair) for pair in zip(left, right, strict=True)]
    assert rank < 4 or not np.array_equal(sum(plain), sum(plain[::-1]))


def test_a_factor_of_zeros_stays_so():
    assert not whole(np.zeros((2, 3), "f")).any()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("rank", 0, ValueError),
        ("rank", 33, ValueError),
        ("rank", 1.5, TypeError),
        ("start_step", -1, ValueError),
        ("min_ratio", -1, ValueError),
        ("min_ratio", float("nan"), ValueError),
        ("seed", -1, ValueError),
    ],
)
def test_arguments_out_of_range_are_refused(name, value, error):
    with pytest.raises(error, match=name):
        PowerSGD(**{name: value})


# The second rank's processor lacks what is newer, and its BLAS uses another kernel and
# two threads: with this, products of matrices differ.
SCRIPT = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["NPY_DISABLE_CPU_FEATURES"] = os.environ["FEATURES"]
    os.environ["OPENBLAS_CORETYPE"] = "Nehalem"
    os.environ["OMP_NUM_THREADS"] = "2"
import chainer
import chainermn
import numpy as np
from tests.support.training.small_models import TanhNet, batch_of
from tests.support.training.trainers import same_everywhere

comm = chainermn.create_communicator()
factored = chainermn.PowerSGD(start_step=0)
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.Adam(), comm, compression=factored).setup(TanhNet(0))
for number in range(20):
    optimizer.update(optimizer.target, batch_of(comm.rank, number))
    assert same_everywhere(comm, optimizer.target), number
assert optimizer.compression_error > 0
x = np.random.RandomState(0).normal(size=(300, 300)).astype("f")
products = comm.allgather_obj((x @ x).tobytes())
print("the BLAS", ["differs", "doesn't"][products[0] == products[1]])
"""


def test_ranks_have_the_same_bits_where_their_processors_differ():
    core = getattr(np, "_core", None) or np.core
    features = " ".join(core._multiarray_umath.__cpu_dispatch__)
    job = run_text(2, SCRIPT, environment={"FEATURES": features})
    assert job.returncode == 0, job
    if "the BLAS differs" not in job.out:
        pytest.skip("this BLAS has the same kernel on both ranks")
