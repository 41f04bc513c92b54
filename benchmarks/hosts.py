"""Times the mean of gradients over hosts, joined by a slow link, beside what that allows.

    python benchmarks/hosts.py           ResNet-50 over two hosts of two ranks
    python benchmarks/hosts.py --many    over 2, 4 and 8 hosts of one rank, beside MPI_Allreduce

The hosts are namespaces of this machine (`tests/support/hosts/virtual_hosts.py`), so it
needs root, iproute2 and openssh-server. All cases take turns, round after round, and
ratios are taken round by round. The link's limit is measured among them: two ranks that
swap the model's bytes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import peers
import runner
from mpi4py import MPI
from peers import BUNDLED, LINK, MODELS, RAW, REPRODUCIBLE, RESNET
from report import (
    Limit,
    Ratio,
    are_right,
    environment,
    headline,
    save,
    show,
)
from runner import RESULT, Row, measure

STREAMS = ("two_dimensional", "hierarchical")
FLOAT16 = {name: f"{name}, float16" for name in STREAMS}
NAMES = ("naive", "flat", *STREAMS, REPRODUCIBLE, *FLOAT16.values())
MANY = (2, 4, 8)  # of these hosts:
HOSTS = [f"host{number}" for number in range(1, 9)]
MANY_NAMES = ("flat", "hierarchical")
# At least this part of what the link allows; float16 so many times as fast as float32.
OF_THE_LINK = 0.90
FLOAT16_FASTER = 1.8
LIMITS = [
    *(Limit(name, LINK, OF_THE_LINK, faster=True) for name in STREAMS),
    *(Limit(FLOAT16[name], name, FLOAT16_FASTER, faster=True) for name in STREAMS),
]
# A mean over hosts of one rank takes at most so many times what MPI's own sum takes.
OVER_MPI = 1.0
COLUMNS = (Ratio("x link", LINK), Ratio("x bundled", BUNDLED), Ratio(f"x {RAW}", RAW))


def arguments() -> argparse.Namespace:
    json = RESULT / "hosts.json"
    parser = runner.parser(
        __doc__, rounds=9, ranks=(), json=json, model=RESNET, models=MODELS
    )
    add = parser.add_argument
    add("--many", action="store_true", help="2, 4 and 8 hosts of one rank")
    add("--rate", default="1gbit", help="what each host may send (1gbit)")
    add("--burst", default="256kb", help="what may be sent faster (256kb)")
    return parser.parse_args()


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure, and have rank 0 report (collective); return whether all results were right."""
    gradients = peers.Gradients(MODELS[args.model], comm)
    names = NAMES
    limits = LIMITS
    cases = [peers.raw_mpi(gradients)]
    if args.many:
        names = MANY_NAMES
        limits = [Limit(name, RAW, OVER_MPI) for name in names]
    else:
        communicator = peers.bundled(comm)
        cases = [peers.link(gradients), *cases, *peers.gloo(gradients)]
        cases.append(peers.mean(BUNDLED, communicator, gradients, "bundled"))
    communicators = [peers.ours(name, comm) for name in names]
    for name, each in zip(names, communicators, strict=True):
        cases.append(peers.mean(name, each, gradients))
    rows = measure(comm, cases, args.rounds)
    for each in communicators:
        each.finalize()
    found = environment(comm, args.rounds)
    if comm.rank == 0:
        headline(found)
        show(f"{args.model} over links of {args.rate}", rows, COLUMNS, limits)
        if not args.many:
            save(found | document(args, gradients, rows), args.json)
    return are_right(rows)


def document(
    args: argparse.Namespace, gradients: peers.Gradients, rows: list[Row]
) -> dict[str, Any]:
    """Return what `docs/figures/communicators.py` reads."""
    (link,) = (row for row in rows if row["name"] == LINK)
    bits = 8 * gradients.source.nbytes
    return {
        "rate": args.rate,
        "model": args.model,
        "floats": gradients.source.size,
        "megabits": round(bits / link["median_ms"] / 1e3, 1),
        "cases": rows,
    }


def main() -> int:
    args = arguments()
    jobs = [{"alpha": 2, "beta": 2}]
    if args.many:
        jobs = [dict.fromkeys(HOSTS[:hosts], 1) for hosts in MANY]
    return runner.main_on_hosts(args, run, jobs, ["json"])


if __name__ == "__main__":
    sys.exit(main())
