"""Checks of the network between hosts, with connections such as ranks make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from chainermn_tools.doctor.agent import STALLED
from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.cluster import (
    MAX_NAMED,
    THIS_MACHINE,
    ClusterFacts,
    address_of,
    join_names,
    over_hosts,
)

# Between hosts of one hall it is a tenth of a millisecond; from here on a collective call on small
# gradients takes longer than a step.
FAR_SECONDS = 0.01
REDUCE_MTU_HINT = (
    "sudo ip link set dev eth0 mtu 1500   # on {a} and {b}, or whatever the network between them "
    "carries: its switches drop what is larger"
)
Pair = tuple[str, str]

checks = Checks()


@checks.add("connections", "Can ranks reach one another over the network, or is there a firewall?")
@over_hosts
def connections(_: Context, cluster: ClusterFacts) -> CheckResult:
    tried = dict(_tried_connections(cluster))
    if not tried:
        return skipped("there are no two hosts that could be asked")
    unfinished = sorted({asker for (asker, _), found in tried.items() if found is None})
    if unfinished:
        return failed(
            f"{join_names(list(map(_display_name, unfinished)))} did not come to the end of trying",
            "give it more time with --timeout, or name fewer hosts",
        )
    bad = {pair: found["problem"] for pair, found in tried.items() if found and "problem" in found}
    if not bad:
        return ok(f"all {len(tried)} connections between them succeed, at any port")
    shown = [f"{_display_name(a)} to {_display_name(b)}: {bad[a, b]}" for a, b in bad]
    message = "; ".join(shown[:MAX_NAMED])
    if len(shown) > MAX_NAMED:
        message += f" and {len(shown) - MAX_NAMED} more"
    suspect = Counter(host for pair in bad for host in reversed(pair)).most_common(1)[0][0]
    others = [next(host for host in pair if host != suspect) for pair in bad if suspect in pair]
    if len(others) == len(bad) > 2:
        message += f"; {_display_name(suspect)} is part of each"
    if all(problem == STALLED for problem in bad.values()):
        a, b = map(_display_name, next(iter(bad)))
        hint = REDUCE_MTU_HINT.format(a=a, b=b)
    else:
        known, other = cluster.facts(), others[0]
        address = address_of(other, suspect, known) if suspect in known else None
        hint = (
            f"sudo ufw allow from {address or _display_name(other)}   # on "
            f"{_display_name(suspect)}, and for all hosts, or as its firewall has it: ranks use "
            "any TCP port"
        )
    return failed(
        f"{len(bad)} of {len(tried)} connections fail, at ports that the kernel chose: {message}",
        hint,
        failed=[[_display_name(a), _display_name(b), problem] for (a, b), problem in bad.items()],
    )


@checks.add("round trip", "Are the hosts near one another?", needs=("connections",))
@over_hosts
def round_trip(_: Context, cluster: ClusterFacts) -> CheckResult:
    seconds = {
        (_display_name(a), _display_name(b)): found["seconds"]
        for (a, b), found in _tried_connections(cluster)
        if found
    }
    if not seconds:
        return skipped("there are no two hosts that could be asked")
    (a, b), most = max(seconds.items(), key=lambda item: item[1])
    message = f"a connection takes {1000 * most:.2g} ms, {a} to {b}, and less elsewhere"
    if len(seconds) == 1:
        message = f"a connection from {a} to {b} takes {1000 * most:.2g} ms"
    details = {f"{a} to {b}": one for (a, b), one in seconds.items()}
    if most > FAR_SECONDS:
        hint = "choose hosts of one network, or communicate less often"
        return warning(f"{message}: every step waits for several", hint, seconds=details)
    return ok(message, seconds=details)


def _tried_connections(cluster: ClusterFacts) -> Iterator[tuple[Pair, dict[str, Any] | None]]:
    """Yield who tried to connect to whom, and what came of it; None where it did not finish.

    Of this machine only connections from others to it count, which ranks' launchers make to
    mpiexec; and none where it is one of the hosts.
    """
    able = {name: facts for name, facts in cluster.facts().items() if "port" in facts}
    targets = {**able}
    if all(facts["machine"] != cluster.local["machine"] for facts in able.values()):
        targets[THIS_MACHINE] = cluster.local
    for asker, facts in able.items():
        reached = cluster.hosts[asker].reached
        for other in targets:
            if targets[other]["machine"] == facts["machine"]:
                continue
            if reached is None:
                yield (asker, other), None
            elif other in reached:
                yield (asker, other), reached[other]


def _display_name(name: str) -> str:
    return "this machine" if name == THIS_MACHINE else name
