"""Times `allreduce_grad` of every communicator beside its peers, all in one run.

    python benchmarks/allreduce.py              starts two ranks by itself, and then four
    mpiexec -n 3 python benchmarks/allreduce.py

The gradients are those of some models and, for time against bytes, single arrays.

All cases take turns, round after round, since a shared machine changes within seconds:
a figure is to be compared with its neighbours of the same run, and ratios are taken
round by round before their median.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jobs
from jobs import RESULT


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 4],
        metavar="N",
        help="ranks to start, one number after the other (2 4); all but the first take the mean "
        "of models only, and their files have the number in their names",
    )
    parser.add_argument("--only", choices=("models", "sizes"), help="default: both")
    parser.add_argument(
        "--repeat", type=int, default=None, help="rounds for each model (30)"
    )
    parser.add_argument(
        "--communicator", nargs="+", metavar="NAME", help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="small models, 3 rounds")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="keep other work off the ranks' cores during each call; needs root, and is left "
        "out where there are more ranks than cores",
    )
    parser.add_argument(
        "--json", type=Path, default=RESULT / "allreduce.json", metavar="FILE"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=RESULT / "allreduce.png",
        metavar="FILE",
        help="of the models; time against bytes goes to one of that name with -sizes",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=400,
        help="seconds for each number of ranks (400)",
    )
    args = parser.parse_args()
    args.repeat = args.repeat or (3 if args.quick else 30)
    return args


def launch(args: argparse.Namespace) -> int:
    """Run this script on each number of ranks; return mpiexec's first bad exit status."""
    status = jobs.start(args.ranks[0], [], args.timeout)
    for ranks in args.ranks[1:] if args.only != "sizes" else []:
        files = [
            word
            for option in ("json", "plot")
            for word in (f"--{option}", str(beside(getattr(args, option), ranks)))
        ]
        status = jobs.start(ranks, ["--only", "models", *files], args.timeout) or status
    return status


def beside(file: Path, addition: object) -> Path:
    """A file of nearly the same name, such as result/allreduce-4.json."""
    return file.with_stem(f"{file.stem}-{addition}")


def run(args: argparse.Namespace) -> bool:
    import ranks

    return ranks.run(args)


def main() -> int:
    args = arguments()
    return jobs.run_as_rank(args, run) if jobs.is_rank() else launch(args)


if __name__ == "__main__":
    sys.exit(main())
