"""Times `allreduce_grad` of every communicator beside its peers, all in one run.

    python benchmarks/allreduce.py              starts two ranks by itself, and then four
    mpiexec -n 3 python benchmarks/allreduce.py

The gradients are those of some models and, for time against bytes, single arrays.

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
import signal
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
    parser.add_argument("--repeat", type=int, default=None, help="rounds for each model (30)")
    parser.add_argument("--communicator", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--quick", action="store_true", help="small models, 3 rounds")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="keep other work off the ranks' cores during each call; needs root, and is left "
        "out where there are more ranks than cores",
    )
    parser.add_argument("--json", type=Path, default=RESULT / "allreduce.json", metavar="FILE")
    parser.add_argument(
        "--plot",
        type=Path,
        default=RESULT / "allreduce.png",
        metavar="FILE",
        help="of the models; time against bytes goes to one of that name with -sizes",
    )
    parser.add_argument(
        "--timeout", type=float, default=400, help="seconds for each number of ranks (400)"
    )
    args = parser.parse_args()
    args.repeat = args.repeat or (3 if args.quick else 30)
    return args


def launch(args: argparse.Namespace) -> int:
    """Run this script on each number of ranks; return mpiexec's first bad exit status."""
    status = start(args.ranks[0], [], args.timeout)
    for ranks in args.ranks[1:] if args.only != "sizes" else []:
        files = [
            word
            for option in ("json", "plot")
            for word in (f"--{option}", str(beside(getattr(args, option), ranks)))
        ]
        status = start(ranks, ["--only", "models", *files], args.timeout) or status
    return status


def beside(file: Path, addition: object) -> Path:
    """A file of nearly the same name, such as result/allreduce-4.json."""
    return file.with_stem(f"{file.stem}-{addition}")


def start(ranks: int, arguments: list[str], timeout: float) -> int:
    """Run this script on so many ranks, with arguments after its own; return mpiexec's status."""
    from_wheel = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(from_wheel) if from_wheel.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("no mpiexec found: install one, such as `pip install mpich`")
    command = [mpiexec, "-n", str(ranks), sys.executable, *sys.argv, *arguments]
    # The ranks can't know: MPICH gives them a pipe in any case, Open MPI a terminal.
    colour = {"FORCE_COLOR": "1"} if sys.stdout.isatty() else {"TERM": "dumb"}
    columns = {"COLUMNS": str(max(110, shutil.get_terminal_size().columns))}
    environment = os.environ | dict.fromkeys(THREADS, "1") | colour | columns
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait(timeout + 2 * GRACE_SECONDS)
    finally:  # the ranks end by themselves; this is for an mpiexec that doesn't
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()


def end_after(seconds: float) -> None:
    """Print this rank's stacks after so many seconds and end the job."""
    # By a signal: a thread that reads the main one's frames while that runs on may crash.
    faulthandler.register(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, seconds)
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
    from ranks import run

    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
