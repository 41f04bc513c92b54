"""Three hosts for the whole run, and what they lack where there can be none."""

from __future__ import annotations

import pytest

from tests.support.hosts.virtual_hosts import Cluster, missing

HOSTS = ("alpha", "beta", "gamma")


@pytest.fixture(scope="session")
def cluster():
    lacking = missing()
    if lacking:
        pytest.skip(f"no hosts can be made here: {lacking}")
    with Cluster(HOSTS) as made:
        yield made
