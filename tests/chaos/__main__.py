"""The long part of the chaos suite.

    python -m tests.chaos [--runs 200] [--seed 0]

Each run has a seed, from the one that is given on, and `--runs 1 --seed S` repeats it
alone. Those of even seeds have a second job, whose ranks get on beside monitors that
don't. Ends with status 1 when a figure of the table misses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from importlib.metadata import version

from tests.support.hosts.virtual_hosts import Cluster, missing

from .faults import EARLY, ROUND, draw
from .monitors import disturbed
from .runs import Hosts
from .trials import Trial, Trials, figures, made_folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=ROUND)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.runs)
    lacking = missing()
    if lacking:
        print(f"Without hosts, full disks and cut links: {lacking}.", flush=True)
    found: list[Trial] = []
    beside: list[str] = []  # what was wrong beside disturbed monitors
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        hosts = (
            None if lacking else Hosts(stack.enter_context(Cluster(("alpha", "beta"))))
        )
        trials = Trials(hosts)
        for seed in seeds:
            case = draw(seed, hosts is not None)
            if hosts is None and case.kind in ("link", "disk"):
                continue
            trial = trials.run(case, restart=case.moment not in EARLY)
            found.append(trial)
            print(f"{case}: {trial.summary()}", flush=True)
            if trial.wrongs:
                print(
                    f"{trial!r}\nRepeat it: python -m tests.chaos --runs 1 --seed {seed}"
                )
            if hosts and seed % 2 == 0:
                with made_folder() as folder:
                    wrong, disturbance = disturbed(hosts.cluster, folder, seed)
                beside.append(wrong)
                print(
                    f"monitors {', '.join(disturbance.done)}: {wrong or 'well'}",
                    flush=True,
                )
    late = sum(not trial.happened for trial in found)
    print(
        f"\n{len(found)} runs (seeds {seeds[0]} to {seeds[-1]}), of which {late} ended before"
    )
    minutes = (time.monotonic() - begun) / 60
    print(f"their fault came, in {minutes:.0f} min. {ground(found)}.\n")
    rows = figures(found)
    if beside:
        well = beside.count("")
        was = f"{well} of {len(beside)}"
        rows.append(
            (
                "jobs that get on beside disturbed monitors",
                was,
                "all",
                well == len(beside),
            )
        )
    print("| figure | was | must be | |\n|---|---|---|---|")
    for figure, was, must, holds in rows:
        print(
            f"| {figure} | {was} | {must} | {'holds' if holds else 'MISSED'} |",
            flush=True,
        )
    return 0 if all(holds for *_, holds in rows) else 1


def ground(trials: list[Trial]) -> str:
    """On what they ran."""
    loads = sorted(trial.load for trial in trials) or [0.0]
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("numpy", "chainer", "mpi4py")
    )
    return (
        f"Python {platform.python_version()}, {versions}, {os.cpu_count()} cores; load per core "
        f"{loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
