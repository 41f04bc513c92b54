"""Runs every case with the `chainermn` that Python finds, and writes what each rank got.

On each of two ranks: ``python -m tests.compatibility.calls FOLDER [CASE ...]``, with
CHAINERMN_USE_BUNDLED=1 for Chainer's own. A line of ``FOLDER/RANK`` is a case's name
and what it gave, in JSON; the last line is the case that the job hung in or died of.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import chainermn
import numpy as np
from mpi4py import MPI

from tests.compatibility.cases import CASES
from tests.compatibility.describing import describe


def result(case):
    """What the case returns or raises, on a communicator that no other case has."""
    comm = chainermn.create_communicator("naive", MPI.COMM_WORLD.Dup())
    np.random.seed(comm.rank)
    random.seed(comm.rank)
    try:
        return describe(case(chainermn, comm))
    except Exception as error:
        return {**describe(error), "text": str(error)[:500]}


def main(folder: str, *names: str):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if os.environ.get("CHAINERMN_USE_BUNDLED") == "1":
        sys.tracebacklimit = 0  # nobody who works here reads its source
    here = Path(folder).resolve()
    with (here / str(MPI.COMM_WORLD.rank)).open("w", buffering=1) as file:
        for name in names or CASES:
            file.write(json.dumps(name))
            with tempfile.TemporaryDirectory() as own:
                os.chdir(own)
                file.write(f"\t{json.dumps(result(CASES[name]))}\n")
                MPI.COMM_WORLD.Barrier()  # a rank may use another one's folder
                os.chdir(here)


if __name__ == "__main__":
    main(*sys.argv[1:])
