"""One Slurm for the whole run, and what it lacks where there can be none."""

from __future__ import annotations

import pytest

from tests.support.hosts.slurm import Slurm, lacking


@pytest.fixture(scope="session")
def slurm():
    if lacks := lacking():
        pytest.skip(f"no Slurm can be started here: {lacks}")
    with Slurm() as started:
        yield started
