"""Times `allreduce_grad` of every communicator beside its peers, all in one run.

    python benchmarks/allreduce.py              starts two ranks by itself
    mpiexec -n 4 python benchmarks/allreduce.py

All contestants take turns, round after round, since a shared machine changes within seconds:
a figure is to be compared with its neighbours of the same run, and ratios are taken round by
round before their median.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

RESULT = Path(__file__).resolve().parents[1] / "result"
# Set by the process managers of MPICH and its kin, of Open MPI, and of Slurm's PMIx.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
GRACE_SECONDS = 5.0  # between the stacks and the end, for every rank to print its own


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start (2)")
    parser.add_argument("--repeat", type=int, default=None, help="rounds for each model (30)")
    parser.add_argument("--communicator", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--quick", action="store_true", help="small models, 3 rounds")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="keep other work off the ranks' cores during each call; needs root, and no more "
        "ranks than cores",
    )
    parser.add_argument("--json", type=Path, default=RESULT / "allreduce.json", metavar="FILE")
    parser.add_argument("--plot", type=Path, default=RESULT / "allreduce.png", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the whole run")
    args = parser.parse_args()
    args.repeat = args.repeat or (3 if args.quick else 30)
    return args


def launch(args: argparse.Namespace) -> int:
    """Run this script on ``args.ranks`` ranks; return mpiexec's exit status."""
    beside = Path(sys.executable).with_name("mpiexec")  # the one that MPI's wheel brought
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("no mpiexec found: install one, such as `pip install mpich`")
    command = [mpiexec, "-n", str(args.ranks), sys.executable, *sys.argv]
    # The ranks can't know: MPICH gives them a pipe in any case, Open MPI a terminal.
    colour = {"FORCE_COLOR": "1"} if sys.stdout.isatty() else {"TERM": "dumb"}
    process = subprocess.Popen(command, env=os.environ | dict.fromkeys(THREADS, "1") | colour)
    try:
        return process.wait(args.timeout + 2 * GRACE_SECONDS)
    finally:  # the ranks end by themselves; this is for an mpiexec that doesn't
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()


def end_after(seconds: float) -> None:
    """Print this rank's stacks after so many seconds and end the job."""
    faulthandler.dump_traceback_later(seconds)
    timer = threading.Timer(seconds + GRACE_SECONDS, os._exit, (124,))
    timer.daemon = True
    timer.start()


def main() -> int:
    args = arguments()
    if not any(variable in os.environ for variable in RANK_VARIABLES):
        return launch(args)
    end_after(args.timeout)
    for variable in THREADS:
        os.environ.setdefault(variable, "1")  # before NumPy loads its BLAS
    from measure import run

    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
