"""Writes what docs/communicators.md shows of measurements: tables, and pictures of them.

    python docs/figures/communicators.py result/allreduce.json result/allreduce-4.json ...

The files are those that `make bench` and `make bench-hosts` write. The tables take the place of
what stands between the two marks on the page; the pictures are docs/figures/communicators-*.svg.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from parts import BLUE, GREY, HERE, ORANGE, plt, save

PAGE = HERE.parent / "communicators.md"
BEGIN, END = "<!-- measured -->\n", "<!-- until here -->\n"
COLORS = {"ours": BLUE, "bundled": ORANGE, "mpi": "#000000", "copy": GREY}
MEANING = {
    "ours": "this ChainerMN",
    "bundled": "bundled with Chainer 7",
    "mpi": "sum of one buffer",
    "copy": "only moving the bytes",
}
PEERS = {
    "bundled naive": "`naive` of Chainer 7's bundled ChainerMN",
    "PyTorch gloo": "PyTorch's gloo, a sum of one buffer",
    "MPI_Allreduce": "`MPI_Allreduce`, a sum of one buffer",
    "handoff": "*handoff*: each rank only writes its gradients and reads another's",
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
    versions = ", ".join(f"{name} {found}" for name, found in results["versions"].items())
    return (
        f"{results['date'][:10]}; {results['machine']}; {versions}; "
        f"medians of {results['rounds']} rounds"
    )


def table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def of_models(results: dict[str, Any]) -> str:
    """What is said of one machine's ranks; draws the pictures."""
    models = results["models"]
    by_model = [rows(model["cases"]) for model in models]
    header = ["milliseconds"] + [
        f"{model['model']}, {number(model['floats'] * 4e-6)} MB" for model in models
    ]
    body = [
        [label(same[0]), *(number(row["median_ms"]) for row in same)]
        for same in zip(*by_model, strict=True)
    ]
    ranks = results["ranks"]
    names = [draw_models(results, f"communicators-{ranks}-ranks")]
    if "sizes" in results:
        names.append(draw_sizes(results, f"communicators-{ranks}-ranks-sizes"))
    pictures = "".join(
        f"\n![Time of each communicator on {ranks} ranks.](figures/{name}.svg)\n" for name in names
    )
    cores = " and ".join(map(str, results["cores"]))
    return (
        f"### {ranks} ranks on one machine\n\n{table(header, body)}{pictures}\n"
        f"*{cores} cores{', at real-time priority' if results['realtime'] else ''}; "
        f"{circumstances(results)}.*\n\n"
    )


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
    header = [f"milliseconds for {results['model']}, {size} MB", "float32", "float16 on the wire"]
    return (
        f"### {len(hosts)} ranks on {len(set(hosts))} hosts\n\n{table(header, body)}\n"
        f"*Network namespaces of one machine, joined by links of {results['rate']}, which carried "
        f"{results['megabits']:g} Mbit/s each way; {circumstances(results)}.*\n\n"
    )


def draw_models(results: dict[str, Any], name: str) -> str:
    models = results["models"]
    count = len(rows(models[0]["cases"]))
    height = len(models) * (0.7 + 0.21 * count)
    # One below the other, and narrow: so they can be read on a telephone, too.
    figure, panels = plt.subplots(
        len(models), 1, figsize=(5.4, height), squeeze=False, layout="constrained"
    )
    for axes, model in zip(panels.flat, models, strict=False):
        found = rows(model["cases"])
        for y, row in enumerate(found):
            times, color = sorted(row["ms"]), COLORS[row["kind"]]
            last = len(times) - 1
            quartiles = times[round(0.25 * last)], times[round(0.75 * last)]
            axes.plot(quartiles, (y, y), color=color, lw=5, alpha=0.4, solid_capstyle="butt")
            axes.plot(row["median_ms"], y, "o", color=color, ms=5)
            axes.annotate(
                number(row["median_ms"]),
                (max(quartiles), y),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(count), [row["name"] for row in found], fontsize=9)
        axes.set_ylim(count - 0.4, -0.6)
        most = max(sorted(row["ms"])[round(0.75 * (len(row["ms"]) - 1))] for row in found)
        axes.set_xlim(0, 1.2 * most)
        size = number(model["floats"] * 4e-6)
        axes.set_title(f"{model['model']}, {size} MB", fontsize=10, fontweight="bold", loc="left")
        axes.set_xlabel("milliseconds", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    marks = [
        plt.Line2D([], [], marker="o", ls="", color=COLORS[kind], label=MEANING[kind])
        for kind in ORDER
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, name)
    return name


def draw_sizes(results: dict[str, Any], name: str) -> str:
    """Time against bytes. Where ways are the same in one node, one line stands for all."""
    shown = {
        "hierarchical": (BLUE, "o", "hierarchical, two_dimensional, single_node"),
        "flat": ("#cc79a7", "P", "flat"),
        "naive": ("#e69f00", "^", "naive"),
        "bundled naive": (ORANGE, "s", "bundled naive"),
        "PyTorch gloo": ("#8c5a2b", "D", "PyTorch gloo"),
        "MPI_Allreduce": ("#000000", "v", "MPI_Allreduce"),
        "handoff": (GREY, "", "handoff (the floor)"),
    }
    figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    for case, (color, marker, text) in shown.items():
        points = [
            (size["bytes"], row["median_ms"])
            for size in results["sizes"]
            for row in size["cases"]
            if row["name"] == case
        ]
        if points:
            style = {"marker": marker, "ms": 4} if marker else {"ls": "--"}
            axes.plot(*zip(*points, strict=True), color=color, label=text, lw=1.5, **style)
    sizes = [size["bytes"] for size in results["sizes"]]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [in_units(nbytes) for nbytes in sizes], fontsize=8, rotation=45)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("One array of float32: milliseconds", fontsize=10, fontweight="bold", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    save(figure, name)
    return name


def in_units(nbytes: float) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="+")
    found = [json.loads(file.read_text()) for file in parser.parse_args().file]
    text = "".join(of_models(one) if "models" in one else of_hosts(one) for one in found)
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


if __name__ == "__main__":
    main()
