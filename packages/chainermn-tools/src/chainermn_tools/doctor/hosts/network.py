"""Checks of the network between hosts, with connections such as ranks make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.hosts.remote import STALLED
from chainermn_tools.doctor.hosts.round import HERE, Round, address, over_hosts
from chainermn_tools.doctor.hosts.wording import MOST_NAMED, listed

# Between hosts of one hall it is a tenth of a millisecond; from here on a collective call on small
# gradients takes longer than a step.
FAR_SECONDS = 0.01
TO_SHRINK = (
    "sudo ip link set dev eth0 mtu 1500   # on {a} and {b}, or whatever the network between them "
    "carries: its switches drop what is larger"
)
Pair = tuple[str, str]


@over_hosts("connections", "Can ranks reach one another over the network, or is there a firewall?")
def connections(_: Context, round_: Round) -> Answer:
    tried = dict(_tried(round_))
    if not tried:
        return skipped("there are no two hosts that could be asked")
    silent = sorted({asker for (asker, _), found in tried.items() if found is None})
    if silent:
        return failed(
            f"{listed(list(map(_named, silent)))} did not come to the end of trying",
            "give it more time with --timeout, or name fewer hosts",
        )
    bad = {pair: found["problem"] for pair, found in tried.items() if found and "problem" in found}
    if not bad:
        return ok(f"all {len(tried)} connections between them succeed, at any port")
    shown = [f"{_named(a)} to {_named(b)}: {problem}" for (a, b), problem in bad.items()]
    text = "; ".join(shown[:MOST_NAMED])
    if len(shown) > MOST_NAMED:
        text += f" and {len(shown) - MOST_NAMED} more"
    suspect = Counter(host for pair in bad for host in reversed(pair)).most_common(1)[0][0]
    others = [next(host for host in pair if host != suspect) for pair in bad if suspect in pair]
    if len(others) == len(bad) > 2:
        text += f"; {_named(suspect)} is part of each"
    fix = (
        f"sudo ufw allow from {_address(round_, others[0], suspect)}   # on {_named(suspect)}, and "
        "for all hosts, or as its firewall has it: ranks use any TCP port"
    )
    stalled = [pair for pair, problem in bad.items() if problem == STALLED]
    if len(stalled) == len(bad):
        fix = TO_SHRINK.format(a=_named(stalled[0][0]), b=_named(stalled[0][1]))
    return failed(
        f"{len(bad)} of {len(tried)} connections fail, at ports that the kernel chose: {text}",
        fix,
        failed=[[_named(a), _named(b), problem] for (a, b), problem in bad.items()],
    )


@over_hosts("round trip", "Are the hosts near one another?", needs=("connections",))
def round_trip(_: Context, round_: Round) -> Answer:
    seconds = {pair: found["seconds"] for pair, found in _tried(round_) if found}
    if not seconds:
        return skipped("there are no two hosts that could be asked")
    (a, b), most = max(seconds.items(), key=lambda item: item[1])
    said = (
        f"a connection takes {1000 * most:.2g} ms, {_named(a)} to {_named(b)}, and less elsewhere"
    )
    if len(seconds) == 1:
        said = f"a connection from {_named(a)} to {_named(b)} takes {1000 * most:.2g} ms"
    details = {f"{_named(a)} to {_named(b)}": one for (a, b), one in seconds.items()}
    if most > FAR_SECONDS:
        fix = "choose hosts of one network, or communicate less often"
        return warning(f"{said}: every step waits for several", fix, seconds=details)
    return ok(said, seconds=details)


def _tried(round_: Round) -> Iterator[tuple[Pair, dict[str, Any] | None]]:
    """Who tried to connect to whom, and what came of it; None where the asker did not finish.

    Of this machine only connections from others to it count, which ranks' launchers make to
    mpiexec; and none where it is one of the hosts.
    """
    able = {name: facts for name, facts in round_.facts().items() if "port" in facts}
    machines = {facts["machine"] for facts in able.values()}
    targets = {**able}
    if round_.here["machine"] not in machines:
        targets[HERE] = round_.here
    for asker, facts in able.items():
        others = [name for name in targets if targets[name]["machine"] != facts["machine"]]
        reached = round_.hosts[asker].reached
        for other in others:
            if reached is None:
                yield (asker, other), None
            elif other in reached:
                yield (asker, other), reached[other]


def _address(round_: Round, host: str, asker: str) -> str:
    known = round_.facts()
    return (address(host, asker, known) if asker in known else None) or _named(host)


def _named(name: str) -> str:
    return "this machine" if name == HERE else name
