"""What the pictures of the manual are drawn with: frames for ranks, boxes in them, arrows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

# The same bytes whenever a script is run again, and letters that stay letters.
plt.rcParams.update(
    {"svg.hashsalt": "chainermn", "svg.fonttype": "none", "font.size": 10}
)
plt.switch_backend("svg")

HERE = Path(__file__).parent
# Okabe and Ito's, which all eyes tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#6b7280"


def sheet(width: float, height: float) -> tuple[Any, Any]:
    """A white sheet of so many inches, whose unit is the inch."""
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Any, x: float, y: float, text: str, color: str, width: float = 1.5
) -> None:
    """A box around `text`, its centre at (x, y)."""
    height = 0.34
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=color + "22",
            edgecolor=color,
        )
    )
    axes.text(x, y, text, ha="center", va="center")


def frame(
    axes: Any, x: float, y: float, width: float, height: float, title: str
) -> None:
    """A pale frame with its corner at (x, y): a rank, or a node."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor="#f3f4f6",
            edgecolor="#c5c9d0",
            zorder=0,
        )
    )
    axes.text(x + 0.12, y + height - 0.14, title, va="top", fontweight="bold")


def arrow(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = GREY,
    **how: Any,
) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": color,
            "shrinkA": 0,
            "shrinkB": 0,
            **how,
        },
    )


def label(
    axes: Any, x: float, y: float, text: str, color: str = GREY, **how: Any
) -> None:
    axes.text(
        x,
        y,
        text,
        **{"ha": "center", "va": "center", "color": color, "fontsize": 9, **how},
    )


def save(figure: Any, name: str) -> None:
    """Write docs/figures/NAME.svg."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    plt.close(figure)
