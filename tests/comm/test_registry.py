"""Communicators of the user's own, in the registry."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from chainermn_comm import create_communicator
from chainermn_comm.registry import REGISTRY, Entry
from tests.support.worlds.models import check_mean
from tests.support.worlds.topologies import host_backend

pytestmark = pytest.mark.world


def test_an_algorithm_of_the_users_own_is_not_taken_for_reproducible(monkeypatch):
    monkeypatch.setitem(REGISTRY, "mine", Entry("bucketed", lambda group: Mock()))
    with create_communicator("mine") as comm:
        assert comm.get_config("reproducible") is False
    with pytest.raises(ValueError, match="'mine' has a backend of its own"):
        create_communicator("mine", reproducible=True)


def test_a_name_of_no_backend_is_an_error_on_all_ranks(world, monkeypatch):
    monkeypatch.setitem(REGISTRY, "mine", Entry("hierarchical"))
    with pytest.raises(
        ValueError, match=r"unknown backend 'hierarchical'; use one of: bucketed,"
    ):
        create_communicator("mine")
    create_communicator("flat").finalize()


def test_settings_reach_a_backend_of_the_users_own(world, monkeypatch):
    made = []

    def own(group):
        made.append(host_backend(replace(group)))
        return made[-1]

    monkeypatch.setitem(REGISTRY, "mine", Entry(own))
    with create_communicator("mine") as comm:
        comm.set_config("chunk_bytes", 4096)
        check_mean(comm)
        assert [backend.group.settings.chunk_bytes for backend in made] == [4096]
