"""What is said of measured times: one table with ratios to peers, limits, JSON, a picture."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from runner import Row

from chainermn_tools.formatting import make_console, print_table

PACKAGES = ("numpy", "mpi4py", "chainer", "chainermn-comm")


class Ratio(NamedTuple):
    """A column of the table: a case's time over a peer's, or the inverse."""

    title: str
    peer: str
    inverse: bool = False


class Limit(NamedTuple):
    """A case takes at most so many times what a peer takes, or is so many times as fast."""

    case: str
    peer: str
    bound: float
    faster: bool = False

    def judge(self, rows: Sequence[Row]) -> Iterator[Verdict]:
        """Yield what was reached, if the case and the peer were measured."""
        found = ratios(rows, Ratio("", self.peer, self.faster), self.case)
        if found is None:
            return
        what = f"{self.case}: time over that of {self.peer}"
        if self.faster:
            what = f"{self.case}: times as fast as {self.peer}"
        yield judge(what, found, self.bound, at_least=self.faster)


class Verdict(NamedTuple):
    """Whether a limit holds, by the median."""

    limit: str
    must: str
    quartiles: list[float]
    ok: bool


def judge(
    what: str,
    found: np.ndarray | float,  # one for each round, if times were measured
    bound: float,
    *,
    at_least: bool = False,  # else at most
) -> Verdict:
    """Return whether a figure is within its limit."""
    low, median, high = quartiles(found)
    must = f"at most {bound:g}"
    ok = median <= bound
    if at_least:
        must = f"at least {bound:g}"
        ok = median >= bound
    return Verdict(what, must, [low, median, high], ok)


def quartiles(values: np.ndarray | Sequence[float] | float) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return [float(each) for each in np.percentile(values, (25, 50, 75))]


def ratios(rows: Sequence[Row], ratio: Ratio, case: str) -> np.ndarray | None:
    """Return the ratio of each round; None where the case or the peer was not measured.

    Ratios are taken round by round, since a shared machine changes within seconds.
    """
    ms = {row["name"]: np.array(row["ms"]) for row in rows}
    if case not in ms or ratio.peer not in ms:
        return None
    over: np.ndarray = ms[case] / ms[ratio.peer]
    if ratio.inverse:
        return 1 / over
    return over


def show(
    title: str,
    rows: Sequence[Row],
    columns: Iterable[Ratio],
    limits: Iterable[Limit] = (),
) -> None:
    """Print the table of a measurement, and that of its limits."""
    measured = [row["name"] for row in rows]
    columns = [column for column in columns if column.peer in measured]
    heads = [column.title for column in columns]
    table = []
    for row in rows:
        low, median, high = quartiles(row["ms"])
        cells = [row["name"], f"{median:.3f}", f"{low:.3f} - {high:.3f}"]
        for column in columns:
            found: Any = ratios(rows, column, row["name"])
            cells.append(f"{np.median(found):.3f}")
        if not row["right"]:
            cells[0] += ": WRONG"
        table.append(cells)
    show_table(title, ["case", "ms", "quartiles", *heads], table)
    show_verdicts([verdict for limit in limits for verdict in limit.judge(rows)])


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print the table of limits, if there are any."""
    table = []
    for limit, must, (low, median, high), ok in verdicts:
        said = "not"
        if ok:
            said = "ok"
        table.append([limit, must, f"{median:.3f}", f"{low:.3f} - {high:.3f}", said])
    if table:
        show_table("", ["limit", "must be", "median", "quartiles", "is"], table)


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table whose first column holds names."""
    print_table(title, columns, rows, make_console(), columns[:1])


def are_right(rows: Iterable[Row]) -> bool:
    """Return whether all results were."""
    return all(row["right"] for row in rows)


def environment(comm: MPI.Intracomm, rounds: int) -> dict[str, Any]:
    """Return when and on what it was measured (collective)."""
    library = MPI.Get_library_version().replace("Version:", "")
    versions = {name: version(name) for name in PACKAGES}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {
            "Python": platform.python_version(),
            "MPI": " ".join(re.split("[,\n]", library)[0].split()),
            **versions,
        },
        "hosts": comm.allgather(MPI.Get_processor_name()),
        "rounds": rounds,
    }


def _machine() -> str:
    """Return system and processor, such as "Linux x86_64, Intel(R) Xeon(R) Processor"."""
    text = Path("/proc/cpuinfo").read_text()
    names = re.findall(r"model name\s*: (.+)", text)
    return ", ".join([f"{platform.system()} {platform.machine()}", *names[:1]])


def headline(found: dict[str, Any]) -> None:
    """Print when and on what it was measured; see `environment`."""
    versions = ", ".join(f"{name} {each}" for name, each in found["versions"].items())
    print(f"{len(found['hosts'])} ranks, {found['rounds']} rounds, {found['date']}")
    print(f"{found['machine']}, {versions}", flush=True)


def save(document: Any, file: Path | None) -> None:
    """Write what was found to a file, if one was named."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(file, flush=True)


def draw(
    title: str, groups: dict[str, Sequence[Row]], ratio: Ratio, file: Path
) -> None:
    """Draw a ratio of all cases, with quartiles, as bars of some groups of them."""
    from matplotlib.figure import Figure

    # Not the peer, whose ratio is 1; each once, in order.
    found = [row["name"] for rows in groups.values() for row in rows]
    names = [name for name in dict.fromkeys(found) if name != ratio.peer]
    figure = Figure((2 + 2.2 * max(2, len(groups)), 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", color="#444444")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        left = (place - (len(names) - 1) / 2) * width
        bars = {}
        for group, rows in enumerate(groups.values()):
            values = ratios(rows, ratio, name)
            if values is not None:
                bars[group + left] = quartiles(values)
        low, middle, high = np.transpose([*bars.values()])
        error = [middle - low, high - middle]
        axes.bar([*bars], middle, width, yerr=error, label=name, capsize=2)
    labels = [name.replace(", ", ",\n") for name in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_ylabel(ratio.title)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    print(file, flush=True)
