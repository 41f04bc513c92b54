"""Communicators of every kind, over discovered and imposed topologies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.topologies import NAMES


@pytest.fixture(params=NAMES)
def comm(request: pytest.FixtureRequest) -> Iterator:
    """A communicator of each name over all ranks."""
    from chainermn_comm import create_communicator

    with create_communicator(request.param) as communicator:
        yield communicator


@pytest.fixture
def naive() -> Iterator:
    """A `naive` communicator, where the name makes no difference."""
    from chainermn_comm import create_communicator

    with create_communicator("naive") as communicator:
        yield communicator
