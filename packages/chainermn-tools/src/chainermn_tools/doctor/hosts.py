"""Checks of the hosts: the login to each, and then one job of ranks over all of them."""

from __future__ import annotations

import functools
import platform
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor.check import (
    DEFAULT_RANKS,
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.hints import REPORT_IT, most_telling_line
from chainermn_tools.doctor.logins import THIS_MACHINE, Login, ask_all
from chainermn_tools.doctor.machine import MIB, check_size
from chainermn_tools.doctor.rank_program import END, FACTS, MESSAGES, START, on_gpus
from chainermn_tools.doctor.ranks import (
    COMMUNICATORS,
    NETWORK_HINT,
    RankJob,
    run_ranks,
)
from chainermn_tools.doctor.software import mpi_vendor
from chainermn_tools.environment import OUR_PACKAGES
from chainermn_tools.explain import root_cause
from chainermn_tools.formatting import format_count, join_first

MAX_NAMED = 5
# Ranks of each host: enough to show where they run; more would only take longer.
MAX_RANKS_PER_HOST = 2
# The share of the remaining time that jobs may take.
SRUN_SHARE = 0.3
JOB_SHARE = 0.6
ALONE_SHARE = 0.9
# The number of hosts that are tried alone at the same time.
MAX_ALONE = 8
# The communicator that refuses more than one host.
SINGLE_HOST = "single_node"
# The memory of a rank that has imported Chainer and made a communicator.
RANK_MEMORY = 256 * MIB
# Each host's problem, and how to fix it.
Problems = Mapping[str, tuple[str, str]]

login_checks = Checks()
rank_checks = Checks()


def evaluate(problems: Problems, success: str) -> CheckResult:
    """Return the failure that names the hosts' problems, and how to fix the first one."""
    if not problems:
        return ok(success)
    parts = [f"{host}: {problem}" for host, (problem, _) in problems.items()]
    _, hint = next(iter(problems.values()))
    return failed(join_first(parts, MAX_NAMED, "; "), hint, hosts=list(problems))


# The logins


@login_checks.add(
    "slots", "Do the hosts have enough slots for the ranks?", needs=("scheduler",)
)
def slots(context: Context) -> CheckResult:
    try:
        assigned = jobs.assign_slots(context.hosts, context.ranks)
    except ValueError as error:
        total = sum(host.slots or 1 for host in context.hosts)
        return failed(str(error), f"-n {total}")
    return ok(_ranks_on_hosts(assigned))


def _ranks_on_hosts(ranks_per_host: Mapping[str, int]) -> str:
    texts = [
        f"{format_count(ranks, 'rank')} on {host}"
        for host, ranks in ranks_per_host.items()
    ]
    return join_first(texts, MAX_NAMED)


def _logins(context: Context) -> dict[str, Login]:
    """Return the answers of the hosts, without this machine."""
    logins = dict(ask_all(context))
    del logins[THIS_MACHINE]
    return logins


@login_checks.add(
    "ssh", "Can each host be reached, as mpiexec does it?", needs=("slots",)
)
def ssh(context: Context) -> CheckResult:
    logins = _logins(context)
    problems = {
        host: (login.problem, login.hint)
        for host, login in logins.items()
        if login.problem
    }
    remote = [host for host in logins if not jobs.is_here(host)]
    success = "no host needs a login"
    if remote:
        success = f"{format_count(len(remote), 'host')} answered"
    return evaluate(problems, success)


@login_checks.add(
    "hosts_python", "Do the hosts have the same Python at the same path?", ("ssh",)
)
def python(context: Context) -> CheckResult:
    here = f"{platform.python_implementation()} {platform.python_version()}"
    problems = {}
    for host, login in _logins(context).items():
        if "status" in login.answer:
            problem = f"{sys.executable} doesn't run: {most_telling_line(login.said)}"
        else:
            there = f"{login.answer['implementation']} {login.answer['version']}"
            if there == here:
                continue
            problem = f"{sys.executable} is {there} and not {here}"
        problems[host] = (problem, _copy_command(host))
    return evaluate(problems, f"{here} at {sys.executable}")


def _copy_command(host: str) -> str:
    """Return how a host gets the Python that is used here."""
    if sys.prefix == sys.base_prefix:
        version = platform.python_version()
        return f"install Python {version} on {host}, as {sys.executable}"
    copy = shlex.join(["rsync", "-as", f"{sys.prefix}/", f"{host}:{sys.prefix}/"])
    return f"{copy}   # and the Python that it is built on; or share both by NFS"


@login_checks.add(
    "script", "Do the hosts have the same script at the same path?", ("hosts_python",)
)
def script(context: Context) -> CheckResult:
    path = context.script
    if path is None:
        return skipped("no script was named")
    here = ask_all(context)[THIS_MACHINE].answer
    if "script" not in here:
        message = f"{path} can't be read here: {here.get('no script')}"
        return failed(message, "give the script's right path")
    problems = {}
    for host, login in _logins(context).items():
        if login.answer.get("script") == here["script"]:
            continue
        problem = f"{path} is not the one of this machine"
        if "no script" in login.answer:
            problem = f"{path} can't be read: {login.answer['no script']}"
        copy = shlex.join(["rsync", "-as", "--mkpath", path, f"{host}:{path}"])
        problems[host] = (problem, f"{copy}   # or share its folder by NFS")
    return evaluate(problems, f"{path} is the same")


# The job


def _ranks_per_host(context: Context) -> dict[str, int]:
    assigned = jobs.assign_slots(context.hosts, context.ranks)
    return {host: min(ranks, MAX_RANKS_PER_HOST) for host, ranks in assigned.items()}


@functools.cache
def run_job(context: Context) -> RankJob:
    """Run ranks on all hosts, at most two on each."""
    shares = _ranks_per_host(context)
    launcher = context.facts["mpi"]["launcher"]
    timeout = context.share(JOB_SHARE)
    return run_ranks(shares, timeout, launcher, _communicators(shares))


def _communicators(ranks_per_host: Mapping[str, int]) -> list[str]:
    if len(ranks_per_host) == 1:
        return list(COMMUNICATORS)
    return [name for name in COMMUNICATORS if name != SINGLE_HOST]


@rank_checks.add(
    "hosts_start", "Do ranks start on the requested hosts?", ("ranks_meet", "script")
)
def start(context: Context) -> CheckResult:
    job = run_job(context)
    launcher = context.facts["mpi"]["launcher"]
    names = {host: login.answer["host"] for host, login in _logins(context).items()}
    wanted = Counter[str]()
    for host, ranks in job.ranks_per_host.items():
        wanted[names[host]] += ranks
    began = Counter(one["host"] for one in job.results(FACTS))
    if began == wanted:
        return ok(_ranks_on_hosts(wanted), ranks=dict(wanted))
    if began.total() == job.ranks:
        message = (
            f"the ranks started elsewhere: {_ranks_on_hosts(began)}; "
            f"wanted: {_ranks_on_hosts(wanted)}"
        )
        hint = "env | grep -E 'HYDRA_|PRTE_MCA_|OMPI_MCA_|SLURM_'   # something overrules the hosts"
        return failed(message, hint, ranks=dict(began))
    silent = [host for host in job.ranks_per_host if not began[names[host]]]
    # One host may hold up all hosts.
    if len(silent) > 1 and not root_cause(job.output.tail):
        timeout = context.share(ALONE_SHARE)

        def alone(host: str) -> RankJob:
            return run_ranks({host: 1}, timeout, launcher)

        with ThreadPoolExecutor(MAX_ALONE) as pool:
            tried = list(pool.map(alone, silent[:MAX_ALONE]))
        for host, one in zip(silent, tried, strict=False):
            if not one.results(FACTS):
                silent = [host]
                job = one
                break
    message = f"no rank began on {join_first(silent, MAX_NAMED)}"
    first = [*silent, *names][0]
    hint = (
        f"ssh {first} mpiexec -n 1 hostname   # if it fails too, install MPI anew there"
    )
    return job.ended(message, hint)


def _facts(context: Context) -> dict[str, dict[str, Any]]:
    """Return the facts that the first rank on each host reported."""
    found: dict[str, dict[str, Any]] = {}
    for one in run_job(context).results(FACTS):
        found.setdefault(one["host"], one)
    return found


@rank_checks.add(
    "hosts_packages",
    "Do the hosts have the same packages as this machine?",
    ("hosts_start",),
)
def packages(context: Context) -> CheckResult:
    here = context.facts["packages"]
    problems = {}
    for host, facts in _facts(context).items():
        there = facts["packages"]
        differing = [
            name for name in here if here[name] and there.get(name) != here[name]
        ]
        if not differing:
            continue
        problem = ", ".join(
            f"{name} {there.get(name) or 'is missing'} (here {here[name]})"
            for name in differing
        )
        hint = _copy_command(host)
        # The public index has another project's chainermn.
        if not set(differing) & set(OUR_PACKAGES):
            wanted = [f"{name}=={here[name]}" for name in differing]
            install = shlex.join([sys.executable, "-m", "pip", "install", *wanted])
            hint = shlex.join(["ssh", host, install])
        problems[host] = (problem, hint)
    return evaluate(problems, "all versions are the same")


@rank_checks.add(
    "hosts_memory", "May ranks on the hosts use enough memory?", ("hosts_start",)
)
def memory(context: Context) -> CheckResult:
    ranks = context.max_ranks_per_host() or DEFAULT_RANKS
    needed = ranks * RANK_MEMORY // MIB
    problems = {}
    for host, facts in _facts(context).items():
        limit = facts["memory"]["cgroup_bytes"]
        if limit is not None and limit // MIB < needed:
            problem = f"a control group allows {limit // MIB} MiB; ranks need {needed}"
            hint = f"sbatch --mem={needed}M ...   # or docker run --memory=..."
            problems[host] = (problem, hint)
    return evaluate(problems, "every host has enough")


@rank_checks.add(
    "hosts_shared_memory",
    "Is there enough room in /dev/shm of the hosts?",
    ("hosts_start",),
)
def shared_memory(context: Context) -> CheckResult:
    ranks = context.max_ranks_per_host() or DEFAULT_RANKS
    result = ok("every host has enough")
    for host, facts in _facts(context).items():
        if host == socket.gethostname():
            continue  # another check looks at this machine
        found = check_size(facts["shared_memory"], ranks, mpi_vendor(context))
        if found.hint is not None and result.status != "failed":
            result = CheckResult(
                found.status,
                f"{host}: {found.message}",
                f"ssh {host} {found.hint}",
                {"hosts": [host]},
            )
    return result


@rank_checks.add(
    "srun_ranks",
    "Do ranks that srun itself starts see one another?",
    ("hosts_packages", "hosts_memory", "hosts_shared_memory"),
)
def srun_ranks(context: Context) -> CheckResult:
    if not jobs.starts_by_srun():
        return skipped("this is no job of Slurm")
    shares = _ranks_per_host(context)
    plugin = "pmi2"
    if mpi_vendor(context) == "Open MPI":
        plugin = "pmix"
    # Without a vendor no plugin is named, so Slurm's or the user's default is tried.
    launcher = {"path": "srun", "vendor": None}
    variables = {"SLURM_NNODES": str(len(shares))}
    job = run_ranks(shares, context.share(SRUN_SHARE), launcher, (), variables)
    hint = f"export SLURM_MPI_TYPE={plugin}   # or srun --mpi={plugin}; or start ranks by mpiexec"
    sizes = [one["size"] for one in job.results(START)]
    if job.ranks > 1 and sizes == [1] * job.ranks:
        message = f"each of {job.ranks} ranks is rank 0 of 1"
        return warning(f"{message}: srun names no others to its MPI", hint)
    if "mpi/pmi2: " in job.text:
        hint = "export MPIR_CVAR_CH4_NETMOD=ofi   # where srun starts ranks of MPICH"
        return warning("MPICH over UCX sends more than Slurm's PMI 2 takes", hint)
    if job.output.timed_out or job.output.status or len(job.results(END)) < job.ranks:
        said = most_telling_line(job.text)
        return failed(f"the ranks don't end well; they say: {said}", hint)
    return ok(f"all {job.ranks} ranks do")


@rank_checks.add(
    "hosts_meet", "Do ranks on the hosts see one another?", ("srun_ranks",)
)
def meet(context: Context) -> CheckResult:
    return run_job(context).evaluate_meeting(context)


@rank_checks.add(
    "hosts_messages", "Do messages between hosts arrive as sent?", ("hosts_meet",)
)
def messages(context: Context) -> CheckResult:
    return run_job(context).evaluate([MESSAGES], "all values are right", NETWORK_HINT)


@rank_checks.add(
    "hosts_communicators",
    "Do communicators give correct results across the hosts?",
    ("hosts_messages",),
)
def communicators(context: Context) -> CheckResult:
    job = run_job(context)
    names = _communicators(job.ranks_per_host)
    steps = [*names, *map(on_gpus, names), END]
    return job.evaluate(steps, "all values are right", REPORT_IT)
