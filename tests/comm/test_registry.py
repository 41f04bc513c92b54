"""Communicators of the user's own, in the registry."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from chainermn_comm import create_communicator
from chainermn_comm.registry import REGISTRY, Entry

pytestmark = pytest.mark.world


def test_an_algorithm_of_the_users_own_is_not_taken_for_reproducible(monkeypatch):
    monkeypatch.setitem(REGISTRY, "mine", Entry("bucketed", lambda group: Mock()))
    with create_communicator("mine") as comm:
        assert comm.get_config("reproducible") is False
    with pytest.raises(ValueError, match="'mine' has a backend of its own"):
        create_communicator("mine", reproducible=True)
