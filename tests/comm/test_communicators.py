"""Communicators of the user's own, by a name that they add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chainermn_comm import create_communicator
from chainermn_comm.communicators import COMMUNICATORS
from tests.support.worlds.models import check_mean
from tests.support.worlds.topologies import KNOWN, host_backend

pytestmark = pytest.mark.world


@pytest.fixture
def made(monkeypatch):
    """The backends of the communicator ``mine``, once there is one."""
    backends = []

    def mine(group):
        backends.append(host_backend(replace(group)))
        return backends[-1], backends[-1]

    monkeypatch.setitem(COMMUNICATORS, "mine", mine)
    return backends


def test_the_names_are_those_of_the_functions():
    assert tuple(COMMUNICATORS) == KNOWN


@pytest.mark.usefixtures("made")
def test_one_is_not_taken_for_reproducible():
    with create_communicator("mine") as comm:
        assert comm.get_config("reproducible") is False
    with pytest.raises(ValueError, match="'mine' isn't the library's own"):
        create_communicator("mine", reproducible=True)


def test_settings_reach_its_backends(world, made):
    with create_communicator("mine") as comm:
        comm.set_config("chunk_bytes", 4096)
        check_mean(comm)
        assert [backend.group.settings.chunk_bytes for backend in made] == [4096]
