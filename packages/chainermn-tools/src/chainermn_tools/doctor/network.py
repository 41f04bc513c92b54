"""Checks of the network between hosts, with connections such as ranks make."""

from __future__ import annotations

from collections import Counter
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
    tried = _tried_connections(cluster)
    if not tried:
        return skipped("there are no two hosts that could be asked")
    unfinished = sorted({asker for (asker, _), found in tried.items() if found is None})
    if unfinished:
        return failed(
            f"{join_names(unfinished)} did not come to the end of trying",
            "give it more time with --timeout, or name fewer hosts",
        )
    bad = {pair: found["problem"] for pair, found in tried.items() if found and "problem" in found}
    if not bad:
        return ok(f"all {len(tried)} connections between them succeed, at any port")
    shown = [f"{a} to {b}: {problem}" for (a, b), problem in bad.items()]
    message = "; ".join(shown[:MAX_NAMED])
    if len(shown) > MAX_NAMED:
        message += f" and {len(shown) - MAX_NAMED} more"
    suspect = Counter(host for pair in bad for host in reversed(pair)).most_common(1)[0][0]
    others = [next(host for host in pair if host != suspect) for pair in bad if suspect in pair]
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
        f"{len(bad)} of {len(tried)} connections fail, at ports that the kernel chose: {message}",
        hint,
        failed=[[*pair, problem] for pair, problem in bad.items()],
    )


@checks.add("round trip", "Are the hosts near one another?", needs=("connections",))
@over_hosts
def round_trip(_: Context, cluster: ClusterFacts) -> CheckResult:
    tried = _tried_connections(cluster)
    seconds = {f"{a} to {b}": one["seconds"] for (a, b), one in tried.items() if one}
    if not seconds:
        return skipped("there are no two hosts that could be asked")
    farthest, most = max(seconds.items(), key=lambda item: item[1])
    message = f"a connection takes {1000 * most:.2g} ms, {farthest}, and less elsewhere"
    if len(seconds) == 1:
        message = f"a connection from {farthest} takes {1000 * most:.2g} ms"
    if most > FAR_SECONDS:
        hint = "choose hosts of one network, or communicate less often"
        return warning(f"{message}: every step waits for several", hint, seconds=seconds)
    return ok(message, seconds=seconds)


def _tried_connections(cluster: ClusterFacts) -> dict[Pair, dict[str, Any] | None]:
    """Return who tried to connect to whom, and what came of it; None where it did not finish.

    Of this machine only connections from others to it count, which ranks' launchers make to
    mpiexec; and none where it is one of the hosts.
    """
    able = {name: facts for name, facts in cluster.facts().items() if "port" in facts}
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
