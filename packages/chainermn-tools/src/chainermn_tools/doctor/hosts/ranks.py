"""Starts ranks on the hosts, once for all checks, and collects what they say."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.hosts import placed
from chainermn_tools.doctor.hosts.remote import MARK
from chainermn_tools.doctor.hosts.round import Round, address, ask
from chainermn_tools.doctor.live import steps
from chainermn_tools.doctor.live.job import YIELDING
from chainermn_tools.jobs import assign_slots

# So many ranks of a host show where it puts them; more would only take longer.
MOST_RANKS = 2
# Of the time that is left; then each host may be tried alone.
TOGETHER_SHARE = 0.6
# They do little: whoever is not done by then hangs.
MOST_SECONDS = 60.0
# Who was told to end goes on at most so much longer.
SPARE_SECONDS = 3
# Up to so many hosts each two are tried; of more, neighbours.
MOST_PAIRED = 6
# The communicator that refuses more than one host.
ONE_HOST = "single_node"
RECORD = re.compile(rf"{MARK}(\{{.*?\}})\s*$", re.MULTILINE)
Pair = tuple[str, str, "str | None"]


@dataclass(frozen=True)
class Job:
    """What became of the ranks.

    Attributes:
        shares: how many of them each host should have got.
        seconds: that they had.
        pairs: names of two hosts each, and where the first one finds the second.
        communicators: that they were to try.
        ended: how mpiexec ended.
        records: what the ranks said, see :mod:`chainermn_tools.doctor.hosts.placed`.
    """

    shares: dict[str, int]
    seconds: float
    pairs: tuple[Pair, ...]
    communicators: tuple[str, ...]
    ended: jobs.CompletedProcess
    records: tuple[dict[str, Any], ...]

    def hosts(self) -> list[str] | None:
        """The host of each rank, as they told one another; None if they didn't come so far."""
        return next((record["hosts"] for record in self.records if "hosts" in record), None)


def run(context: Context) -> Job:
    """Run the job; for ``context.once``, where all hosts that are to run ranks have answered."""
    round_ = context.once(ask)
    shares = {
        host: min(n, MOST_RANKS) for host, n in assign_slots(context.hosts, context.ranks).items()
    }
    pairs = _pairs(round_, list(shares))
    names = tuple(name for name in steps.COMMUNICATORS if not pairs or name != ONE_HOST)
    seconds = min(MOST_SECONDS, TOGETHER_SHARE * context.left())
    ended = start(context, shares, seconds, pairs, names)
    return Job(shares, seconds, pairs, names, ended, records(ended))


def start(
    context: Context,
    shares: dict[str, int],
    seconds: float,
    pairs: tuple[Pair, ...] = (),
    communicators: tuple[str, ...] = (),
) -> jobs.CompletedProcess:
    """Start ranks as `chainermn launch` does, and wait for their end.

    Args:
        context: of the check.
        shares: how many ranks on each host.
        seconds: that they have.
        pairs: see :class:`Job`.
        communicators: likewise.
    """
    launcher: dict[str, Any] = context.once(facts.launcher)
    environment = {**YIELDING, **os.environ, "OMP_NUM_THREADS": "1"}
    job = {
        "seconds": int(seconds) + SPARE_SECONDS,
        "pairs": pairs,
        "communicators": communicators,
    }
    args = jobs.mpiexec_command(
        launcher,
        sum(shares.values()),
        jobs.rank_command(placed.__file__, json.dumps(job)),
        hosts=shares,
        threads=1,
        variables=environment,
    )
    return jobs.run(args, seconds, env=environment)


def records(ended: jobs.CompletedProcess) -> tuple[dict[str, Any], ...]:
    """What ranks said, as it came."""
    return tuple(json.loads(text) for text in RECORD.findall(ended.stdout))


def _pairs(round_: Round, hosts: list[str]) -> tuple[Pair, ...]:
    """The hosts between which messages are tried, by the names that they call themselves."""
    known = round_.facts()
    # A host that has several names is one.
    machines = {known[host]["machine"]: host for host in reversed(hosts)}
    single = [host for host in hosts if machines[known[host]["machine"]] == host]
    if len(single) <= MOST_PAIRED:
        both = list(combinations(single, 2))
    else:
        both = list(zip(single, [*single[1:], single[0]], strict=True))
    return tuple(
        (known[a]["hostname"], known[b]["hostname"], address(b, a, known)) for a, b in both
    )
