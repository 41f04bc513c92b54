"""Times the mean of gradients over two hosts of two ranks, joined by a slow link.

    python benchmarks/hosts.py

The hosts are namespaces of this machine (`tests/cluster/virtual_hosts.py`), so it needs
root, iproute2 and openssh-server. All cases take turns, round after round, and ratios
are taken round by round. The link's limit is measured among them: two ranks that swap
the model's bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jobs
from jobs import RESULT

RANKS = {"alpha": 2, "beta": 2}


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--rate", default="1gbit", help="what each host may send (1gbit)"
    )
    parser.add_argument(
        "--model", default="ResNet-50", metavar="NAME", help="of shapes.py"
    )
    parser.add_argument("--repeat", type=int, default=9, help="rounds (9)")
    parser.add_argument(
        "--json", type=Path, default=RESULT / "hosts.json", metavar="FILE"
    )
    parser.add_argument(
        "--plot", type=Path, default=RESULT / "hosts.png", metavar="FILE"
    )
    parser.add_argument(
        "--timeout", type=float, default=700, help="seconds for the whole run"
    )
    return parser.parse_args()


def run(args: argparse.Namespace) -> bool:
    import over_hosts

    return over_hosts.run(args)


if __name__ == "__main__":
    text = {"TERM": "dumb", "COLUMNS": "110"}
    sys.exit(
        jobs.start_on_hosts_and_run(arguments(), RANKS, run, ["json", "plot"], text)
    )
