"""Times the mean of 102 MB over 2, 4 and 8 hosts, and measures what `scaling.py` calculates with.

    python benchmarks/scaling_hosts.py

The hosts are namespaces of this machine (`tests/support/hosts/virtual_hosts.py`), so it needs
root, iproute2 and openssh-server. Each has one rank, but for the first job, of two
hosts of two ranks, which measures latency, bandwidth, and what messages, arithmetic and
barriers take. All cases of a job take turns, and ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import jobs
from jobs import RESULT

JSON = RESULT / "scaling-hosts.json"


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument(
        "--rate", default="1gbit", help="what each host may send (1gbit)"
    )
    parser.add_argument(
        "--bytes", type=int, default=102_228_128, help="of the gradient"
    )
    parser.add_argument("--repeat", type=int, default=7, help="rounds (7)")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE")
    parser.add_argument(
        "--timeout", type=float, default=500, help="seconds for each job"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if jobs.ON_HOSTS not in os.environ:
        args.json.unlink(missing_ok=True)
    for hosts, ranks in [(2, 2), *((hosts, 1) for hosts in args.hosts)]:
        names = {f"host{number}": ranks for number in range(1, hosts + 1)}
        text = {"TERM": "dumb", "COLUMNS": "110"}
        status = jobs.start_on_hosts_and_run(args, names, run, ["json"], text)
        if status or jobs.ON_HOSTS in os.environ:
            return status
    return 0


def run(args: argparse.Namespace) -> bool:
    """Measure on this rank, and have rank 0 report (collective over MPI.COMM_WORLD)."""
    from mpi4py import MPI
    from over_many_hosts import constants, means

    comm = MPI.COMM_WORLD.Dup()
    on_node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    found: dict[str, Any]
    if on_node.size > 1:
        found = {"constants": constants(comm, on_node)}
        right = True
    else:
        rows = means(comm, args.bytes, args.repeat)
        found = {"means": {str(comm.size): rows}}
        right = all(row["right"] for row in rows)
    if comm.rank == 0:
        save(args, found)
    return right


def save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Add what was found to the file, and print it."""
    from report import environment

    known: dict[str, Any] = {"means": {}}
    if args.json.exists():
        known = json.loads(args.json.read_text())
    known |= {
        "rate": args.rate,
        "bytes": args.bytes,
        "rounds": args.repeat,
        **environment(),
    }
    known["means"] |= found.get("means", {})
    known |= {"constants": found["constants"]} if "constants" in found else {}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(known, indent=1))
    for name, value in found.get("constants", {}).items():
        print(f"{name}: {value:.3g}")
    for hosts, rows in found.get("means", {}).items():
        for row in rows:
            low, mid, high = row["over_mpi"]
            print(
                f"{hosts} hosts, {row['name']}: {row['median_ms']:.0f} ms, {mid:.3f} times that "
                f"of MPI_Allreduce (quartiles {low:.3f} and {high:.3f}), "
                f"{'right' if row['right'] else 'WRONG'}"
            )


if __name__ == "__main__":
    sys.exit(main())
