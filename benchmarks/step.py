"""Times training steps, end to end: how much of a step the exchange of gradients takes.

    python benchmarks/step.py            on this machine
    python benchmarks/step.py --hosts    over two hosts of one rank, joined by a slow link

Every way to exchange gradients trains a copy of the same model, in turn, round after
round. A round in which a step without exchange was slower than usual is thrown out and
counted: something else wanted the machine. *Efficiency* is a step without exchange over
a step, the median over rounds; *floor* is raw packing into shared memory. Exits 1 where
ranks end with different weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jobs
import step_names
from jobs import RESULT

RANKS_OF_HOSTS = {"alpha": 1, "beta": 1}


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--hosts", action="store_true", help="two hosts, made of namespaces"
    )
    parser.add_argument(
        "--rate", default="1gbit", help="what each host may send (1gbit)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="on this machine (2)")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="of step_names.py (all)"
    )
    parser.add_argument(
        "--ways", nargs="+", metavar="NAME", help="of step_names.py (all)"
    )
    parser.add_argument(
        "--rounds", type=int, help="that are timed (60, with --hosts 12)"
    )
    parser.add_argument(
        "--json", type=Path, default=RESULT / "step.json", metavar="FILE"
    )
    parser.add_argument(
        "--plot", type=Path, default=RESULT / "step.png", metavar="FILE"
    )
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds for the whole run"
    )
    args = parser.parse_args()
    if args.rounds is None:
        args.rounds = 12 if args.hosts else 60
    if min(args.rounds, args.ranks) < 1:
        parser.error("--rounds and --ranks must be 1 or more")
    place = "over hosts" if args.hosts else "on one machine"
    known = {
        "model": list(step_names.models_of(args.hosts)),
        "way": step_names.ways_of(args.hosts),
    }
    for kind, names in known.items():
        for name in getattr(args, f"{kind}s") or []:
            if name not in names:
                parser.error(
                    f"no {kind} that is timed {place} is called {name!r}; take of: "
                    + ", ".join(map(repr, names))
                )
    return args


def run(args: argparse.Namespace) -> bool:
    """Measure and report, as a rank (collective); return whether all results were right."""
    import step_report
    import step_ways
    from mpi4py import MPI
    from step_models import Perceptron

    comm = MPI.COMM_WORLD.Dup()
    models = step_names.models_of(args.hosts)
    results: list[dict[str, Any]] = []
    for name in args.models or models:
        perceptron = Perceptron(*models[name])
        results.append(step_ways.measure(comm, name, perceptron, args, args.rounds))
        if comm.rank == 0:
            step_report.show(results[-1])
    right = all(row["right"] for result in results for row in result["ways"])
    if comm.rank == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"ranks": comm.size, "hosts": args.hosts, "models": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        step_report.draw(document, args.plot)
        print(args.json, args.plot, sep="\n", flush=True)
    return right


def main() -> int:
    args = arguments()
    if not args.hosts:
        return jobs.start_and_run(args, args.ranks, run)
    variables = {"OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "120"}
    return jobs.start_on_hosts_and_run(
        args, RANKS_OF_HOSTS, run, ["json", "plot"], variables
    )


if __name__ == "__main__":
    sys.exit(main())
