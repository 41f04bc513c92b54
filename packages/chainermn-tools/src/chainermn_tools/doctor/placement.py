"""Checks of ranks on the hosts: where they start, and what they exchange. All are one job."""

from __future__ import annotations

import functools
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
)
from chainermn_tools.doctor.cluster.facts import (
    ClusterFacts,
    gather_facts,
    join_names,
    over_hosts,
)
from chainermn_tools.doctor.hints import MORE_TIME, REPORT_IT, hint_for_output
from chainermn_tools.doctor.ranks.checks import COMMUNICATORS, START
from chainermn_tools.doctor.ranks.job import EVENT, RankJob, run_ranks
from chainermn_tools.formatting import format_bytes, format_count
from chainermn_tools.long_events import emit

# Enough ranks of a host to show where it puts them; more would only take longer.
MAX_RANKS_PER_HOST = 2
# Names that fit into an event.
HOSTS_AT_ONCE = 40
# Usual seconds of the job, share of the remaining time, and the most of it; then each
# host may be tried alone. Ranks do little: one that isn't done by then hangs, or is
# very slow.
JOB_TIME = (60.0, 0.4, 0.6)
# Most hosts whose pairs are all tried; of more hosts, only neighbours are.
MAX_ALL_PAIRS = 6
# Hosts that are tried alone, where one that hangs may hold up all, and for how long.
MAX_ALONE, ALONE_SECONDS = 16, 40.0
# The communicator that refuses more than one host.
SINGLE_HOST = "single_node"
NAME_NETWORK_HINT = (
    "name the network that joins them: export HYDRA_IFACE=eth0 UCX_NET_DEVICES=eth0 (MPICH), or "
    "OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI)"
)
NEEDS = (
    *("hostfile", "slots", "host_names", "host_keys", "ssh"),
    *("srun", "hosts_python", "hosts_packages", "hosts_mpiexec", "hosts_variables"),
    *("scheduler", "hosts_memory", "hosts_shared_memory", "connections", START),
)
Pair = tuple[str, str]

checks = Checks()


@Context.cached
def run_cluster_job(context: Context) -> RankJob:
    """Run the job, where all hosts that are to run ranks have answered."""
    assigned = jobs.assign_slots(context.hosts, context.ranks)
    ranks_per_host = {
        host: min(ranks, MAX_RANKS_PER_HOST) for host, ranks in assigned.items()
    }
    pairs = _choose_pairs(gather_facts(context), list(ranks_per_host))
    names = [name for name in COMMUNICATORS if not pairs or name != SINGLE_HOST]
    timeout = context.time_for(*JOB_TIME)
    return run_ranks(
        context, exchange, ranks_per_host, timeout, pairs=pairs, communicators=names
    )


def _choose_pairs(cluster: ClusterFacts, hosts: list[str]) -> list[Pair]:
    """Return pairs of hosts, by their own names."""
    known = cluster.facts()
    # A host that has several names is one.
    machines = {known[host]["machine"]: host for host in reversed(hosts)}
    single = [host for host in hosts if machines[known[host]["machine"]] == host]
    if len(single) <= MAX_ALL_PAIRS:
        both = list(combinations(single, 2))
    else:
        both = list(zip(single, [*single[1:], single[0]], strict=True))
    return [(known[a]["hostname"], known[b]["hostname"]) for a, b in both]


def exchange(pairs: Sequence[Pair] = (), communicators: Sequence[str] = ()) -> None:
    """Be a rank: let rank 0 report all hosts, and exchange data (collective)."""
    from mpi4py import MPI

    world, report = MPI.COMM_WORLD, functools.partial(emit, EVENT)
    hosts = world.allgather(socket.gethostname())
    for start in range(0, len(hosts) if world.rank == 0 else 0, HOSTS_AT_ONCE):
        report(hosts=hosts[start : start + HOSTS_AT_ONCE])
    if not pairs and not communicators:
        return
    from chainermn_tools.doctor.ranks import rank_tests

    rank_tests.exchange_messages(world, hosts, pairs, report)
    for name in communicators:
        found = rank_tests.try_communicator(world, name, timed=False)
        if world.rank == 0:
            report(communicator=name, found=found)


@checks.add(
    "placement",
    "Do ranks start on the requested hosts, and see one another?",
    (*NEEDS, "srun_ranks"),
)
@over_hosts
def placement(context: Context, cluster: ClusterFacts) -> CheckResult:
    names = {host: facts["hostname"] for host, facts in cluster.facts().items()}
    for host in jobs.assign_slots(context.hosts, context.ranks):
        if host not in names:
            return skipped(f"{host} gave no answer")
    job = run_cluster_job(context)
    wanted = Counter[str]()
    for host, ranks in job.ranks_per_host.items():
        wanted[names[host]] += ranks
    reports = job.reports("hosts")  # the host of each rank, as ranks exchanged them
    if not reports:
        began, asked = _started_on(job), job.ranks_per_host
        silent = [host for host in asked if began[names[host]] < wanted[names[host]]]
        if job.output.timed_out:
            return _diagnose_hang(context, job, silent)
        where = (
            f"no rank began on {join_names(silent)}" if silent else "all ranks began"
        )
        by_hand = (
            "run it by hand to see what mpiexec says: chainermn launch --hosts ..."
        )
        return _evaluate_end(job, where, by_hand, hosts=silent)
    actual = Counter(host for one in reports for host in one["hosts"])
    if actual != wanted:
        message = (
            f"ranks are on {_describe(actual)}, and should be on {_describe(wanted)}"
        )
        hint = "env | grep -E 'HYDRA_|PRTE_MCA_|OMPI_MCA_|SLURM_'   # something overrules the hosts"
        return failed(message, hint, ranks=dict(actual))
    return ok(_describe(wanted), ranks=dict(wanted))


def _diagnose_hang(context: Context, job: RankJob, silent: list[str]) -> CheckResult:
    """Return which host keeps ranks from starting, or that none does."""
    if not silent:
        hint = "export UCX_TLS=tcp,self   # (MPICH), OMPI_MCA_btl=tcp,self (Open MPI): plain TCP"
        return failed(
            "MPI hangs while it starts, or while ranks meet: all ranks began", hint
        )
    message = f"mpiexec hangs: no rank began on {join_names(silent)} within {job.timeout:.0f} s"
    if 1 < len(silent) == len(job.ranks_per_host) <= MAX_ALONE:
        # One that hangs may hold up all.
        hanging = _hanging_alone(
            context, silent, min(ALONE_SECONDS, context.remaining())
        )
        if 0 < len(hanging) < len(silent):
            message = (
                f"mpiexec hangs because of {join_names(hanging)}: no rank begins there"
            )
            silent = hanging
    hint = f"ssh {silent[0]} mpiexec -n 1 hostname   # if it hangs too, install MPI anew there"
    return failed(message, hint, hosts=silent)


def _hanging_alone(context: Context, hosts: list[str], timeout: float) -> list[str]:
    """Return the hosts on which a rank doesn't start even without the others."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        done = pool.map(
            lambda host: run_ranks(context, exchange, {host: 1}, timeout), hosts
        )
        return [
            host for host, job in zip(hosts, done, strict=True) if not _started_on(job)
        ]


def _started_on(job: RankJob) -> Counter[str]:
    """Return how many ranks started on each host, by the hosts' own names."""
    return Counter(
        event["host"] for event in job.output.events if event.kind == "started"
    )


def _describe(ranks: Counter[str]) -> str:
    return join_names(
        [f"{format_count(count, 'rank')} on {host}" for host, count in ranks.items()]
    )


@checks.add(
    "hosts_messages",
    "Do large messages between hosts arrive, and how fast?",
    ("placement",),
)
@over_hosts
def messages(context: Context, cluster: ClusterFacts) -> CheckResult:
    job = run_cluster_job(context)
    if not job.options["pairs"]:
        return skipped("there are no two hosts")
    found = {tuple(one["pair"]): one for one in job.reports("pair")}
    for (a, b), one in found.items():
        if not one["correct"]:
            return failed(
                f"wrong values arrived between {a} and {b}", REPORT_IT, pair=[a, b]
            )
    for a, b in job.options["pairs"]:
        if (a, b) not in found:
            message = f"between {a} and {b} large messages don't come through MPI"
            return _evaluate_unfinished(job, message, NAME_NETWORK_HINT, pair=[a, b])
    rates = {
        f"{a} to {b}": round(one["bytes"] / one["seconds"])
        for (a, b), one in found.items()
    }
    slowest = min(rates, key=rates.__getitem__)
    message = f"they arrive, at {format_bytes(rates[slowest])}/s from {slowest}"
    message += ", and faster elsewhere" if len(rates) > 1 else ""
    return ok(
        message,
        pairs={pair: {"bytes_per_second": rate} for pair, rate in rates.items()},
    )


@checks.add(
    "hosts_communicators",
    "Do the communicators give correct results across the hosts?",
    ("hosts_messages",),
)
@over_hosts
def communicators(context: Context, _: ClusterFacts) -> CheckResult:
    job = run_cluster_job(context)
    found = {one["communicator"]: one["found"] for one in job.reports("communicator")}
    tried = {name: one for name, one in found.items() if "reason" not in one}
    for name, one in tried.items():
        if one["problem"] is not None:
            message = f"{name}: {one['problem']}"
            return failed(
                message, hint_for_output(message, REPORT_IT), communicator=name
            )
        if not one["correct"]:
            message = f"{name}: wrong values of {', '.join(one['wrong'])} arrived"
            return failed(
                message,
                f"take another communicator, and {REPORT_IT}",
                communicator=name,
            )
    for name in job.options["communicators"]:
        if name not in found:
            message = f"the communicator {name!r} doesn't come to its end"
            return _evaluate_unfinished(job, message, MORE_TIME, communicator=name)
    if job.output.timed_out or job.output.status != 0:
        return _evaluate_unfinished(job, "the ranks don't come to their end", MORE_TIME)
    return ok(f"all values of {', '.join(tried)} are right", communicators=list(tried))


def _evaluate_unfinished(
    job: RankJob, message: str, hint: str, **details: Any
) -> CheckResult:
    """Evaluate a job that hung, where the hint helps, or ended too early."""
    if job.output.timed_out:
        return failed(f"{message} within {job.timeout:.0f} s", hint, **details)
    return _evaluate_end(job, message, REPORT_IT, **details)


def _evaluate_end(job: RankJob, message: str, hint: str, **details: Any) -> CheckResult:
    """Evaluate a job that ended too early; the hint is for what is not known."""
    message += f", and the job ended with status {job.output.status}"
    return job.failed(message, hint, **details)
