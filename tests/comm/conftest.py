"""Communicators over all ranks, as they are: on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from chainermn_comm import create_communicator
from tests.comm.tracing import traced_into
from tests.support.worlds.third_party import Inheriting
from tests.support.worlds.topologies import ALGORITHMS, by_name


@pytest.fixture(params=by_name(*ALGORITHMS))
def comm(request):
    """A communicator of each algorithm, and in the full tier of each name."""
    with create_communicator(request.param) as communicator:
        yield communicator


@pytest.fixture
def naive():
    """A `naive` communicator, where the name makes no difference."""
    with create_communicator("naive") as communicator:
        yield communicator


@pytest.fixture(params=["ours", "inherited"])
def either(request, world):
    """A `naive` communicator, and one of a class that takes what it can from the base class."""
    if request.param == "ours":
        made = create_communicator("naive")
    else:
        made = Inheriting(world.Dup())
    with made as communicator:
        yield communicator


@pytest.fixture
def folder(world, tmp_path):
    """A folder of all ranks, into which they trace."""
    found = Path(world.bcast(str(tmp_path))) / "traces"
    with traced_into(found):
        yield found
        world.Barrier()
