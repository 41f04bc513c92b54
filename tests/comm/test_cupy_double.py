"""What the double of CuPy offers, CuPy has too."""

from __future__ import annotations

import inspect
from importlib import util

import pytest

from tests.support.cupy_double import Gpu, make_cupy

pytestmark = pytest.mark.skipif(
    util.find_spec("cupy") is None, reason="compares with CuPy, which isn't installed"
)


def public(thing) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def missing(double, real) -> set[str]:
    return {name for name in public(double) if not hasattr(real, name)}


def test_modules_have_the_names_of_cupys():
    import cupy
    from cupy.cuda import nccl

    fake, fake_cuda, fake_nccl = make_cupy(Gpu(0))
    assert not missing(fake, cupy)
    assert not missing(fake_cuda, cupy.cuda)
    assert not missing(fake_cuda.runtime, cupy.cuda.runtime)
    assert not missing(fake_nccl, nccl)
    for name in public(fake_nccl):
        if name.startswith("NCCL"):
            assert getattr(fake_nccl, name) == getattr(nccl, name)
    for name in ("memcpyHostToDevice", "memcpyDeviceToHost"):
        assert getattr(fake_cuda.runtime, name) == getattr(cupy.cuda.runtime, name)


def test_arrays_streams_and_events_have_the_names_of_cupys():
    import cupy

    from tests.support import cupy_double

    assert not missing(cupy_double.ndarray, cupy.ndarray)
    assert not missing(cupy_double.Stream, cupy.cuda.Stream)
    assert not missing(cupy_double.Event, cupy.cuda.Event)
    assert hasattr(cupy.cuda.Device, "pci_bus_id")
    assert hasattr(cupy.RawModule, "get_function")


def test_ncclcommunicators_verbs_take_the_same_arguments():
    from cupy.cuda import nccl

    *_, fake = make_cupy(Gpu(0))
    for name in public(fake.NcclCommunicator):
        # Cython writes the signature into the docstring: name(self, intptr_t sendbuf, ...)
        text = getattr(nccl.NcclCommunicator, name).__doc__.split("\n")[0]
        theirs = text[text.index("(") + 1 : text.rindex(")")].split(",")
        mine = inspect.signature(getattr(fake.NcclCommunicator, name)).parameters
        assert len(mine) == len(theirs), text
