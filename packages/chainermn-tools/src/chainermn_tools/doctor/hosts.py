"""Checks of the hosts: hostfile and slots, the login to each, and connections between them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
)
from chainermn_tools.doctor.cluster.agent import STALLED
from chainermn_tools.doctor.cluster.facts import (
    MAX_NAMED,
    THIS_MACHINE,
    ClusterFacts,
    address_of,
    describe_problems,
    join_names,
    over_hosts,
    subject_of,
)
from chainermn_tools.doctor.cluster.ssh import HOST
from chainermn_tools.doctor.software import launcher_if_any
from chainermn_tools.formatting import join_first
from chainermn_tools.jobs import (
    HYDRA_VENDORS,
    assign_slots,
    parse_hostfile,
    starts_by_srun,
)

REDUCE_MTU_HINT = (
    "sudo ip link set dev eth0 mtu 1500   # on {a} and {b}, or whatever the network between them "
    "carries: its switches drop what is larger"
)
# Of the kinds of failures that another check than "ssh" reports, which one does.
CHECKS = {
    "ssh_unknown_host": "host_names",
    "ssh_host_key": "host_keys",
    "ssh_host_key_changed": "host_keys",
    "srun": "srun",
}
Pair = tuple[str, str]

# Those of connections are shown after what the hosts have.
checks, connection_checks = Checks(), Checks()


@checks.add("hostfile", "Is the hostfile in the format of this MPI?")
def hostfile(context: Context) -> CheckResult:
    if context.hostfile is None:
        return skipped("no hostfile was named")
    path = context.hostfile
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return failed(
            f"{path} can't be read: {error}", "give the right path with --hostfile"
        )
    vendor = launcher_if_any(context).get("vendor")
    wrong = foreign_lines(text, vendor)
    if wrong:
        other = "Open MPI" if vendor in HYDRA_VENDORS else "MPICH"
        first = next(iter(wrong))
        lines = [f"line {number}, {line!r}" for number, (line, _) in wrong.items()]
        shown = join_first(lines, MAX_NAMED, "; ")
        return failed(
            f"{path} is written for {other}, and mpiexec is of {vendor}: {shown}",
            f"write in line {first}: {wrong[first][1]}   # and so on; or start the job with "
            "chainermn launch, which reads both",
            lines={str(number): right for number, (_, right) in wrong.items()},
        )
    try:
        hosts = parse_hostfile(text, path)
    except ValueError as error:
        return failed(
            str(error), "write a host a line, such as: host:4 (Open MPI: host slots=4)"
        )
    return ok(f"{path} names {len(hosts)} host{'s' if len(hosts) > 1 else ''}")


def foreign_lines(text: str, vendor: str | None) -> dict[int, tuple[str, str]]:
    """Find the lines of a hostfile that another MPI than the vendor's would read, if it is known.

    Return by the line's number, from 1, the line and how the vendor's MPI wants it:
    MPICH and its relatives `host:2`, and Open MPI `host slots=2`.
    """
    found: dict[int, tuple[str, str]] = {}
    is_hydra = vendor in HYDRA_VENDORS
    for number, line in enumerate(text.splitlines() if vendor else (), start=1):
        shown = line.split("#", 1)[0].strip()
        with suppress(ValueError):  # the file is parsed as a whole, too
            (host,) = parse_hostfile(shown, "")
            if host.slots is not None and ("=" in shown) == is_hydra:
                found[number] = (
                    shown,
                    f"{host.name}{':' if is_hydra else ' slots='}{host.slots}",
                )
    return found


@checks.add(
    "slots", "Do the hosts have enough slots for the ranks?", needs=("scheduler",)
)
def slots(context: Context) -> CheckResult:
    if not context.hosts:
        return skipped("no hosts were named")
    try:
        assigned = assign_slots(context.hosts, context.ranks)
    except ValueError as error:
        total = sum(host.slots or 1 for host in context.hosts)
        return failed(str(error), f"-n {total}   # or give the hosts more slots")
    shown = join_names([f"{share} on {host}" for host, share in assigned.items()])
    return ok(f"ranks have place: {shown}")


def _check_logins(
    _: Context, cluster: ClusterFacts, *, check: str, success: str
) -> CheckResult:
    """Check the part of the logins that a check is about, and ignore the others."""
    if (check == "srun") != starts_by_srun():
        return skipped(
            f"{'ssh' if check == 'srun' else 'srun'} starts ranks on other hosts"
        )
    failures = {h: r.failure for h, r in cluster.hosts.items() if r.failure is not None}
    mine = {
        host: one
        for host, one in failures.items()
        if CHECKS.get(one.kind, "ssh") == check
    }
    if mine:
        first, failure = next(iter(mine.items()))
        message = describe_problems({host: one.problem for host, one in mine.items()})
        if failure.said:
            message += f" (of {first}: {failure.said})"
        hint = failure.hint.replace(HOST, first)
        return failed(
            message, hint, hosts={host: one.kind for host, one in mine.items()}
        )
    passed = [host for host in cluster.hosts if host not in failures]
    if not passed:
        return skipped("no host was reached")
    return ok(f"{subject_of(passed)}: {success}")


for _name, _question, _success in (
    ("host_names", "Do the names of the hosts resolve?", "they are known"),
    ("host_keys", "Does ssh know the hosts' keys?", "the keys are known"),
    (
        "ssh",
        "Can you log in to each host without a password, as mpiexec does?",
        "they let us in",
    ),
    (
        "srun",
        "Does Slurm's srun reach each node of the job?",
        "it starts programs there",
    ),
):
    checks.add(_name, _question, ("scheduler",))(
        over_hosts(partial(_check_logins, check=_name, success=_success))
    )


@connection_checks.add(
    "connections",
    "Can ranks reach one another over the network, or is there a firewall?",
)
@over_hosts
def connections(_: Context, cluster: ClusterFacts) -> CheckResult:
    tried = _tried_connections(cluster)
    if not tried:
        return skipped("there are no two hosts that could be asked")
    unfinished = sorted({asker for (asker, _), found in tried.items() if found is None})
    if unfinished:
        message = f"{join_names(unfinished)} did not come to the end of trying"
        return failed(message, "give it more time with --timeout, or name fewer hosts")
    bad = {
        pair: found["problem"]
        for pair, found in tried.items()
        if found and "problem" in found
    }
    if not bad:
        return ok(f"all {len(tried)} connections between them succeed, at any port")
    message = (
        f"{len(bad)} of {len(tried)} connections fail, at ports that the kernel chose: "
    )
    described = [f"{a} to {b}: {problem}" for (a, b), problem in bad.items()]
    message += join_first(described, MAX_NAMED, "; ")
    suspect = Counter(host for pair in bad for host in reversed(pair)).most_common(1)[
        0
    ][0]
    others = [
        next(host for host in pair if host != suspect)
        for pair in bad
        if suspect in pair
    ]
    if len(others) == len(bad) > 2:
        message += f"; {suspect} is part of each"
    if all(problem == STALLED for problem in bad.values()):
        a, b = next(iter(bad))
        hint = REDUCE_MTU_HINT.format(a=a, b=b)
    else:
        known = cluster.facts()
        address = address_of(others[0], suspect, known) if suspect in known else None
        hint = (
            f"sudo ufw allow from {address or others[0]}   # on {suspect}, and for all hosts, or "
            "as its firewall has it: ranks use any TCP port"
        )
    return failed(
        message, hint, failed=[[*pair, problem] for pair, problem in bad.items()]
    )


def _tried_connections(cluster: ClusterFacts) -> dict[Pair, dict[str, Any] | None]:
    """Return what came of each host's try to connect to another; None where it did not finish.

    Of this machine only connections from others to it count, which ranks' launchers
    make to mpiexec; and none where it is one of the hosts.
    """
    able = cluster.facts()
    targets = {**able}
    if all(facts["machine"] != cluster.local["machine"] for facts in able.values()):
        targets[THIS_MACHINE] = cluster.local
    tried: dict[Pair, dict[str, Any] | None] = {}
    for asker, facts in able.items():
        reached = cluster.hosts[asker].reached
        for other, theirs in targets.items():
            is_itself = theirs["machine"] == facts["machine"]
            if not is_itself and (reached is None or other in reached):
                tried[asker, other] = None if reached is None else reached[other]
    return tried
