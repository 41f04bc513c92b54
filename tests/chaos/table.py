"""The figures that the project promises, from what trials saw."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from .trials import Trial

DEATH_SECONDS, REPORT_SECONDS, NAMED_SHARE = 5.0, 3.0, 0.98
# 20 for the silence to be no hiccup; then the monitor's, the launcher's and MPI's own ends.
CUT_SECONDS = 40.0


@dataclass(frozen=True)
class Row:
    """A figure, what it was, what it must be, and whether it is."""

    figure: str
    was: str
    must: str
    holds: bool


def rows(trials: Sequence[Trial]) -> list[Row]:
    """The figures of these trials."""
    left = sum(len(trial.left) for trial in trials)
    lost = sum(bool(trial.lost) for trial in trials)
    trials = [trial for trial in trials if trial.happened]
    ended = sum(trial.ended for trial in trials)
    named = sum(not trial.misnamed for trial in trials)
    deaths = [each for trial in trials if (each := trial.death_seconds) is not None]
    reports = [each for trial in trials if (each := trial.report_seconds) is not None]
    cuts = [each for trial in trials if (each := trial.cut_seconds) is not None]
    longest, slowest = max(deaths, default=0.0), max(reports, default=0.0)
    last = max(cuts, default=0.0)
    number = len(trials)
    return [
        Row(
            "jobs that end by themselves, non-zero", f"{ended} of {number}", "all", ended == number
        ),
        Row(
            "time from a rank's death to the end of the job",
            f"at most {longest:.2f} s ({_median(deaths)}, {len(deaths)} deaths)",
            f"at most {DEATH_SECONDS:g} s",
            longest <= DEATH_SECONDS,
        ),
        Row(
            "time from a stall's time-out to the report",
            f"at most {slowest:.2f} s ({_median(reports)}, {len(reports)} stalls)",
            f"at most {REPORT_SECONDS:g} s",
            slowest <= REPORT_SECONDS,
        ),
        Row(
            "time from the cut of a link to the end of the job",
            f"at most {last:.2f} s ({_median(cuts)}, {len(cuts)} cuts)",
            f"at most {CUT_SECONDS:g} s",
            last <= CUT_SECONDS,
        ),
        Row(
            "reports that name the right rank and operation",
            f"{named} of {number} ({named / max(1, number):.1%})",
            f"at least {NAMED_SHARE:.0%}",
            named >= NAMED_SHARE * number,
        ),
        Row("left-over processes, segments, files", str(left), "0", left == 0),
        Row("committed checkpoints lost or resumed wrong", str(lost), "0", lost == 0),
    ]


def text(found: Sequence[Row]) -> str:
    """As a table in Markdown."""
    lines = ["| figure | was | must be | |", "|---|---|---|---|"]
    lines += [
        f"| {row.figure} | {row.was} | {row.must} | {'holds' if row.holds else 'MISSED'} |"
        for row in found
    ]
    return "\n".join(lines)


def ground(trials: Sequence[Trial]) -> str:
    """On what they ran."""
    loads = sorted(trial.load for trial in trials) or [0.0]
    names = ("numpy", "chainer", "mpi4py")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"Python {platform.python_version()}, {versions}, {os.cpu_count()} cores; load per core "
        f"{loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}"
    )


def _median(seconds: Sequence[float]) -> str:
    return f"median {sorted(seconds)[len(seconds) // 2]:.2f} s" if seconds else "none"
