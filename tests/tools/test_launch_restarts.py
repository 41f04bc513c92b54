"""With --min-ranks a job starts again on the hosts that answer, also on those that come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chainermn_tools.launch import restarts
from tests.support.tools.launched import Event, JobOutput

LAUNCHER = {"vendor": "MPICH"}
KNOWN = {"alpha": 2, "beta": 2, "gamma": 1}


@pytest.fixture
def started(monkeypatch):
    """The hosts that each job was started on; all of them fail."""
    found = []

    def mpiexec_command(launcher, ranks, script, *, hosts, **_):
        assert ranks == sum(hosts.values())
        found.append(dict(hosts))
        return ["mpiexec"]

    def run_job(*_, **__):
        failed = {"what": "of rank 0", "status": 1, "secondary": False, "traceback": ""}
        return JobOutput(
            status=1, events=[Event(0, "started", {}), Event(0, "failed", failed)]
        )

    monkeypatch.setattr(restarts.jobs, "mpiexec_command", mpiexec_command)
    monkeypatch.setattr(restarts.jobs, "run_job", run_job)
    return found


def let_answer(monkeypatch, *those):
    """Let these hosts answer, before each start in turn, which comes without a pause."""
    turns = iter(those)
    now = []
    monkeypatch.setattr(restarts, "answers", lambda _, host: host in now)
    monkeypatch.setattr(
        restarts, "_pause", lambda *_: now.__setitem__(slice(None), next(turns))
    )


def test_hosts_that_come_back_are_used(monkeypatch, started):
    let_answer(monkeypatch, ["alpha"], ["beta", "gamma"], ["gamma"], [*KNOWN])
    said = []
    options = {"hosts": KNOWN, "max_restarts": 4, "min_ranks": 2}
    result, _ = restarts.run_script(LAUNCHER, 5, ["train.py"], said.append, **options)
    assert not result.success
    # Gamma is too few.
    assert started == [KNOWN, {"alpha": 2}, {"beta": 2, "gamma": 1}, KNOWN]
    assert "only 1 of 2 ranks have hosts that answer" in said
    assert "starting again with 5 ranks, 4 of 4" in said


def test_without_min_ranks_no_host_is_asked(monkeypatch, started):
    let_answer(monkeypatch, [], [])
    restarts.run_script(
        LAUNCHER, 5, ["train.py"], lambda _: None, hosts=KNOWN, max_restarts=2
    )
    assert started == [KNOWN] * 3


@pytest.mark.parametrize(
    ("host", "status"), [("alpha", 0), ("beta", 255), ("beta", None), ("localhost", 1)]
)
def test_a_host_answers_where_a_command_runs_there(monkeypatch, host, status):
    def run(command, seconds):
        assert host in command
        if status is None:
            raise OSError("no ssh")
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(restarts.jobs, "run", run)
    assert restarts.answers(LAUNCHER, host) == (host != "beta")
