"""Checks of what ranks on the hosts exchanged: large messages, and with every communicator."""

from __future__ import annotations

from typing import Any

from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.cluster.facts import MAX_NAMED, ClusterFacts, over_hosts
from chainermn_tools.doctor.cluster.network import REDUCE_MTU_HINT
from chainermn_tools.doctor.cluster.placement import ClusterJob, run_cluster_job
from chainermn_tools.doctor.hints import (
    LIST_MPI_VARIABLES,
    MORE_TIME,
    REPORT_IT,
    hint_for_output,
    most_telling_line,
)
from chainermn_tools.formatting import format_bytes

# MPI is as fast as a plain connection, or faster where it has a better network. Where it is so much
# slower, something is in the way.
SLOW_SHARE = 0.05
NAME_NETWORK_HINT = (
    "name the network that joins them: export HYDRA_IFACE=eth0 UCX_NET_DEVICES=eth0 (MPICH), or "
    "OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI)"
)

checks = Checks()


@checks.add(
    "hosts' messages", "Do large messages between hosts arrive, and how fast?", ("placement",)
)
@over_hosts
def messages(context: Context, _: ClusterFacts) -> CheckResult:
    job = context.cached(run_cluster_job)
    if not job.pairs:
        return skipped("there are no two hosts")
    found = {tuple(one["pair"]): one for one in job.records("pair")}
    for (a, b), one in found.items():
        if one["stalled"]:
            return failed(
                f"from {a} to {b} small messages arrive, and large ones stall, even without MPI",
                REDUCE_MTU_HINT.format(a=a, b=b),
                pair=[a, b],
            )
        if not one["right"]:
            return failed(f"wrong values arrived between {a} and {b}", REPORT_IT, pair=[a, b])
    for a, b, _address in job.pairs:
        if (a, b) not in found:
            message = f"between {a} and {b} large messages don't come through MPI"
            return _judge_unfinished(job, message, NAME_NETWORK_HINT, pair=[a, b])
    return _judge_rates(found)


@checks.add(
    "hosts' communicators",
    "Do the communicators give what they must over the hosts?",
    ("hosts' messages",),
)
@over_hosts
def communicators(context: Context, _: ClusterFacts) -> CheckResult:
    job = context.cached(run_cluster_job)
    found = {one["communicator"]: one["found"] for one in job.records("communicator")}
    tried = {name: one for name, one in found.items() if "why_not" not in one}
    for name, one in tried.items():
        if one["problem"] is not None:
            message = f"{name}: {one['problem']}"
            return failed(message, hint_for_output(message, REPORT_IT), communicator=name)
        if not one["right"]:
            message = f"{name}: wrong values of {', '.join(one['wrong'])} arrived"
            return failed(message, f"take another communicator, and {REPORT_IT}", communicator=name)
    for name in job.communicators:
        if name not in found:
            message = f"the communicator {name!r} doesn't come to its end"
            return _judge_unfinished(job, message, MORE_TIME, communicator=name)
    if job.output.timed_out or job.output.status != 0:
        return _judge_unfinished(job, "the ranks don't come to their end", MORE_TIME)
    return ok(f"all values of {', '.join(tried)} are right", communicators=list(tried))


def _judge_unfinished(job: ClusterJob, message: str, hint: str, **details: Any) -> CheckResult:
    """Judge a job that hung, where the hint helps, or ended too early."""
    output = job.output
    if output.timed_out:
        return failed(f"{message} within {job.timeout:.0f} s", hint, **details)
    line = most_telling_line(output.stderr if output.stderr.strip() else output.stdout)
    return failed(
        f"{message}, and the job ended with status {output.status}: {line}",
        hint_for_output(f"{output.stdout}\n{output.stderr}", REPORT_IT),
        **details,
    )


def _judge_rates(found: dict[tuple[str, ...], dict[str, Any]]) -> CheckResult:
    """Judge how fast messages are, beside what the link can do; the slowest pair is named."""
    details = {
        f"{a} to {b}": {
            "bytes_per_second": round(one["bytes"] / one["seconds"]),
            "tcp_bytes_per_second": one["tcp_seconds"] and round(one["bytes"] / one["tcp_seconds"]),
        }
        for (a, b), one in found.items()
    }
    (a, b), slowest = max(found.items(), key=lambda item: item[1]["seconds"])
    rate = format_bytes(slowest["bytes"] / slowest["seconds"])
    elsewhere = ", and faster elsewhere" if len(found) > 1 else ""
    message = f"they arrive, at {rate}/s between {a} and {b}{elsewhere}"
    shares = {
        pair: one["tcp_seconds"] / one["seconds"]
        for pair, one in found.items()
        if one["tcp_seconds"] is not None
    }
    if not shares:
        return ok(message, pairs=details)
    message += f"; at least {min(shares.values()):.2g} of a plain connection's rate"
    slow = [pair for pair, share in shares.items() if share < SLOW_SHARE]
    idle = [f"{a} and {b}" for a, b in slow if not found[a, b]["overloaded"]]
    if idle:
        hint = f"{LIST_MPI_VARIABLES}   # does MPI take the network that it should?"
        message += f"; that is too slow between {'; '.join(idle[:MAX_NAMED])}"
        return warning(message, hint, pairs=details)
    if slow:
        message += "; but its hosts have more to do than their cores can"
    return ok(message, pairs=details)
