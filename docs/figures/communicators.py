"""Writes the table of measurements in docs/communicators.md.

    python docs/figures/communicators.py result/hosts.json

`make bench-hosts` writes the file. The table replaces what is between the two marks on
the page.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "communicators.md"
BEGIN, END = "<!-- measured -->\n", "<!-- until here -->\n"
PEERS = {
    "bundled naive": "`naive` of Chainer 7's bundled ChainerMN",
    "PyTorch gloo": "PyTorch's gloo, a sum of one buffer",
    "MPI_Allreduce": "`MPI_Allreduce`, a sum of one buffer",
    "two ranks swap the bytes": "*the link*: two ranks swap the bytes",
}
ORDER = ["ours", "bundled", "mpi", "copy"]


def number(value: float) -> str:
    """Three digits, such as 1,040 or 0.0362."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def rows(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are shown: our communicators, and what they are compared with."""
    shown = [
        row
        for row in cases
        if row["name"] in PEERS or (row["kind"] == "ours" and "," not in row["name"])
    ]
    wrong = [row["name"] for row in shown if not row["right"]]
    if wrong:
        raise SystemExit(f"these gave wrong results: {', '.join(wrong)}")
    return sorted(shown, key=lambda row: ORDER.index(row["kind"]))


def label(row: dict[str, Any]) -> str:
    return PEERS.get(row["name"], f"`{row['name']}`")


def circumstances(results: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {found}" for name, found in results["versions"].items()
    )
    return (
        f"{results['date'][:10]}; {results['machine']}; {versions}; "
        f"medians of {results['rounds']} rounds"
    )


def table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def of_hosts(results: dict[str, Any]) -> str:
    """What is said of ranks on several hosts."""
    found = rows(results["cases"])
    halves = {
        row["name"].removesuffix(", float16"): row["median_ms"]
        for row in results["cases"]
        if row["name"].endswith(", float16")
    }
    body = [
        [
            label(row),
            number(row["median_ms"]),
            number(halves[row["name"]]) if row["name"] in halves else "",
        ]
        for row in found
    ]
    hosts = results["hosts"]
    size = number(results["floats"] * 4e-6)
    header = [
        f"milliseconds for {results['model']}, {size} MB",
        "float32",
        "float16 on the wire",
    ]
    return (
        f"### {len(hosts)} ranks on {len(set(hosts))} hosts\n\n{table(header, body)}\n"
        f"*Network namespaces of one machine, joined by links of {results['rate']}, which carried "
        f"{results['megabits']:g} Mbit/s each way; {circumstances(results)}.*\n\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    text = of_hosts(json.loads(parser.parse_args().file.read_text()))
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


if __name__ == "__main__":
    main()
