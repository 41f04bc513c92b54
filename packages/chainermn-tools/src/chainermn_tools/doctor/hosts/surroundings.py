"""Checks of what a host gives to processes that ssh starts: variables and shared memory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.here.memory import FIX_SIZE, MIB, USUAL_RANKS, room_for
from chainermn_tools.doctor.hosts.round import Round, launcher, over_hosts
from chainermn_tools.doctor.hosts.wording import all_of, told
from chainermn_tools.jobs import influences_jobs, is_forwarded

LIBRARIES = "LD_LIBRARY_PATH"
# MVAPICH doesn't pass these on to other hosts: MV2_USE_CUDA, MV2_SMP_USE_CMA and so on.
MVAPICH = ("MV2_", "MVP_")
# That these differ from host to host is as it should be.
OF_A_HOST = ("CUDA_VISIBLE_DEVICES", "NVIDIA_", "PMI", "SLURM_")


@over_hosts(
    "hosts' variables", "Has a shell on the hosts, as ssh starts it, the variables that matter?"
)
def variables(context: Context, round_: Round) -> Answer:
    here = round_.here["variables"]
    passes = launcher(context).get("vendor") != "Open MPI"
    problems: dict[str, str] = {}
    doubts: dict[str, str] = {}
    fixes = []
    for host, facts in round_.facts().items():
        there = facts["variables"]
        where = f"in ~/.bashrc of {host}, above what ends it for shells that are not interactive"
        missing = _missing_folders(here, there)
        differing = _differing(here, there)
        odd = _only_there(here, there, passes)
        if missing:
            lost = "lacks" if there.get(LIBRARIES) else "is not set: it lacks"
            problems[host] = f"{LIBRARIES} {lost} {', '.join(missing)}"
            setting = f"{LIBRARIES}={shlex.quote(':'.join(missing))}:${LIBRARIES}"
            fixes.append(f"export {setting}   # {where}")
        elif differing:
            name = differing[0]
            mine, theirs = (f"{one[name]!r}" if name in one else "not set" for one in (here, there))
            problems[host] = f"{name} is {theirs} (here {mine})"
            how = f"export {name}={shlex.quote(here[name])}" if name in here else f"unset {name}"
            fixes.append(f"{how}   # {where}")
        elif odd:
            doubts[host] = (
                f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'} set otherwise there"
            )
    if problems:
        return failed(told(problems), fixes[0], hosts=problems)
    if doubts:
        fix = "set them alike in ~/.bashrc of all hosts, or nowhere"
        return warning(told(doubts), fix, hosts=doubts)
    if not round_.facts():
        return skipped("no host could be asked")
    return ok(f"{all_of(list(round_.facts()))}: {_paths(here, round_.facts())}")


def _missing_folders(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """The folders of libraries that are searched here and not there."""
    found = there.get(LIBRARIES, "").split(":")
    return [one for one in here.get(LIBRARIES, "").split(":") if one and one not in found]


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """The variables of MVAPICH that are not as here."""
    names = [name for name in sorted({*here, *there}) if name.startswith(MVAPICH)]
    # A host may call a variable what it likes; here its name goes into a command.
    return [name for name in names if name.isidentifier() and here.get(name) != there.get(name)]


def _only_there(here: Mapping[str, str], there: Mapping[str, str], passes: bool) -> list[str]:
    """The variables that ranks on this host would have and others not.

    Args:
        here: the variables of this machine.
        there: those of a shell on the host.
        passes: whether mpiexec passes all of this machine's variables on.
    """
    found = []
    for name in sorted(there):
        matters = influences_jobs(name)
        if not matters or name.startswith((*OF_A_HOST, *MVAPICH)) or name == LIBRARIES:
            continue
        overruled = passes or is_forwarded(name)
        if name not in here or (not overruled and here[name] != there[name]):
            found.append(name)
    return found


def _paths(here: Mapping[str, str], hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """What there is to say where all is well."""
    folders = here.get("PATH", "").split(":")
    lacking = [
        host
        for host, facts in hosts.items()
        if not {*folders} <= {*facts["variables"].get("PATH", "").split(":")}
    ]
    if not lacking:
        return "they are as here"
    return "they are as here but for PATH: start programs there by their full path"


@over_hosts("hosts' shared memory", "Is there room in /dev/shm of the hosts?")
def shared_memory(context: Context, round_: Round) -> Answer:
    ranks = context.ranks_a_host() or USUAL_RANKS
    least, enough = room_for(ranks, launcher(context).get("vendor"))
    full: dict[str, str] = {}
    little: dict[str, str] = {}
    room: dict[str, int] = {}
    for host, facts in round_.facts().items():
        if facts.get("machine") == round_.here["machine"]:
            continue  # another check looks at this machine's
        size = facts["shm"] or {"free_bytes": 0, "total_bytes": 0}
        room[host] = size["free_bytes"]
        said = f"{size['free_bytes'] // MIB} MiB of {size['total_bytes'] // MIB} MiB are free"
        if size["free_bytes"] < least:
            full[host] = f"{said}: too little even for MPI itself"
        elif size["free_bytes"] < enough:
            little[host] = f"{said}: gradients would go through MPI, which is slower"
    if not room:
        return skipped("no other host was asked")
    bad = full or little
    if not bad:
        return ok(
            f"{all_of(list(room))}: {min(room.values()) // MIB} MiB are free", free_bytes=room
        )
    host = next(iter(bad))
    size = round_.facts()[host]["shm"]
    if size and size["total_bytes"] >= enough:
        fix = f"ssh {host} ls -l /dev/shm   # and remove there what no running job needs"
    else:
        fix = f"{FIX_SIZE}   # on {host}"
    answer = failed if full else warning
    return answer(told(bad), fix, hosts=bad)
