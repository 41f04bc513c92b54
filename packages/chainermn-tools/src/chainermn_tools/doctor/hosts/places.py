"""The check that ranks really start on the hosts that were asked for, and meet there."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
# Of the time that is left; then each host may be tried alone.
TOGETHER_SHARE = 0.6
MOST_ALONE = 16
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
    seconds = min(MOST_SECONDS, TOGETHER_SHARE * context.left())
    ended = run(context, shares, seconds)
    records = [json.loads(text) for text in RECORD.findall(ended.out)]
    began = Counter(record["began"] for record in records if "began" in record)
    met = next((record["hosts"] for record in records if "hosts" in record), None)
    if met is None or ended.status != 0:
        silent = [host for host in shares if began[names[host]] < wanted[names[host]]]
        if ended.status is None:
            return _hangs(context, silent, len(silent) == len(shares), seconds)
        return _failed(ended, silent)
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


def _hangs(context: Context, silent: list[str], all_are: bool, seconds: float) -> Answer:
    """Which host it is that keeps ranks from starting, or that it is none."""
    if not silent:
        return failed(
            "MPI hangs while it starts, or while ranks meet: all ranks began",
            "export UCX_TLS=tcp,self   # (MPICH), OMPI_MCA_btl=tcp,self (Open MPI): plain TCP",
        )
    text = f"mpiexec hangs: no rank began on {listed(silent)} within {seconds:.0f} s"
    if all_are and 1 < len(silent) <= MOST_ALONE:
        # One that hangs may hold up all.
        alone = _hanging_alone(context, silent, min(MOST_SECONDS, context.left()))
        if 0 < len(alone) < len(silent):
            text = f"mpiexec hangs because of {listed(alone)}: no rank begins there"
            silent = alone
    fix = f"ssh {silent[0]} mpiexec -n 1 hostname   # if it hangs too, install MPI anew there"
    return failed(text, fix, hosts=silent)


def _hanging_alone(context: Context, hosts: list[str], seconds: float) -> list[str]:
    """The hosts on which a rank doesn't start even without the others."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        jobs = list(pool.map(lambda host: run(context, {host: 1}, seconds), hosts))
    return [host for host, ended in zip(hosts, jobs, strict=True) if not RECORD.search(ended.out)]


def _failed(ended: program.Ended, silent: list[str]) -> Answer:
    where = f"no rank began on {listed(silent)}" if silent else "all ranks began"
    said = last_line(ended.err) or last_line(RECORD.sub("", ended.out))
    return failed(
        f"{where}, and the job ended with status {ended.status}: {said}",
        advice(
            f"{ended.out}\n{ended.err}",
            "run it by hand to see what mpiexec says: chainermn launch --hosts ...",
        ),
        hosts=silent,
    )


def _counted(hosts: Counter[str]) -> str:
    parts = [f"{ranks} rank{'s' if ranks > 1 else ''} on {host}" for host, ranks in hosts.items()]
    return listed(parts)
