"""The check that ranks really start on the hosts that were asked for, and meet there."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any

from chainermn_tools import program
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.advice import advice, last_line
from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped
from chainermn_tools.doctor.hosts import placed
from chainermn_tools.doctor.hosts.remote import MARK
from chainermn_tools.doctor.hosts.round import Round, over_hosts
from chainermn_tools.doctor.hosts.wording import listed
from chainermn_tools.doctor.live import steps
from chainermn_tools.launch import command_line
from chainermn_tools.launch.hosts import deal

# So many ranks of a host show where it puts them; more would only take longer.
MOST_RANKS = 2
# They do next to nothing: whoever is not done by then hangs.
MOST_SECONDS = 40.0
# Who was told to end goes on at most so much longer.
SPARE_SECONDS = 3
RECORD = re.compile(rf"{MARK}(\{{.*?\}})\s*$", re.MULTILINE)
NEEDS = (
    *("hostfile", "slots", "host names", "host keys", "ssh"),
    *("hosts' python", "hosts' packages", "hosts' mpiexec", "hosts' variables"),
    *("hosts' shared memory", "connections", steps.START),
)


@over_hosts("placement", "Do ranks start on the hosts that were asked for, and meet?", NEEDS)
def placement(context: Context, round_: Round) -> Answer:
    shares = {host: min(n, MOST_RANKS) for host, n in deal(context.hosts, context.ranks).items()}
    names = {host: facts_["hostname"] for host, facts_ in round_.facts().items()}
    wanted = Counter[str]()
    for host, ranks in shares.items():
        if host not in names:
            return skipped(f"{host} gave no answer")
        wanted[names[host]] += ranks
    seconds = min(MOST_SECONDS, context.left())
    ended = run(context, shares, seconds)
    records = [json.loads(text) for text in RECORD.findall(ended.out)]
    began = Counter(record["began"] for record in records if "began" in record)
    met = next((record["hosts"] for record in records if "hosts" in record), None)
    if met is None or ended.status != 0:
        return _not_met(ended, wanted, began, seconds)
    if Counter(met) != wanted:
        return failed(
            f"ranks are on {_counted(Counter(met))}, and should be on {_counted(wanted)}",
            "env | grep -E 'HYDRA_|PRTE_MCA_|OMPI_MCA_|SLURM_'   # something overrules the hosts",
            ranks=dict(Counter(met)),
        )
    return ok(f"{_counted(wanted)}", ranks=dict(wanted))


def run(context: Context, shares: dict[str, int], seconds: float) -> program.Ended:
    """Start the ranks as `chainermn launch` does.

    Args:
        context: of the check.
        shares: how many ranks on each host.
        seconds: that they have.
    """
    launcher: dict[str, Any] = context.once(facts.launcher)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command_line.command_line(
        launcher,
        sum(shares.values()),
        shares,
        prefix=False,
        threads=1,
        names=list(environment),
        script=placed.__file__,
        arguments=[str(int(seconds) + SPARE_SECONDS)],
    )
    return program.run(words, seconds, environment=environment)


def _not_met(
    ended: program.Ended, wanted: Counter[str], began: Counter[str], seconds: float
) -> Answer:
    """Why the ranks did not come to their end."""
    silent = [host for host in wanted if began[host] < wanted[host]]
    where = f"no rank began on {listed(silent)}" if silent else "all ranks began"
    if ended.status is None:
        if silent:
            said = f"mpiexec hangs: {where} within {seconds:.0f} s"
            fix = (
                f"ssh {silent[0]} mpiexec -n 1 hostname   # if it hangs too, install MPI anew there"
            )
        else:
            said = f"MPI hangs while it starts, or while ranks meet: {where}"
            fix = "export UCX_TLS=tcp,self   # (MPICH), OMPI_MCA_btl=tcp,self (Open MPI): plain TCP"
        return failed(said, fix, began=dict(began))
    output = f"{ended.out}\n{ended.err}"
    said = last_line(ended.err) or last_line(RECORD.sub("", ended.out))
    return failed(
        f"{where}, and the job ended with status {ended.status}: {said}",
        advice(output, "run it by hand to see what mpiexec says: chainermn launch --hosts ..."),
        began=dict(began),
    )


def _counted(hosts: Counter[str]) -> str:
    parts = [f"{ranks} rank{'s' if ranks > 1 else ''} on {host}" for host, ranks in hosts.items()]
    return listed(parts)
