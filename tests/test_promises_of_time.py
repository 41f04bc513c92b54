"""The promises of docs/failures.md that are times, each measured from the failure.

`make test` runs these one after the other with nothing beside; whatever else the machine does, they
must hold. No other test asserts a time.
"""

from __future__ import annotations

import re

import pytest

from tests.chaos.faults import Case
from tests.chaos.runs import Hosts
from tests.chaos.trials import CUT, MOST_SECONDS, Trials
from tests.support.failing import (
    COMMUNICATOR,
    RAISE,
    TRACEBACK,
    failed,
    seconds_since_failure,
)
from tests.support.virtual_hosts import Cluster, missing

pytestmark = pytest.mark.alone

# From a rank's failure to the end of mpiexec.
END_SECONDS = 5.0
TIMEOUT_SECONDS = 4.0
# From the time-out to the report.
REPORT_SECONDS = 3.0
# From MPI_Abort to the ranks' end by their monitor.
ABORT_SECONDS = 3.0

# What a rank does, the exit status of the job if it is promised, the last words on stderr.
FAILURES = {
    "exception": (RAISE, 1, TRACEBACK),
    "sys.exit": ("sys.exit(3)", 3, ("ChainerMN: rank {} of 2: sys.exit(3)",)),
    "early success": ("os._exit(0)", 1, ("ChainerMN: rank {} of 2: os._exit(0)",)),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", None, ()),
}
# The rank does nothing that the other waits for.
STALL = """
say_failing()
if world.rank == 1:
    time.sleep(others_stay)
comm.bcast_obj(None)
"""
WATCHED = """
from chainermn_comm import create_communicator
world.Barrier()  # imports take their time, which no watchdog counts
comm = create_communicator("naive")
others_stay = 1000
"""
IN_VAIN = "from tests.support.planted import abort_in_vain\n"


@pytest.mark.parametrize("end", FAILURES)
def test_five_seconds_after_a_failure_the_job_has_ended(end):
    statement, code, words = FAILURES[end]
    job = failed(2, code, words, end=statement, install=COMMUNICATOR)
    assert seconds_since_failure(job) < END_SECONDS, job


def test_a_call_that_waits_is_reported_and_the_job_ended_when_the_time_out_is_over():
    environment = {"CHAINERMN_TIMEOUT": f"{TIMEOUT_SECONDS:g}"}
    job = failed(2, None, environment=environment, install=WATCHED, body=STALL)
    (waited,) = re.findall(r"likely culprit: rank 1 .*\n.* has waited for ([\d.]+) s", job.err)
    reported = TIMEOUT_SECONDS + REPORT_SECONDS
    assert TIMEOUT_SECONDS <= float(waited) < reported, job
    assert TIMEOUT_SECONDS < seconds_since_failure(job) < reported + END_SECONDS, job


def test_three_seconds_after_an_abort_in_vain_the_ranks_are_ended():
    end = "abort_in_vain()\ntime.sleep(1000)"
    job = failed(2, None, end=end, install=WATCHED + IN_VAIN)
    assert ABORT_SECONDS < seconds_since_failure(job) < ABORT_SECONDS + END_SECONDS, job


@pytest.mark.full
@pytest.mark.skipif(bool(missing()), reason="no hosts can be made here")
def test_forty_seconds_after_a_link_was_cut_the_ranks_on_both_sides_have_ended():
    """20 for the silence to be no hiccup; then the monitors', the launcher's and MPI's own ends."""
    case = Case("link", "collective", 4, communicator="hierarchical", launcher="launch", hosts=2)
    with Cluster(("alpha", "beta")) as cluster:
        trial = Trials(Hosts(cluster)).run(case, restart=False)
    assert not trial.wrongs, trial
    assert trial.seconds[CUT] < MOST_SECONDS[CUT], trial
