"""The long part of the chaos suite, on hosts made of namespaces.

    python -m tests.chaos [--runs 200] [--seed 0]

Each run has a seed, from the one that is given on, and `--runs 1 --seed S` repeats it
alone. Those of even seeds have a second job, whose ranks get on beside monitors that
don't. Ends with status 1 when a figure of the table misses.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.support.hosts.virtual_hosts import Cluster, missing

from .faults import draw
from .monitors import disturbed
from .runs import HOSTS
from .trials import BESIDE, Trial, Trials, figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if lacking := missing():
        sys.exit(f"no hosts can be made here: {lacking}")
    found: list[Trial] = []
    begun = time.monotonic()
    with Cluster(HOSTS) as cluster:
        trials = Trials(cluster)
        for seed in range(options.seed, options.seed + options.runs):
            trial = trials.run(draw(seed))
            print(trial.case, trial.seconds, flush=True)
            if seed % 2 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    wrong, done = disturbed(cluster, Path(folder), seed)
                print(f"monitors: {', '.join(done)}", flush=True)
                if wrong:
                    trial.wrongs[BESIDE] = wrong
            if trial.wrongs:
                print(f"{trial}\nRepeat it by --runs 1 --seed {seed}", flush=True)
            found.append(trial)
    late = sum(not trial.happened for trial in found)
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{len(found)} runs, of which {late} ended before their fault came, in")
    print(f"{minutes:.0f} min. Python {platform.python_version()}, numpy")
    print(f"{version('numpy')}, mpi4py {version('mpi4py')}, {os.cpu_count()} cores.\n")
    print("| figure | was | at most | |\n|---|---|---|---|")
    rows = figures(found)
    for row in rows:
        verdict = "holds" if row.holds else "MISSED"
        print(f"| {row.name} | {row.was} | {row.most} | {verdict} |", flush=True)
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
