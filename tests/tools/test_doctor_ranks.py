"""How the doctor judges what ranks reported, for every way in which they can come to grief."""

from __future__ import annotations

import pytest

from tests.support.tools.doctor import COMMUNICATORS, STAGES, STEPS

# Of two ranks.
START, ALLGATHER, MESSAGES = STEPS[:3]
END = STEPS[-1]
FLAT = "communicator_flat"
GPU_LESS = "CUDA finds no device"
OTHER = "use the communicator 'non_cuda_aware', or another build of this MPI"
RATES = {"bytes_per_second": 5e9, "copied_bytes_per_second": 1e10}
FAST = {"correct": True, "problem": None, "wrong": [], **RATES}
SPECIAL = {
    ALLGATHER: {"ranks": [0, 1]},
    "communicator_pure_nccl": {"reason": GPU_LESS},
    END: {},
}


def reports(number: int, until: str | None = None, **changed: dict) -> dict:
    """What a rank reports that may be still at a step, or died there; a step with blanks as _."""
    found: dict = {}
    start = {"rank": number, "size": 2, "host": "here", "level": "multiple"}
    for step in STEPS:
        found[step] = {START: start, **SPECIAL}.get(step, FAST)
        found[step] = {**found[step], **changed.get(step.replace(" ", "_"), {})}
        if step == until:
            found[step] = None
            break
    return found


def both(**changed: dict) -> tuple[dict, dict]:
    return reports(0, **changed), reports(1, **changed)


@pytest.fixture
def judge(machine):
    """Gives the findings about a job on a machine that is well; and those that are bad."""
    machine.plant(mpi="MPICH", cores=(2, 0.5))

    def judged(*reported, **job) -> tuple[dict, list[str]]:
        machine.job(*reported, **job)
        found = machine.live()
        return found, [name for name, one in found.items() if one.hint]

    return judged


def test_every_communicator_and_step_has_its_check():
    assert (
        {f"communicator_{name}" for name in COMMUNICATORS}
        < set(STEPS)
        <= {*STAGES["live"]}
    )


def test_a_good_job_is_well(judge):
    found, bad = judge(*both())
    assert bad == []
    skipped = [name for name, one in found.items() if one.status == "skipped"]
    assert skipped == ["communicator_pure_nccl"]
    assert "5 GB/s, 0.5 of a copy in memory (10 GB/s)" in found[FLAT].message
    assert found[FLAT].details == RATES


ALONE = {START: {"rank": 0, "size": 1, "host": "here", "level": "multiple"}}
BEGUN = {START: None}
ROOT = "mpiexec has detected an attempt to run as root.\nat your own risk.\n"


@pytest.mark.parametrize(
    ("reported", "status", "err", "name", "said", "fix"),
    [
        ((), None, "", START, "mpiexec hangs", "getent"),
        (
            (BEGUN, BEGUN),
            None,
            "",
            START,
            "0 of 2 ranks came through MPI_Init",
            "0 and 1",
        ),
        ((reports(0), BEGUN), None, "", START, "1 of 2 ranks came through", "0 and 1"),
        ((), 1, ROOT, START, "attempt to run as root", "ordinary user"),
        ((), 0, "", START, "said: nothing", "0 and 1"),
        ((reports(0),), 0, "", START, "1 of 2 ranks came up", "0 and 1"),
        (
            (ALONE, ALONE),
            0,
            "",
            ALLGATHER,
            "each of the 2 ranks says that it is rank 0 of 1",
            "PATH",
        ),
        ((reports(0, ALLGATHER), reports(1)), None, "", ALLGATHER, "hangs", "UCX_TLS"),
    ],
    ids=[
        "hangs",
        "init hangs",
        "one hangs",
        "root",
        "silent",
        "one missing",
        "alone",
        "stuck",
    ],
)
def test_ranks_that_do_not_come_up_or_meet_are_named(
    judge, reported, status, err, name, said, fix
):
    found, bad = judge(*reported, status=status, err=err)
    assert bad == [name]
    assert said in found[name].message
    assert fix in found[name].hint
    after = list(found)[list(found).index(name) + 1 :]
    assert {found[one].status for one in after} <= {"skipped", "ok"}
    assert found[FLAT].blocked_by == name


@pytest.mark.parametrize("step", STEPS[3:])
def test_a_rank_that_dies_is_named_by_what_it_was_at(judge, step):
    error = "Segmentation fault (signal 11)"
    found, bad = judge(
        reports(0, step), reports(1, step), status=139, err=f"{error}\n=====\n"
    )
    assert bad == [step]
    assert (
        "0 of 2 ranks came through it; then the job ended with status 139"
        in found[step].message
    )
    assert error in found[step].message
    assert found[step].hint


def test_what_a_rank_reported_before_it_was_killed_counts(judge):
    found, bad = judge(reports(0, ALLGATHER), reports(1), status=9)
    assert (bad, found[START].status) == ([ALLGATHER], "ok")
    assert "1 of 2 ranks came through it" in found[ALLGATHER].message


def test_a_rank_that_hangs_is_named_by_what_it_is_at(judge):
    found, bad = judge(reports(0, FLAT), reports(1), status=None)
    assert bad == [FLAT]
    assert found[FLAT].message.startswith(
        "it hangs: 1 of 2 ranks came through it within "
    )
    assert found["communicator_naive"].status == "ok"
    assert found["communicator_dummy"].status == "skipped"


@pytest.mark.parametrize(
    ("cores", "load", "said"), [(1, 0, "1 cores"), (2, 2.5, "more to do")]
)
def test_what_hangs_may_just_be_slow_with_few_cores_or_on_a_busy_machine(
    judge, machine, cores, load, said
):
    machine.cores(cores, load)
    found, _ = judge(reports(0, MESSAGES), reports(1), status=None)
    assert said in found[MESSAGES].message
    assert "--timeout" in found[MESSAGES].hint
    found, _ = judge(reports(0, START), reports(1), status=None)
    assert "MPI hangs as it starts" in found[START].message
    assert said in found[START].message


@pytest.mark.parametrize(
    ("of_flat", "said"),
    [
        ({"wrong": ["bcast"]}, "wrong values of bcast arrived"),
        ({"problem": "CHAINERMN_CHUNK_BYTES is 'x'"}, "CHAINERMN_CHUNK_BYTES is 'x'"),
    ],
)
def test_wrong_values_and_errors_are_named_with_their_operation(judge, of_flat, said):
    found, bad = judge(*both(communicator_flat={"correct": False, **of_flat}))
    assert (bad, found[FLAT].message) == ([FLAT], said)


def test_what_is_far_too_slow_for_memory_is_warned_of(judge, machine):
    slow = both(communicator_flat={"bytes_per_second": 1e7})
    found, bad = judge(*slow)
    assert (bad, found[FLAT].status) == ([FLAT], "warning")
    assert "10 MB/s, 0.001 of a copy" in found[FLAT].message
    machine.cores(2, load=2.5)
    assert judge(*slow)[1] == [], "others' work may be why"
    machine.cores(1)
    assert judge(*slow)[1] == [], "ranks that take turns are no wonder"


def test_lower_thread_levels_are_warned_of_unless_asked_for(judge, machine):
    funneled = both(ranks_start={"level": "funneled"})
    assert judge(*funneled)[1] == ["thread_level"]
    machine.plant(MPI4PY_RC_THREAD_LEVEL="funneled")
    assert judge(*funneled)[1] == []


@pytest.mark.parametrize(
    ("status", "bad"), [(0, []), (3, [END]), (None, [END])], ids=str
)
def test_a_bad_end_is_named(judge, status, bad):
    assert judge(*both(), status=status)[1] == bad


# With ranks that are really started, each alone.
MPIEXEC = """
while [ "$1" != -n ]; do shift; done; n=$2; shift 2
for i in $(seq $n); do "$@" & done; wait"""


def test_an_mpiexec_whose_ranks_are_alone_is_named(machine, says):
    said = (
        f"each of the 2 ranks says that it is rank 0 of 1: {machine.mpiexec(MPIEXEC)} "
    )
    says("ranks_meet", "failed", said, "PATH")
