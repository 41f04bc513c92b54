"""Each body runs on the double of CuPy and NCCL, and on a real device where CuPy finds one."""

from __future__ import annotations

import pytest

from tests.support.doubles import gpus
from tests.support.doubles.cupy_double import installed


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none, saying why."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    why = None
    if marked:
        why = gpus.why_none()
    if why is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))


@pytest.fixture(autouse=True)
def no_means_of_other_tests():
    """Those that a test left in its errors' frames would send arrays by the host until they die."""
    gpus.forget_means()


@pytest.fixture
def double():
    """The double of the process's device, for what only that can show."""
    with installed() as device:
        yield device


@pytest.fixture(params=["double", pytest.param("device", marks=pytest.mark.gpu)])
def gpu(request, world):
    """The rank's device, of either kind; nothing may be left on the double's streams."""
    with gpus.of_kind(request.param, world) as device:
        yield device


@pytest.fixture
def one_each(gpu, world):
    """Likewise, where no two ranks share one, as NCCL wants it."""
    gpus.one_each(world)
    return gpu


@pytest.fixture
def device(world):
    """A real one alone, for what the double lacks; the test is marked `gpu`."""
    with gpus.real(world) as device:
        yield device
