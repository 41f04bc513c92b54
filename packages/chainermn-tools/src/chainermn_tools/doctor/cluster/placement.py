"""The job that the doctor starts on the hosts, and the check of where its ranks are.

    python placement.py JOB

runs a rank. JOB is JSON: ``seconds`` after which the rank ends itself, and ``pairs`` and
``communicators`` as :mod:`chainermn_tools.doctor.cluster.transfer_tests` wants them. Ranks report
what they found as events.
"""

from __future__ import annotations

import functools
import json
import signal
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from _chainermn_events import emit
from chainermn_tools import jobs
from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped
from chainermn_tools.doctor.cluster.facts import (
    ClusterFacts,
    address_of,
    gather_facts,
    join_names,
    over_hosts,
)
from chainermn_tools.doctor.hints import hint_for_output, last_line
from chainermn_tools.doctor.rank_job import EVENT, run_ranks
from chainermn_tools.doctor.ranks import COMMUNICATORS, START

# So many ranks of a host show where it puts them; more would only take longer.
MAX_RANKS_PER_HOST = 2
# Usual seconds of the job, share of the remaining time, and limit; then each host may be tried
# alone. Ranks do little: whoever isn't done by then hangs, or is very slow.
JOB_TIME = (60.0, 0.4, 0.6)
# Who was told to end goes on at most so much longer.
SPARE_SECONDS = 3
# Up to so many hosts each two are tried; of more, neighbours.
MAX_ALL_PAIRS = 6
# Hosts that are tried alone, where one that hangs may hold up all, and for how long.
MAX_ALONE, ALONE_SECONDS = 16, 40.0
# The communicator that refuses more than one host.
SINGLE_HOST = "single_node"
NEEDS = (
    *("hostfile", "slots", "host names", "host keys", "ssh"),
    *("hosts' python", "hosts' packages", "hosts' mpiexec", "hosts' variables"),
    *("hosts' shared memory", "connections", START),
)
Pair = tuple[str, str, "str | None"]

checks = Checks()


@dataclass(frozen=True)
class ClusterJob:
    """What became of the ranks on the hosts.

    Attributes:
        ranks_per_host: how many of them each host should have got.
        timeout: how many seconds they had.
        pairs: names of two hosts each, and where the first one finds the second.
        communicators: that they were to try.
        output: how mpiexec ended, what ranks reported, and what was printed.
    """

    ranks_per_host: dict[str, int]
    timeout: float
    pairs: tuple[Pair, ...]
    communicators: tuple[str, ...]
    output: jobs.JobOutput

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of the ranks' events that have one of this name, in order."""
        events = [event.fields for event in self.output.events if event.kind == EVENT]
        return [fields for fields in events if name in fields]


def run_cluster_job(context: Context) -> ClusterJob:
    """Run the job; for ``context.cached``, where all hosts that are to run ranks have answered."""
    assigned = jobs.assign_slots(context.hosts, context.ranks)
    ranks_per_host = {host: min(ranks, MAX_RANKS_PER_HOST) for host, ranks in assigned.items()}
    pairs = _choose_pairs(context.cached(gather_facts), list(ranks_per_host))
    names = tuple(name for name in COMMUNICATORS if not pairs or name != SINGLE_HOST)
    timeout = context.time_for(*JOB_TIME)
    output = start_ranks(context, ranks_per_host, timeout, pairs, names)
    return ClusterJob(ranks_per_host, timeout, pairs, names, output)


def start_ranks(
    context: Context,
    ranks_per_host: dict[str, int],
    timeout: float,
    pairs: tuple[Pair, ...] = (),
    communicators: tuple[str, ...] = (),
) -> jobs.JobOutput:
    """Start ranks on the hosts, and wait for their end.

    Args:
        context: of the check.
        ranks_per_host: how many ranks each host gets.
        timeout: of the job, in seconds.
        pairs: see :class:`ClusterJob`.
        communicators: likewise.
    """
    job = {
        "seconds": int(timeout) + SPARE_SECONDS,
        "pairs": pairs,
        "communicators": communicators,
    }
    command = jobs.rank_command(__file__, json.dumps(job))
    ranks, variables = sum(ranks_per_host.values()), {"OMP_NUM_THREADS": "1"}
    return run_ranks(context, ranks, command, ranks_per_host, timeout, 1, variables)


def started_on(output: jobs.JobOutput) -> Counter[str]:
    """Return how many ranks started on each host, by the hosts' own names."""
    return Counter(event["host"] for event in output.events if event.kind == "started")


def _choose_pairs(cluster: ClusterFacts, hosts: list[str]) -> tuple[Pair, ...]:
    """Return the pairs of hosts between which messages are sent, by their own names."""
    known = cluster.facts()
    # A host that has several names is one.
    machines = {known[host]["machine"]: host for host in reversed(hosts)}
    single = [host for host in hosts if machines[known[host]["machine"]] == host]
    if len(single) <= MAX_ALL_PAIRS:
        both = list(combinations(single, 2))
    else:
        both = list(zip(single, [*single[1:], single[0]], strict=True))
    return tuple(
        (known[a]["hostname"], known[b]["hostname"], address_of(b, a, known)) for a, b in both
    )


@checks.add("placement", "Do ranks start on the hosts that were asked for, and meet?", NEEDS)
@over_hosts
def placement(context: Context, cluster: ClusterFacts) -> CheckResult:
    names = {host: facts["hostname"] for host, facts in cluster.facts().items()}
    for host in jobs.assign_slots(context.hosts, context.ranks):
        if host not in names:
            return skipped(f"{host} gave no answer")
    job = context.cached(run_cluster_job)
    wanted = Counter[str]()
    for host, ranks in job.ranks_per_host.items():
        wanted[names[host]] += ranks
    met = job.records("hosts")  # the host of each rank, as they told one another
    if not met:
        began, asked = started_on(job.output), job.ranks_per_host
        silent = [host for host in asked if began[names[host]] < wanted[names[host]]]
        if job.output.timed_out:
            return _judge_hang(context, silent, len(silent) == len(asked), job.timeout)
        return _judge_failure(job.output, silent)
    actual = Counter(met[0]["hosts"])
    if actual != wanted:
        return failed(
            f"ranks are on {_describe(actual)}, and should be on {_describe(wanted)}",
            "env | grep -E 'HYDRA_|PRTE_MCA_|OMPI_MCA_|SLURM_'   # something overrules the hosts",
            ranks=dict(actual),
        )
    return ok(_describe(wanted), ranks=dict(wanted))


def _judge_hang(context: Context, silent: list[str], all_are: bool, timeout: float) -> CheckResult:
    """Return which host keeps ranks from starting, or that none does."""
    if not silent:
        return failed(
            "MPI hangs while it starts, or while ranks meet: all ranks began",
            "export UCX_TLS=tcp,self   # (MPICH), OMPI_MCA_btl=tcp,self (Open MPI): plain TCP",
        )
    message = f"mpiexec hangs: no rank began on {join_names(silent)} within {timeout:.0f} s"
    if all_are and 1 < len(silent) <= MAX_ALONE:
        # One that hangs may hold up all.
        alone = _hanging_alone(context, silent, min(ALONE_SECONDS, context.remaining()))
        if 0 < len(alone) < len(silent):
            message = f"mpiexec hangs because of {join_names(alone)}: no rank begins there"
            silent = alone
    hint = f"ssh {silent[0]} mpiexec -n 1 hostname   # if it hangs too, install MPI anew there"
    return failed(message, hint, hosts=silent)


def _hanging_alone(context: Context, hosts: list[str], timeout: float) -> list[str]:
    """Return the hosts on which a rank doesn't start even without the others."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        done = list(pool.map(lambda host: start_ranks(context, {host: 1}, timeout), hosts))
    return [host for host, one in zip(hosts, done, strict=True) if not started_on(one)]


def _judge_failure(output: jobs.JobOutput, silent: list[str]) -> CheckResult:
    where = f"no rank began on {join_names(silent)}" if silent else "all ranks began"
    line = last_line(output.stderr) or last_line(output.stdout)
    return failed(
        f"{where}, and the job ended with status {output.status}: {line}",
        hint_for_output(
            f"{output.stdout}\n{output.stderr}",
            "run it by hand to see what mpiexec says: chainermn launch --hosts ...",
        ),
        hosts=silent,
    )


def _describe(ranks: Counter[str]) -> str:
    parts = [f"{count} rank{'s' if count > 1 else ''} on {host}" for host, count in ranks.items()]
    return join_names(parts)


def main() -> None:
    """Be a rank: start MPI, let rank 0 report all hosts, and exchange data."""
    job = json.loads(sys.argv[1])
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(int(job["seconds"]))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    report = functools.partial(emit, EVENT)
    if world.rank == 0:
        report(hosts=hosts)
    if job["pairs"] or job["communicators"]:
        from chainermn_tools.doctor.cluster import transfer_tests

        if transfer_tests.exchange_messages(world, hosts, job["pairs"], report):
            transfer_tests.exchange_with_communicators(world, job["communicators"], report)
    MPI.Finalize()


if __name__ == "__main__":
    main()
