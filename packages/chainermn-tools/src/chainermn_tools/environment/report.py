"""The report: every probe's answer, in sections, and how it is printed."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from chainermn_tools.environment.machine import gpus, machine, memory, shared_memory
from chainermn_tools.environment.mpi import mpi, topology
from chainermn_tools.environment.packages import (
    blas,
    import_origins,
    package_versions,
    python,
)
from chainermn_tools.environment.probe import (
    MARGIN,
    call_in_subprocess,
    run_concurrently,
)
from chainermn_tools.formatting import (
    format_bytes,
    print_line,
    print_row,
    printable,
)
from chainermn_tools.jobs import influences_jobs, rank_from_env

if TYPE_CHECKING:
    from rich.console import Console

# Raised when a key of the report changes its name or its meaning.
SCHEMA = 3
# The time-out of each subprocess. Loading CUDA from a cold network disk takes several
# seconds.
TIMEOUT_SECONDS = 20.0
# A key whose many lines are seldom wanted; JSON has it.
OMITTED_KEY = "description"
# A report is pasted in public places. Slurm, for one, may hold a token in SLURM_JWT.
SECRET = re.compile(r"AUTH|CREDENTIAL|JWT|KEY|PASS|SECRET|TOKEN")


def collect(seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Collect the facts that a bug report needs about this machine and its software.

    Collective if an MPI launcher started this process; then rank 0's ``topology`` shows
    all ranks, and the rest is about this process and its machine.

    Args:
        seconds: the time-out of each program. Programs run concurrently, so the call
            takes little longer.

    Returns:
        A dict for JSON. ``schema`` is the version of the other keys. A part that could
        not be found out, at any depth, is ``{"unavailable": reason}``. Keys that end in
        ``_bytes`` have numbers of bytes. None stands for software that isn't installed,
        or a variable that isn't set.
    """
    probes: dict[str, Callable[[], Any]] = {
        "python": python,
        "packages": package_versions,
        "imports": import_origins,
        "mpi": lambda: mpi(seconds),
        "machine": lambda: machine(seconds),
        "blas": lambda: call_in_subprocess(blas, seconds),
        "gpus": lambda: gpus(seconds),
        "variables": variables,
    }
    if rank_from_env() is not None:
        probes["topology"] = lambda: topology(seconds)
    return {"schema": SCHEMA, **run_concurrently(probes, MARGIN**2 * seconds)}


def rank_facts() -> dict[str, Any]:
    """Return the facts that a doctor's rank reports about its host, short enough for an event."""
    versions = package_versions()
    return {
        "host": socket.gethostname(),
        "packages": {name: one for name, one in versions.items() if one},
        "memory": memory(),
        "shared_memory": shared_memory(),
    }


def variables() -> dict[str, str]:
    """Return the variables that are set and influence jobs; secret values are hidden."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if influences_jobs(name):
            found[name] = "(hidden)"
            if not SECRET.search(name):
                found[name] = printable(value)
    return found


def render(report: dict[str, Any], console: Console) -> None:
    """Print a report that :func:`collect` returned on the console.

    Long values are folded to the console's width.
    """
    for name, rows in sections(report):
        print_line(name, console, "bold")
        width = max((len(key) for key, _ in rows), default=0)
        for key, value in rows:
            style = "yellow" if value.startswith("unavailable") else ""
            print_row(((f"  {key}", "dim"), (value, style)), (width + 2,), console)
        console.print()


def sections(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the name of each section with its lines of key and value, for people."""
    found = {name: section for name, section in report.items() if name != "schema"}
    return [
        (name, list(_rows("", section)) or [("none", "")])
        for name, section in found.items()
    ]


def _rows(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield lines of (key, value); a nested key follows its parent's key."""
    if isinstance(value, dict) and "unavailable" in value:
        yield key, f"unavailable: {value['unavailable']}"
    elif isinstance(value, dict):
        for name, inner in _sized(value):
            if name != OMITTED_KEY:
                yield from _rows(f"{key} {name}".strip(), inner)
    elif isinstance(value, list):
        if not value:
            yield key, "none"
        for number, inner in enumerate(value):
            yield key if number == 0 else "", _line(inner)
    else:
        yield key, _line(value)


def _line(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_line(one)}" for name, one in _sized(value))
    return str(value)


def _sized(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values; numbers of bytes become text, and lose the ``_bytes``."""
    for name, value in values.items():
        if name.endswith("_bytes") and isinstance(value, int):
            value = format_bytes(value)
        yield name.removesuffix("_bytes"), value
