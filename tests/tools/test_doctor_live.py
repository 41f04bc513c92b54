"""How the doctor judges what ranks noted, for every way in which they can come to grief."""

from __future__ import annotations

import json
import time

import pytest

from chainermn_comm.catalogue import RECIPES
from chainermn_tools import program
from chainermn_tools.doctor import HERE, LIVE, facts
from chainermn_tools.doctor.check import Check, Context, ok
from chainermn_tools.doctor.live import checks, job, rank, steps
from chainermn_tools.doctor.runner import Layer, examine
from chainermn_tools.launch.hosts import from_list

RANKS = 2
WELL = {"right": True, "problem": None}
GPU_LESS = "CUDA finds no device"
FAST = {**WELL, "wrong": [], "bytes_per_second": 5e9, "copied_bytes_per_second": 1e10}


def found_in(step: str, number: int) -> dict:
    if step == steps.START:
        return {"rank": number, "size": RANKS, "host": "here", "level": "multiple"}
    if step == steps.MEET:
        return {"ranks": [0, 1]}
    if step == steps.of_communicator("pure_nccl"):
        return {"why_not": GPU_LESS}
    if step == steps.DEVICE:
        return {"aware": False, "why_not": GPU_LESS}
    return {} if step in (steps.ORDER, steps.END) else dict(FAST)


def notes(number: int, until: str | None = None) -> dict:
    """A rank's notes; of one that is still at a step, or died in it."""
    found: dict = {}
    for step in steps.STEPS:
        found[step] = None if step == until else found_in(step, number)
        if step == until:
            break
    return found


def turns(*ranks: int) -> str:
    return "".join(f"{rank.TURN} {one} {RANKS} here\n" for one in ranks)


def made(
    *ranks_notes: dict, status: int | None = 0, out: str | None = None, err: str = ""
) -> job.Job:
    ended = program.Ended(status, turns(0, 1) if out is None else out, err)
    return job.Job(RANKS, 30.0, ended, ranks_notes or (notes(0), notes(1)))


@pytest.fixture
def judged(monkeypatch):
    """Gives the findings about a job on a machine that is well."""
    assert set(checks.NEEDS) <= {check.name for check in HERE.checks}
    monkeypatch.setattr(facts, "launcher", lambda _: {"path": "/bin/mpiexec", "vendor": "MPICH"})
    monkeypatch.setattr(facts, "library", lambda _: {"vendor": "MPICH", "version": "5"})
    monkeypatch.setattr(job, "cores", lambda: {"usable": RANKS})
    monkeypatch.setattr(job.os, "getloadavg", lambda: (0.5, 0.0, 0.0))
    fine = tuple(Check(name, "?", lambda _: ok("")) for name in checks.NEEDS)

    def judge(what: job.Job) -> dict:
        monkeypatch.setattr(job, "run", lambda _: what)
        context = Context(time.monotonic() + 60)
        found = examine([Layer("here", "", fine, 0.5), LIVE], context)
        return {one.name: one for one in found if one.layer == "live"}

    return judge


def bad(found: dict) -> list[str]:
    return [name for name, one in found.items() if one.status in ("failed", "warning")]


def test_every_communicator_has_its_check():
    assert set(steps.COMMUNICATORS) == set(RECIPES)
    assert set(steps.STEPS) <= {check.name for check in LIVE.checks}


def test_a_good_job_is_well(judged):
    found = judged(made())
    assert bad(found) == []
    skipped = [name for name, one in found.items() if one.status == "skipped"]
    assert skipped == ["communicator pure_nccl", "device reduce"]
    hierarchical = found["communicator hierarchical"]
    assert "5 GB/s, 0.5 of a copy in memory (10 GB/s)" in hierarchical.found
    assert hierarchical.details == {"bytes_per_second": 5e9, "copied_bytes_per_second": 1e10}


ALONE = [{steps.START: {"rank": 0, "size": 1, "host": "here", "level": "multiple"}}] * RANKS
BEGUN = {steps.START: None}
ROOT = "mpiexec has detected an attempt to run as root.\nat your own risk.\n"


@pytest.mark.parametrize(
    ("what", "name", "said", "fix"),
    [
        (job.Job(2, 30.0, program.Ended(None, "", ""), ()), steps.START, "mpiexec hangs", "getent"),
        (
            made(BEGUN, BEGUN, status=None),
            steps.START,
            "0 of 2 ranks came through MPI_Init",
            "0 and 1",
        ),
        (made(notes(0), BEGUN, status=None), steps.START, "1 of 2 ranks came through", "0 and 1"),
        (
            job.Job(2, 30.0, program.Ended(1, "", ROOT), ()),
            steps.START,
            "attempt to run as root",
            "ordinary user",
        ),
        (job.Job(2, 30.0, program.Ended(0, "", ""), ()), steps.START, "said: nothing", "0 and 1"),
        (made(notes(0), status=0), steps.START, "1 of 2 ranks came up", "0 and 1"),
        (made(*ALONE), steps.MEET, "each of the 2 ranks says that it is rank 0 of 1", "PATH"),
        (made(notes(0, steps.MEET), notes(1), status=None), steps.MEET, "hangs", "UCX_TLS"),
    ],
    ids=["hangs", "init hangs", "one hangs", "root", "silent", "one missing", "alone", "stuck"],
)
def test_ranks_that_do_not_come_up_or_meet_are_named(judged, what, name, said, fix):
    found = judged(what)
    assert bad(found) == [name]
    assert said in found[name].found
    assert fix in found[name].fix
    after = list(found)[list(found).index(name) + 1 :]
    assert {found[one].status for one in after} <= {"skipped", "ok"}
    assert found["communicator flat"].details == {"because": name}


@pytest.mark.parametrize("step", steps.STEPS[3:])
def test_a_rank_that_dies_is_named_by_what_it_was_at(judged, step):
    error = "Segmentation fault (signal 11)"
    found = judged(made(notes(0, step), notes(1, step), status=139, err=f"{error}\n=====\n"))
    assert bad(found) == [step]
    assert "0 of 2 ranks came through it; then the job ended with status 139" in found[step].found
    assert error in found[step].found
    assert found[step].fix


def test_a_rank_that_hangs_is_named_by_what_it_is_at(judged):
    step = steps.of_communicator("flat")
    found = judged(made(notes(0, step), notes(1), status=None))
    assert bad(found) == [step]
    assert found[step].found == "it hangs: 1 of 2 ranks came through it within 30 s"
    assert found["communicator naive"].status == "ok"
    assert found["communicator dummy"].status == "skipped"


def test_more_ranks_than_cores_may_just_be_slow(judged, monkeypatch):
    monkeypatch.setattr(job, "cores", lambda: {"usable": 1})
    found = judged(made(notes(0, steps.MESSAGES), notes(1), status=None))
    assert "1 cores" in found[steps.MESSAGES].found
    assert "--timeout" in found[steps.MESSAGES].fix


def test_on_a_busy_machine_what_hangs_may_just_be_slow(judged, monkeypatch):
    monkeypatch.setattr(job.os, "getloadavg", lambda: (RANKS + 0.5, 0.0, 0.0))
    found = judged(made(notes(0, steps.MESSAGES), notes(1), status=None))
    assert "more to do" in found[steps.MESSAGES].found
    assert "--timeout" in found[steps.MESSAGES].fix
    found = judged(made(notes(0, steps.START), notes(1), status=None))
    assert "MPI hangs as it starts" in found[steps.START].found
    assert "more to do" in found[steps.START].found


def test_wrong_values_are_named_with_their_verb(judged):
    step = steps.of_communicator("flat")
    ranks = (notes(0), notes(1))
    for one in ranks:
        one[step] = {**FAST, "right": False, "wrong": ["bcast"]}
    found = judged(made(*ranks))
    assert bad(found) == [step]
    assert found[step].found == "wrong values of bcast arrived"


def test_what_a_communicator_raises_is_quoted(judged):
    step = steps.of_communicator("flat")
    ranks = (notes(0), notes(1))
    for one in ranks:
        one[step] = {"right": False, "wrong": [], "problem": "CHAINERMN_CHUNK_BYTES is 'x'"}
    found = judged(made(*ranks))
    assert (bad(found), found[step].found) == ([step], "CHAINERMN_CHUNK_BYTES is 'x'")


def test_what_is_far_too_slow_for_memory_is_warned_of(judged, monkeypatch):
    step = steps.of_communicator("naive")
    ranks = (notes(0), notes(1))
    for one in ranks:
        one[step] = {**FAST, "bytes_per_second": 1e7}
    found = judged(made(*ranks))
    assert (bad(found), found[step].status) == ([step], "warning")
    assert "10 MB/s, 0.001 of a copy" in found[step].found
    monkeypatch.setattr(job.os, "getloadavg", lambda: (RANKS + 0.5, 0.0, 0.0))
    assert bad(judged(made(*ranks))) == [], "others' work may be why"
    monkeypatch.setattr(job.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(job, "cores", lambda: {"usable": 1})
    assert bad(judged(made(*ranks))) == [], "ranks that take turns are no wonder"


@pytest.mark.parametrize(
    ("out", "status", "said"),
    [
        (turns(0, 1), "ok", "in this order"),
        ("[0] noise\n" + turns(1, 0), "ok", "mixed"),
        (turns(0), "failed", "these came: [0]"),
        (turns(0, 0), "failed", "these came: [0, 0]"),
        ("", "failed", "these came: []"),
    ],
)
def test_the_order_of_output_is_judged(judged, out, status, said):
    found = judged(made(out=out))[steps.ORDER]
    assert (found.status, said in found.found) == (status, True)


def test_lower_thread_levels_are_warned_of_unless_asked_for(judged, monkeypatch):
    ranks = (notes(0), notes(1))
    for one in ranks:
        one[steps.START]["level"] = "funneled"
    monkeypatch.delenv("MPI4PY_RC_THREAD_LEVEL", raising=False)
    assert bad(judged(made(*ranks))) == ["thread level"]
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "funneled")
    assert bad(judged(made(*ranks))) == []


@pytest.mark.parametrize(
    ("found", "vendor", "status", "fix"),
    [
        ({"aware": True, "right": True}, "MPICH", "ok", None),
        ({"aware": True, "right": False}, "MPICH", "failed", "non_cuda_aware"),
        ({"aware": False}, "MPICH", "skipped", None),
        ({"aware": False}, "MVAPICH2", "warning", "export MV2_USE_CUDA=1"),
    ],
)
def test_reduces_of_gpu_memory_are_judged(judged, monkeypatch, found, vendor, status, fix):
    monkeypatch.setattr(facts, "library", lambda _: {"vendor": vendor})
    ranks = (notes(0), notes(1))
    for one in ranks:
        one[steps.DEVICE] = found
    answer = judged(made(*ranks))[steps.DEVICE]
    assert answer.status == status
    assert fix is None or fix in answer.fix


@pytest.mark.parametrize(
    ("status", "name"), [(0, None), (3, steps.END), (None, steps.END)], ids=str
)
def test_a_bad_end_is_named(judged, status, name):
    assert bad(judged(made(status=status))) == ([] if name is None else [name])


def test_notes_of_a_rank_that_was_killed_are_read():
    lines = [
        json.dumps({"step": "a", "state": "done", "found": {"x": 1}}),
        json.dumps({"step": "b", "state": "begun"}),
        '{"step": "b", "state": "do',
    ]
    assert job._read(lines) == {"a": {"x": 1}, "b": None}


@pytest.mark.parametrize(
    ("ranks", "hosts", "started"),
    [(None, "", 2), (3, "", 3), (None, "a:64", 4), (3, "a,b", 2), (None, "a,b", 2)],
)
def test_how_many_ranks_are_started(monkeypatch, ranks, hosts, started):
    monkeypatch.setattr(job, "cores", lambda: {"usable": 4})
    named = from_list(hosts) if hosts else ()
    asked = Context(time.monotonic() + 60, ranks=ranks, hosts=named)
    assert job.ranks_to_start(asked) == started
