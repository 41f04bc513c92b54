"""A variable that says nothing sensible is refused, as soon as a communicator is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chainermn_comm import RankMismatchError, create_communicator
from tests.support.oracles.raised import raises_on_all

pytestmark = pytest.mark.world

NO_SECONDS = ("x", "-1", "nan", "inf", "0x10", "1 s")
NO_SWITCH = ("x", "2", "-1", "on off")
# Of each variable that users set: what is no value of it, and what is one.
VARIABLES = {
    "CHAINERMN_TIMEOUT": ((*NO_SECONDS, "0.5", "1e10"), ("0", "3600", " 60 ")),
    "CHAINERMN_HOST_SILENCE": ((*NO_SECONDS, "0", "0.5"), ("60", "2.5")),
    "CHAINERMN_FORCE_ABORT_ON_EXCEPTION": (NO_SWITCH, ("0", "False", "no", "off")),
    "CHAINERMN_ALLOW_ALONE": (NO_SWITCH, ("0", "1", "true", "YES", "on")),
    "CHAINERMN_CHUNK_BYTES": (("x", "0", "63", "-64", "64.0", "1e6"), ("64", "4096")),
    "CHAINERMN_USE_BUNDLED": ((*NO_SWITCH, "true"), ("0",)),
    "CHAINERMN_NO_COMPAT": ((*NO_SWITCH, "true"), ("0", "1")),
    "CHAINERMN_GRACE": ((*NO_SECONDS, "0"), ("0.5", "1e6")),
}
# A folder's name may be anything, and the launcher alone sets the last two.
WITHOUT_CHECK = {"CHAINERMN_TRACE", "CHAINERMN_LOG_DIR", "CHAINERMN_RESTARTS"}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_malformed_variable_on_one_rank_raises_on_all(world, monkeypatch, name):
    is_last = world.rank == world.size - 1
    wrong, _ = VARIABLES[name]
    for text in wrong:
        if is_last:
            monkeypatch.setenv(name, text)
        with raises_on_all(is_last, ValueError) as caught:
            create_communicator("naive")
        assert name in str(caught.value)
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize("name", VARIABLES)
def test_what_is_a_value_is_taken_and_an_empty_one_is_none(world, monkeypatch, name):
    _, right = VARIABLES[name]
    texts = [*right, "  "]
    if name == "CHAINERMN_FORCE_ABORT_ON_EXCEPTION":
        texts = [*right]  # else an uncaught exception ends the world that tests share
    for text in texts:
        monkeypatch.setenv(name, text)
        with create_communicator("naive") as comm:
            assert comm.size == world.size


@pytest.mark.sizes(2, 3, 4)
def test_a_silence_that_differs_between_ranks_raises_on_all(world, monkeypatch):
    if world.rank:
        monkeypatch.setenv("CHAINERMN_HOST_SILENCE", "7")
    with pytest.raises(RankMismatchError, match="CHAINERMN_HOST_SILENCE"):
        create_communicator("naive")


def test_the_table_has_all_variables_of_the_manual():
    page = Path(__file__).parents[2] / "docs/reference.md"
    listed = set(re.findall(r"CHAINERMN_[A-Z_]+", page.read_text()))
    assert listed == VARIABLES.keys() | WITHOUT_CHECK
