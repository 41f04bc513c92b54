"""Every public function, called with Chainer 7's `chainermn` and with ours, by two ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.compatibility import listed
from tests.compatibility.cases import CASES
from tests.compatibility.describing import differences, told
from tests.support.jobs import runner
from tests.support.jobs.scripts import ROOT

# One process of pytest has what the jobs found.
pytestmark = pytest.mark.xdist_group("compatibility/test_calls.py")

RANKS = 2
BUNDLED = {"CHAINERMN_USE_BUNDLED": "1"}
LIST = [each for each in listed.load() if each.cases or each.hung]
HANGS = {"type": "hangs"}
HUNG = [pattern for each in LIST for pattern in each.hung]


@dataclass(frozen=True, repr=False)
class Called:
    """What each rank got of each case; those from which the job ended on are missing."""

    ranks: list[dict[str, Any]]
    job: runner.Job


def called(folder, names, environment):
    quiet = {"PYTHONWARNINGS": "ignore", **environment}
    where = ("-m", "tests.compatibility.calls", folder, *names)
    job = runner.run(RANKS, *where, environment=quiet, cwd=ROOT)
    return Called([results_in(folder / str(n)) for n in range(RANKS)], job)


def results_in(path):
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, tab, result = line.partition("\t")
            if tab:
                found[json.loads(name)] = json.loads(result)
    return found


@pytest.fixture(scope="session")
def before(tmp_path_factory):
    asked = [name for name in CASES if not listed.matches(name, HUNG)]
    return called(tmp_path_factory.mktemp("before"), asked, BUNDLED)


@pytest.fixture(scope="session")
def now(tmp_path_factory):
    return called(tmp_path_factory.mktemp("now"), list(CASES), {})


def found(name, before, now):
    """The lines of what differs in the case, on either rank."""
    for got in now.ranks:
        assert name in got, now.job
    if listed.matches(name, HUNG):
        return [told("", HANGS, got[name]) for got in now.ranks]
    for got in before.ranks:
        assert name in got, before.job
    pairs = zip(before.ranks, now.ranks, strict=True)
    return [line for old, new in pairs for line in differences(old[name], new[name])]


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_it_gave(name, before, now):
    entries = [each for each in LIST if listed.matches(name, each.cases + each.hung)]
    assert len(entries) <= 1
    lines = found(name, before, now)
    where = [pattern for each in entries for pattern in each.where]
    untold = [
        line
        for line in lines
        if not any(listed.fits(line, pattern) for pattern in where)
    ]
    assert not untold, "\n".join(untold)
    assert bool(lines) == bool(entries), "this differs no more"


@pytest.mark.parametrize("entry", [pytest.param(each, id=each.row) for each in LIST])
def test_each_place_of_an_entry_differs(entry, before, now):
    names = [name for name in CASES if listed.matches(name, entry.cases + entry.hung)]
    lines = [line for name in names for line in found(name, before, now)]
    nothing = [
        each
        for each in entry.where
        if not any(listed.fits(line, each) for line in lines)
    ]
    assert not nothing


@pytest.mark.parametrize("which", ["before", "now"])
def test_the_jobs_end_well(which, request):
    job = request.getfixturevalue(which).job
    assert job.returncode == 0, job
