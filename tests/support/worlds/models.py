"""A model as `chainermn_comm` sees one, without Chainer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.testing import assert_array_equal


class Param:
    """A parameter: `data` and `grad` are arrays or None."""

    def __init__(self, data=None, grad=None):
        self.data = data
        self.grad = grad


class Model:
    """Named parameters."""

    def __init__(self, **params: Param):
        self.params = params

    def namedparams(self) -> Iterator[tuple[str, Param]]:
        return iter([(f"/{name}", param) for name, param in self.params.items()])

    def __getitem__(self, name: str) -> Param:
        return self.params[name]


def with_grads(**grads) -> Model:
    """A model with these gradients, and parameters of zeros like them."""
    return Model(
        **{name: Param(np.zeros(np.shape(g), g.dtype), g) for name, g in grads.items()}
    )


def check_mean(comm, size: int = 9, calls: int = 1):
    """Assert that gradients get their mean (collective)."""
    for _ in range(calls):
        model = with_grads(w=np.full(size, comm.rank, "f4"))
        comm.allreduce_grad(model)
        assert_array_equal(model["w"].grad, (comm.size - 1) / 2)


def finish(reducer, *buckets: Model, payload: bytes = b"") -> list[bytes]:
    """Hand in the buckets and take all steps up to the end; the payloads (collective)."""
    for bucket in buckets:
        reducer.add(bucket)
    payloads: list[bytes] = reducer.agree(payload=payload)
    work = reducer.start()
    work.wait()
    work.assign()
    return payloads
