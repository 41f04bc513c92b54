"""Checks of the hosts as the user named them: the hostfile, the slots, and the login to each."""

from __future__ import annotations

import re
from pathlib import Path

from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped
from chainermn_tools.doctor.cluster import (
    MAX_NAMED,
    ClusterFacts,
    describe_problems,
    over_hosts,
    subject_of,
)
from chainermn_tools.doctor.software import launcher_if_any
from chainermn_tools.doctor.ssh import KINDS
from chainermn_tools.jobs import HOST_NAME, HYDRA_VENDORS, parse_hostfile

# MPICH and its relatives write `host:2`, Open MPI `host slots=2` (`cpu=2` in its old releases).
HYDRA_LINE = re.compile(r"(?P<name>[^\s:]+):(?P<slots>\d{1,6})")
OPEN_MPI_LINE = re.compile(
    r"(?P<name>[^\s:=]+)\s+(?:slots|cpus?)\s*=\s*(?P<slots>\d{1,6})(?:\s+max[_-]slots\s*=\s*\d+)?"
)

checks = Checks()


@checks.add("hostfile", "Is the hostfile written as this MPI reads it?")
def hostfile(context: Context) -> CheckResult:
    if context.hostfile is None:
        return skipped("no hostfile was named")
    path = context.hostfile
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return failed(f"{path} can't be read: {error}", "give the right path with --hostfile")
    vendor = launcher_if_any(context).get("vendor")
    wrong = foreign_lines(text, vendor)
    if wrong:
        other = "Open MPI" if vendor in HYDRA_VENDORS else "MPICH"
        first = next(iter(wrong))
        shown = [f"line {number}, {line!r}" for number, (line, _) in wrong.items()][:MAX_NAMED]
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        return failed(
            f"{path} is written for {other}, and mpiexec is of {vendor}: {'; '.join(shown)}{more}",
            f"write in line {first}: {wrong[first][1]}   # and so on; or start the job with "
            "chainermn launch, which reads both",
            lines={str(number): right for number, (_, right) in wrong.items()},
        )
    try:
        hosts = parse_hostfile(text, path)
    except ValueError as error:
        return failed(str(error), "write a host a line, such as: host:4 (Open MPI: host slots=4)")
    return ok(f"{path} names {len(hosts)} host{'s' if len(hosts) > 1 else ''}")


def foreign_lines(text: str, vendor: str | None) -> dict[int, tuple[str, str]]:
    """Find the lines of a hostfile that another MPI than the vendor's would read, if it is known.

    Return by the line's number, from 1, the line and how the vendor's MPI wants it.
    """
    if vendor in HYDRA_VENDORS:
        pattern, right = OPEN_MPI_LINE, "{}:{}"
    elif vendor == "Open MPI":
        pattern, right = HYDRA_LINE, "{} slots={}"
    else:
        return {}
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        shown = line.split("#", 1)[0].strip()
        parts = pattern.fullmatch(shown)
        if parts and HOST_NAME.fullmatch(parts["name"]):
            found[number] = (shown, right.format(parts["name"], int(parts["slots"])))
    return found


@checks.add("slots", "Have the hosts slots enough for the ranks?")
def slots(context: Context) -> CheckResult:
    if not context.hosts:
        return skipped("no hosts were named")
    if all(host.slots is None for host in context.hosts):
        return ok("no number of slots is given: ranks are shared evenly")
    total = sum(1 if host.slots is None else host.slots for host in context.hosts)
    message = f"{total} slot{'s' if total > 1 else ''} on {len(context.hosts)} hosts"
    if context.ranks is None:
        return ok(f"{message}; how many ranks there are to be wasn't said")
    if context.ranks > total:
        each = -(-context.ranks // len(context.hosts))
        listed = ",".join(f"{host.name}:{each}" for host in context.hosts[:MAX_NAMED])
        dots = ",..." if len(context.hosts) > MAX_NAMED else ""
        return failed(
            f"{message}, and {context.ranks} ranks",
            f"-n {total}   # or give more slots: {listed}{dots}",
            slots=total,
            ranks=context.ranks,
        )
    return ok(f"{message} for {context.ranks} ranks")


@checks.add("host names", "Are the hosts' names known?")
@over_hosts
def host_names(_: Context, cluster: ClusterFacts) -> CheckResult:
    return _judge_logins(cluster, "host names", "they are known")


@checks.add("host keys", "Does ssh know the hosts' keys?")
@over_hosts
def host_keys(_: Context, cluster: ClusterFacts) -> CheckResult:
    return _judge_logins(cluster, "host keys", "the keys are known")


@checks.add("ssh", "Can one log in to each host without a password, as mpiexec does?")
@over_hosts
def login(_: Context, cluster: ClusterFacts) -> CheckResult:
    return _judge_logins(cluster, "ssh", "they let us in")


def _judge_logins(cluster: ClusterFacts, check: str, success: str) -> CheckResult:
    """Judge the part of the logins that a check is about, and say nothing of the others."""
    failures = {h: r.failure for h, r in cluster.hosts.items() if r.failure is not None}
    mine = {host: one for host, one in failures.items() if KINDS[one.kind].check == check}
    if mine:
        first, failure = next(iter(mine.items()))
        message = describe_problems({h: KINDS[one.kind].message for h, one in mine.items()})
        if failure.message:
            message += f" (of {first}: {failure.message})"
        hint = KINDS[failure.kind].hint.format(host=first)
        return failed(message, hint, hosts={host: one.kind for host, one in mine.items()})
    passed = [host for host in cluster.hosts if host not in failures]
    if not passed:
        return skipped("no host was reached")
    return ok(f"{subject_of(passed)}: {success}")
