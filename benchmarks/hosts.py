"""Times the mean of gradients over two hosts of two ranks, joined by a slow link.

    python benchmarks/hosts.py

The hosts are namespaces of this machine (`tests/cluster/virtual_hosts.py`), so it needs root,
iproute2 and openssh-server. All cases take turns, round after round, and ratios are taken
round by round. The link's limit is measured among them: two ranks that swap the model's bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path

import jobs
from jobs import RESULT

RANKS = {"alpha": 2, "beta": 2}
INSIDE = "CHAINERMN_BENCHMARK_HOSTS"  # set for the ranks


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument("--rate", default="1gbit", help="what each host may send (1gbit)")
    parser.add_argument("--model", default="ResNet-50", metavar="NAME", help="of shapes.py")
    parser.add_argument("--repeat", type=int, default=9, help="rounds (9)")
    parser.add_argument("--json", type=Path, default=RESULT / "hosts.json", metavar="FILE")
    parser.add_argument("--plot", type=Path, default=RESULT / "hosts.png", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=700, help="seconds for the whole run")
    args = parser.parse_args()
    args.json, args.plot = args.json.resolve(), args.plot.resolve()
    return args


def launch(args: argparse.Namespace) -> int:
    """Make the hosts and run this script on their ranks; return mpiexec's exit status."""
    files = ["--json", args.json, "--plot", args.plot]
    environment = {INSIDE: "1", "TERM": "dumb", "COLUMNS": "110"}
    return jobs.start_on_hosts(RANKS, files, environment, args.rate, args.timeout)


def main() -> int:
    args = arguments()
    if INSIDE not in os.environ:
        return launch(args)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # when it has lasted too long
    from over_hosts import run

    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
