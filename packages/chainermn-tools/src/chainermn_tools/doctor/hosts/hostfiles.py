"""Checks of what the user wrote: the hostfile, and the numbers of slots."""

from __future__ import annotations

import re
from pathlib import Path

from chainermn_tools.doctor.check import Answer, Context, check, failed, ok, skipped
from chainermn_tools.doctor.hosts.round import launcher
from chainermn_tools.doctor.hosts.wording import MOST_NAMED
from chainermn_tools.jobs import HOST_NAME, HYDRA_VENDORS, parse_hostfile

# MPICH and its relatives write `host:2`, Open MPI `host slots=2` (`cpu=2` in old times).
OF_HYDRA = re.compile(r"(?P<name>[^\s:]+):(?P<slots>\d{1,6})")
OF_OPEN_MPI = re.compile(
    r"(?P<name>[^\s:=]+)\s+(?:slots|cpus?)\s*=\s*(?P<slots>\d{1,6})(?:\s+max[_-]slots\s*=\s*\d+)?"
)


@check("hostfile", "Is the hostfile written as this MPI reads it?")
def hostfile(context: Context) -> Answer:
    if context.hostfile is None:
        return skipped("no hostfile was named")
    path = context.hostfile
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as problem:
        return failed(f"{path} can't be read: {problem}", "give the right path with --hostfile")
    vendor = launcher(context).get("vendor")
    wrong = misspelt(text, vendor)
    if wrong:
        other = "Open MPI" if vendor in HYDRA_VENDORS else "MPICH"
        first = next(iter(wrong))
        shown = [f"line {number}, {line!r}" for number, (line, _) in wrong.items()][:MOST_NAMED]
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        return failed(
            f"{path} is written for {other}, and mpiexec is of {vendor}: {'; '.join(shown)}{more}",
            f"write in line {first}: {wrong[first][1]}   # and so on; or start the job with "
            "chainermn launch, which reads both",
            lines={str(number): right for number, (_, right) in wrong.items()},
        )
    try:
        hosts = parse_hostfile(text, path)
    except ValueError as problem:
        return failed(str(problem), "write a host a line, such as: host:4 (Open MPI: host slots=4)")
    return ok(f"{path} names {len(hosts)} host{'s' if len(hosts) > 1 else ''}")


def misspelt(text: str, vendor: str | None) -> dict[int, tuple[str, str]]:
    """The lines of a hostfile that another MPI than the vendor's would read.

    Args:
        text: of the hostfile.
        vendor: of mpiexec; None when it is not known, and then nothing is misspelt.

    Returns:
        By the line's number from 1, the line and how the vendor's MPI wants it.
    """
    if vendor in HYDRA_VENDORS:
        pattern, right = OF_OPEN_MPI, "{}:{}"
    elif vendor == "Open MPI":
        pattern, right = OF_HYDRA, "{} slots={}"
    else:
        return {}
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        shown = line.split("#", 1)[0].strip()
        parts = pattern.fullmatch(shown)
        if parts and HOST_NAME.fullmatch(parts["name"]):
            found[number] = (shown, right.format(parts["name"], int(parts["slots"])))
    return found


@check("slots", "Have the hosts slots enough for the ranks?")
def slots(context: Context) -> Answer:
    if not context.hosts:
        return skipped("no hosts were named")
    if all(host.slots is None for host in context.hosts):
        return ok("no number of slots is given: ranks are shared evenly")
    total = sum(1 if host.slots is None else host.slots for host in context.hosts)
    said = f"{total} slot{'s' if total > 1 else ''} on {len(context.hosts)} hosts"
    if context.ranks is None:
        return ok(f"{said}; how many ranks there are to be wasn't said")
    if context.ranks > total:
        each = -(-context.ranks // len(context.hosts))
        listed = ",".join(f"{host.name}:{each}" for host in context.hosts[:MOST_NAMED])
        dots = ",..." if len(context.hosts) > MOST_NAMED else ""
        return failed(
            f"{said}, and {context.ranks} ranks",
            f"-n {total}   # or give more slots: {listed}{dots}",
            slots=total,
            ranks=context.ranks,
        )
    return ok(f"{said} for {context.ranks} ranks")
