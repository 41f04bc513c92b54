"""What is said of the measured times: ratios, limits, a table, JSON."""

from __future__ import annotations

import datetime
import math
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import limits
import numpy as np
from limits import quartiles
from mpi4py import MPI
from peers import ALL_COUNT, ALL_RANKS, BUNDLED, HANDOFF, ONE_COUNTS, ONE_RANK
from rich.console import Console
from rich.table import Table
from tables import make_table

from chainermn_tools.formatting import format_bytes

# All ranks at once take twice as long as one alone where two of them share a core, or
# the way to memory, and about as long where they don't.
SHARED_FROM = 1.4
# A copy of fewer stays in a cache and says nothing of memory.
TELLING_FLOATS = 8_000_000


def document(
    cores: list[tuple[str, list[int]]],
    rounds: int,
    realtime: bool,
    models: list[dict[str, Any]],
) -> dict[str, Any]:
    """All that is written to JSON.

    Args:
        cores: for each rank its host and the cores that it may use.
        rounds: how often each case had its turn.
        realtime: whether it had its core to itself then.
        models: for each its name and sizes, the bytes moved, and what `measure`
            returned.
    """
    hosts: dict[str, set[int]] = {}
    for host, mine in cores:
        hosts.setdefault(host, set()).update(mine)
    return {
        **environment(),
        "ranks": len(cores),
        "cores": [len(union) for union in hosts.values()],
        "rounds": rounds,
        "realtime": realtime,
        "models": [summary(**model, ranks=len(cores)) for model in models],
    }


def environment() -> dict[str, Any]:
    """Return when and on what it was measured."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "Python": platform.python_version(),
            "MPI": mpi_library(),
            "NumPy": version("numpy"),
            **{name: version(name) for name in ("mpi4py", "chainer", "chainermn-comm")},
        },
    }


def machine() -> str:
    """Kernel, architecture and processor, such as "Linux x86_64, Intel(R) Xeon(R) Processor"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return ", ".join([f"{platform.system()} {platform.machine()}", *names[:1]])


def of_sizes(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """What is added to that once arrays of some sizes are measured.

    Args:
        sizes: for each its bytes and what `measure` returned.
    """
    return {
        "sizes": [
            {
                "bytes": size["bytes"],
                "cases": [
                    {**row, "median_ms": float(np.median(row["ms"]))}
                    for row in size["cases"]
                ],
            }
            for size in sizes
        ]
    }


def mpi_library() -> str:
    """Name and version, such as "MPICH 5.0.2"."""
    first = re.split("[,\n]", MPI.Get_library_version())[0]
    return " ".join(first.replace("Version:", "").split())


def summary(
    model: str,
    arrays: int,
    floats: int,
    moved: dict[str, float],
    cases: list[dict[str, Any]],
    ranks: int,
) -> dict[str, Any]:
    """One model's medians, ratios (taken round by round), and limits.

    Args:
        model, arrays, floats: its name and sizes.
        moved: for some communicators, the bytes that a rank moves over those of the
            gradients.
        cases: what `measure` returned.
        ranks: their number.
    """
    ms = {row["name"]: np.array(row["ms"]) for row in cases}
    return {
        "model": model,
        "arrays": arrays,
        "floats": floats,
        "sharing": {
            "a core": sharing(ms[ALL_COUNT] / ms[ONE_COUNTS]),
            "the way to memory": sharing(ms[ALL_RANKS] / ms[ONE_RANK])
            if floats >= TELLING_FLOATS
            else None,
        },
        "cases": [
            {
                **row,
                "median_ms": float(np.median(ms[row["name"]])),
                "over_handoff": quartiles(ms[row["name"]] / ms[HANDOFF]),
                "over_bundled": quartiles(ms[row["name"]] / ms[BUNDLED]),
            }
            for row in cases
            if row["kind"] != "probe"
        ],
        "limits": [
            *(limit.judge(ms) for limit in limits.of(model, ranks) if limit.name in ms),
            *(limits.judge_moved(name, times) for name, times in moved.items()),
        ],
    }


def sharing(ratios: np.ndarray) -> dict[str, Any]:
    """Whether ranks were in each other's way, from all at once over one alone, each round."""
    return {
        "all_over_one": quartiles(ratios),
        "rounds": int(np.sum(ratios >= SHARED_FROM)),
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print the results; without colours where the console is no terminal."""
    console.print(heading(results), "", sep="\n", highlight=False, soft_wrap=True)
    for model in results["models"]:
        console.print(
            times_table(model["cases"], "over_handoff", "handoff", title(model))
        )
        console.print(cores(model, results["rounds"]), highlight=False, soft_wrap=True)
        console.print(limits_table(model["limits"]))


def limits_table(rows: list[dict[str, Any]]) -> Table:
    """What `limits.judge` said, line by line."""
    table = make_table("limit", ("must be", "median", "quartiles", ""))
    for row in rows:
        found = ["-", "", "not measured"]
        if row["ratio"] is not None:
            low, median, high = row["ratio"]
            verdict = "[green]ok[/]" if row["ok"] else "[red]not[/]"
            found = [f"{median:.3f}", f"{low:.3f} - {high:.3f}", verdict]
        table.add_row(row["limit"], row["must"], *found)
    return table


def heading(results: dict[str, Any]) -> str:
    """When, on what, and how."""
    versions = ", ".join(
        f"{name} {number}" for name, number in results["versions"].items()
    )
    cores = " + ".join(map(str, results["cores"]))
    return (
        f"allreduce_grad, {results['ranks']} ranks on {cores} cores, "
        f"{results['rounds']} rounds{' at real-time priority' if results['realtime'] else ''}, "
        f"{results['date']}\n{versions}"
    )


def cores(model: dict[str, Any], rounds: int) -> str:
    """Whether the ranks had cores, and ways to memory, of their own."""
    core, memory = model["sharing"].values()
    text = (
        f"arithmetic on all ranks took {core['all_over_one'][1]:.2f} x one alone "
        f"(a core shared in {core['rounds']} of {rounds} rounds)"
    )
    if memory is not None:
        text += (
            f", memcpy {memory['all_over_one'][1]:.2f} x "
            f"(the way to memory shared in {memory['rounds']})"
        )
    return text


def number(value: float) -> str:
    """Three digits, but no more than four behind the point."""
    behind = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(4, max(0, behind))}f}"


def title(model: dict[str, Any]) -> str:
    """The model and its size."""
    return (
        f"{model['model']} ({model['arrays']:,} arrays, {model['floats']:,} float32, "
        f"{model['floats'] * 4e-6:.3g} MB)"
    )


def cells(row: dict[str, Any], reference: str) -> list[str]:
    """A case's row of a table; ``reference`` is the key of its ratio to the first peer."""
    return [
        f"[bold]{row['name']}[/]" if row["kind"] == "ours" else row["name"],
        number(row["median_ms"]),
        f"{number(min(row['ms']))} - {number(max(row['ms']))}",
        number(row[reference][1]),
        number(row["over_bundled"][1]),
        "?" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.1f}",
        "yes" if row["right"] else "[red]NO[/]",
    ]


def times_table(
    rows: list[dict[str, Any]], reference: str, peer: str, title: str | None = None
) -> Table:
    """Return the times of all cases; see :func:`cells` for ``reference``, named ``peer``."""
    columns = ("median", "min - max", f"x {peer}", "x bundled", "+ MB", "right")
    return make_table(
        "milliseconds", columns, [cells(row, reference) for row in rows], title
    )


def sizes_table(sizes: list[dict[str, Any]]) -> Table:
    """Median times, a column for each number of bytes; an exclamation mark is a wrong result."""
    columns = [format_bytes(size["bytes"]) for size in sizes]
    table = make_table("", columns, title="one array of float32, median milliseconds")
    for rows in zip(*(size["cases"] for size in sizes), strict=True):
        times = [
            number(row["median_ms"])
            if row["right"]
            else f"[red]{number(row['median_ms'])}!"
            for row in rows
        ]
        table.add_row(rows[0]["name"], *times)
    return table
