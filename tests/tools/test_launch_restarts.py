"""With --min-ranks a job starts again on the hosts that answer, also on those that come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chainermn_tools.launch import restarts
from tests.support.tools.jobs import Event, JobOutput

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

    failed = {"what": "of rank 0", "status": 1, "secondary": False, "traceback": ""}
    output = JobOutput(events=[Event(0, "failed", failed)])
    monkeypatch.setattr(restarts.jobs, "mpiexec_command", mpiexec_command)
    monkeypatch.setattr(restarts.jobs, "run_job", lambda *_, **__: output)
    return found


def run(monkeypatch, *answering, **options):
    """Start a job, and again without a pause; before, only these hosts answer, each time others."""
    turns = iter(answering)
    now = []
    said = []
    monkeypatch.setattr(restarts, "answers", lambda _, host: host in now)

    def pause(*_):
        now[:] = next(turns)

    monkeypatch.setattr(restarts, "_pause", pause)

    def log(text, *_):
        said.append(text)

    restarts.run_script(LAUNCHER, 5, ["train.py"], log, hosts=KNOWN, **options)
    return said


def test_hosts_that_come_back_are_used(monkeypatch, started):
    turns = (["alpha"], ["beta", "gamma"], ["gamma"], list(KNOWN))
    said = run(monkeypatch, *turns, max_restarts=4, min_ranks=2)
    # Gamma is too few.
    assert started == [KNOWN, {"alpha": 2}, {"beta": 2, "gamma": 1}, KNOWN]
    assert "only 1 of 2 ranks have hosts that answer" in said
    assert "restart 4 of 4, with 5 ranks" in said


def test_without_min_ranks_no_host_is_asked(monkeypatch, started):
    run(monkeypatch, [], [], max_restarts=2)
    assert started == [KNOWN] * 3


def test_a_host_answers_where_a_command_runs_there(monkeypatch):
    statuses = {"alpha": 0, "beta": 255}

    def run(command, seconds):
        name = command[-2]
        if name not in statuses:
            raise OSError("no ssh")
        return SimpleNamespace(returncode=statuses[name])

    monkeypatch.setattr(restarts.jobs, "run", run)
    names = ("alpha", "beta", "gamma", "localhost")
    answering = [name for name in names if restarts.answers(LAUNCHER, name)]
    assert answering == ["alpha", "localhost"]
