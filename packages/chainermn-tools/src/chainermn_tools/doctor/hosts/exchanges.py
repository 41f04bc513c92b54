"""Checks of what ranks on the hosts exchanged: large messages, and with every communicator."""

from __future__ import annotations

from typing import Any

from chainermn_tools.doctor.advice import MORE_TIME, advice, telling_line
from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.hosts import ranks
from chainermn_tools.doctor.hosts.network import TO_SHRINK
from chainermn_tools.doctor.hosts.round import Round, over_hosts
from chainermn_tools.doctor.hosts.wording import MOST_NAMED
from chainermn_tools.formatting import format_bytes

# MPI is as fast as a plain connection, or faster where it has a better network. Where it is so much
# slower, something is in the way.
SLOW_SHARE = 0.05
REPORT = "please report it: chainermn doctor --report"
OTHER_NETWORK = (
    "name the network that joins them: export HYDRA_IFACE=eth0 UCX_NET_DEVICES=eth0 (MPICH), or "
    "OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI)"
)
SLOW = "env | grep -E '^(UCX|FI|OMPI|MPICH|MV2)_'   # does MPI take the network that it should?"


@over_hosts(
    "hosts' messages", "Do large messages between hosts arrive, and how fast?", ("placement",)
)
def messages(context: Context, _: Round) -> Answer:
    job = context.once(ranks.run)
    if not job.pairs:
        return skipped("there are no two hosts")
    found = {tuple(one["pair"]): one for one in job.records if "pair" in one}
    for (a, b), one in found.items():
        if one["stalled"]:
            return failed(
                f"from {a} to {b} small messages arrive, and large ones stall, even without MPI",
                TO_SHRINK.format(a=a, b=b),
                pair=[a, b],
            )
        if not one["right"]:
            return failed(f"wrong values arrived between {a} and {b}", REPORT, pair=[a, b])
    left = [(a, b) for a, b, _ in job.pairs if (a, b) not in found]
    if left:
        a, b = left[0]
        return _unfinished(
            job,
            f"between {a} and {b} large messages don't come through MPI",
            OTHER_NETWORK,
            pair=[a, b],
        )
    return _rates(found)


@over_hosts(
    "hosts' communicators",
    "Do the communicators give what they must over the hosts?",
    ("hosts' messages",),
)
def communicators(context: Context, _: Round) -> Answer:
    job = context.once(ranks.run)
    found = {one["communicator"]: one["found"] for one in job.records if "communicator" in one}
    tried = {name: one for name, one in found.items() if "why_not" not in one}
    for name, one in tried.items():
        if one["problem"] is not None:
            text = f"{name}: {one['problem']}"
            return failed(text, advice(text, REPORT), communicator=name)
        if not one["right"]:
            text = f"{name}: wrong values of {', '.join(one['wrong'])} arrived"
            return failed(text, f"take another communicator, and {REPORT}", communicator=name)
    left = [name for name in job.communicators if name not in found]
    if left:
        what = f"the communicator {left[0]!r} doesn't come to its end"
        return _unfinished(job, what, MORE_TIME, communicator=left[0])
    if job.ended.returncode != 0:
        return _unfinished(job, "the ranks don't come to their end", MORE_TIME)
    return ok(f"all values of {', '.join(tried)} are right", communicators=list(tried))


def _unfinished(job: ranks.Job, text: str, otherwise: str, **details: Any) -> Answer:
    """The job hung, or ended too early."""
    if job.ended.returncode is None:
        return failed(f"{text} within {job.seconds:.0f} s", otherwise, **details)
    output = f"{job.ended.stdout}\n{job.ended.stderr}"
    said = (
        telling_line(job.ended.stderr)
        if job.ended.stderr.strip()
        else telling_line(job.ended.stdout)
    )
    return failed(
        f"{text}, and the job ended with status {job.ended.returncode}: {said}",
        advice(output, REPORT),
        **details,
    )


def _rates(found: dict[tuple[str, str], dict[str, Any]]) -> Answer:
    """How fast messages are, beside what the link can do; the slowest pair is named."""
    details = {
        f"{a} to {b}": {
            "bytes_per_second": round(one["bytes"] / one["seconds"]),
            "tcp_bytes_per_second": one["tcp_seconds"] and round(one["bytes"] / one["tcp_seconds"]),
        }
        for (a, b), one in found.items()
    }
    (a, b), slowest = max(found.items(), key=lambda item: item[1]["seconds"])
    rate = format_bytes(slowest["bytes"] / slowest["seconds"])
    said = f"they arrive, at {rate}/s between {a} and {b}" + (
        ", and faster elsewhere" if len(found) > 1 else ""
    )
    shares = {
        pair: one["tcp_seconds"] / one["seconds"]
        for pair, one in found.items()
        if one["tcp_seconds"] is not None
    }
    if not shares:
        return ok(said, pairs=details)
    said += f"; at least {min(shares.values()):.2g} of a plain connection's rate"
    slow = [pair for pair, share in shares.items() if share < SLOW_SHARE]
    idle = [f"{a} and {b}" for a, b in slow if not found[a, b]["busy"]]
    if idle:
        text = f"{said}; that is too slow between {'; '.join(idle[:MOST_NAMED])}"
        return warning(text, SLOW, pairs=details)
    if slow:
        said += "; but its hosts have more to do than their cores can"
    return ok(said, pairs=details)
