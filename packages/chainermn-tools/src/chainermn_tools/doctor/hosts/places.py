"""The check that ranks really start on the hosts that were asked for, and meet there."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from chainermn_tools import jobs
from chainermn_tools.doctor.advice import advice, last_line
from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped
from chainermn_tools.doctor.hosts import ranks
from chainermn_tools.doctor.hosts.round import Round, over_hosts
from chainermn_tools.doctor.hosts.wording import listed
from chainermn_tools.doctor.live import steps
from chainermn_tools.jobs import assign_slots

# Hosts that are tried alone, where one that hangs may hold up all, and for how long.
MOST_ALONE, ALONE_SECONDS = 16, 40.0
NEEDS = (
    *("hostfile", "slots", "host names", "host keys", "ssh"),
    *("hosts' python", "hosts' packages", "hosts' mpiexec", "hosts' variables"),
    *("hosts' shared memory", "connections", steps.START),
)


@over_hosts("placement", "Do ranks start on the hosts that were asked for, and meet?", NEEDS)
def placement(context: Context, round_: Round) -> Answer:
    shares = assign_slots(context.hosts, context.ranks)
    names = {host: facts["hostname"] for host, facts in round_.facts().items()}
    for host in shares:
        if host not in names:
            return skipped(f"{host} gave no answer")
    job = context.once(ranks.run)
    wanted = Counter[str]()
    for host, count in job.shares.items():
        wanted[names[host]] += count
    began = Counter(record["began"] for record in job.records if "began" in record)
    met = job.hosts()
    if met is None:
        silent = [host for host in job.shares if began[names[host]] < wanted[names[host]]]
        if job.ended.returncode is None:
            return _hangs(context, silent, len(silent) == len(job.shares), job.seconds)
        return _failed(job.ended, silent)
    if Counter(met) != wanted:
        return failed(
            f"ranks are on {_counted(Counter(met))}, and should be on {_counted(wanted)}",
            "env | grep -E 'HYDRA_|PRTE_MCA_|OMPI_MCA_|SLURM_'   # something overrules the hosts",
            ranks=dict(Counter(met)),
        )
    return ok(f"{_counted(wanted)}", ranks=dict(wanted))


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
        alone = _hanging_alone(context, silent, min(ALONE_SECONDS, context.left()))
        if 0 < len(alone) < len(silent):
            text = f"mpiexec hangs because of {listed(alone)}: no rank begins there"
            silent = alone
    fix = f"ssh {silent[0]} mpiexec -n 1 hostname   # if it hangs too, install MPI anew there"
    return failed(text, fix, hosts=silent)


def _hanging_alone(context: Context, hosts: list[str], seconds: float) -> list[str]:
    """The hosts on which a rank doesn't start even without the others."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        jobs = list(pool.map(lambda host: ranks.start(context, {host: 1}, seconds), hosts))
    return [host for host, ended in zip(hosts, jobs, strict=True) if not ranks.records(ended)]


def _failed(ended: jobs.CompletedProcess, silent: list[str]) -> Answer:
    where = f"no rank began on {listed(silent)}" if silent else "all ranks began"
    said = last_line(ended.stderr) or last_line(ranks.RECORD.sub("", ended.stdout))
    return failed(
        f"{where}, and the job ended with status {ended.returncode}: {said}",
        advice(
            f"{ended.stdout}\n{ended.stderr}",
            "run it by hand to see what mpiexec says: chainermn launch --hosts ...",
        ),
        hosts=silent,
    )


def _counted(hosts: Counter[str]) -> str:
    parts = [f"{ranks} rank{'s' if ranks > 1 else ''} on {host}" for host, ranks in hosts.items()]
    return listed(parts)
