"""Finds a user's mistakes before they cost anything, and tells each once for all ranks."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any, NoReturn

import chainer
import chainermn
from mpi4py import MPI


def program() -> str:
    """The script's name, with which each message begins."""
    return os.path.basename(sys.argv[0])


def stop_all(problem: str) -> NoReturn:
    """End the whole job for a problem that every rank found alike, told once."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"{program()}: {problem}", file=sys.stderr, flush=True)
    MPI.Finalize()  # all ranks end here, so there are none to be aborted
    sys.exit(2)


def create_communicator(args: argparse.Namespace, **options: Any) -> Any:
    """chainermn.create_communicator with ``args.communicator``, on ranks that can do their work.

    The job ends if there is no such name, if a rank has no GPU although ``args.gpu`` asks for one,
    or can't write to ``args.out``, which is made.
    """
    try:
        comm = chainermn.create_communicator(args.communicator, **options)
    except ValueError as error:
        stop_all(str(error))
    stop_if(comm, no_gpu(comm) if args.gpu else None)
    stop_if(comm, not_writable(args.out))
    return comm


def stop_if(comm: Any, problem: str | None) -> None:
    """End the whole job when any rank has a problem, told once (collective).

    Args:
        comm: the communicator.
        problem: what is wrong on this rank, None when nothing is.
    """
    problems = comm.allgather_obj(problem)
    ranks = [rank for rank, each in enumerate(problems) if each]
    if ranks:
        if comm.rank == 0:
            where = "" if len(ranks) == comm.size else f"rank {ranks[0]}: "
            print(f"{program()}: {where}{problems[ranks[0]]}", file=sys.stderr, flush=True)
        comm.bcast_obj(None)  # the end of one rank ends all: rank 0 speaks first
        MPI.Finalize()  # all ranks end here, so there are none to be aborted
        sys.exit(2)


def no_gpu(comm: Any) -> str | None:
    """Why this rank can't have a GPU of its own; None when it can."""
    if not chainer.backends.cuda.available:
        return "--gpu: CuPy is not installed, or finds no CUDA; leave --gpu away to use CPUs"
    try:
        found = chainer.backends.cuda.cupy.cuda.runtime.getDeviceCount()
    except chainer.backends.cuda.cupy.cuda.runtime.CUDARuntimeError:  # there is no driver
        found = 0
    if comm.intra_rank < found:
        return None
    return f"--gpu: rank {comm.intra_rank} of its node needs a GPU; the node has {found}"


def not_writable(folder: str) -> str | None:
    """Why results can't be written to the folder, which is made; None when they can."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"--out {folder}: cannot write there: {error.strerror}"


def too_few(n_train: int, n_test: int, size: int) -> str | None:
    """Why so many ranks can't share the examples; None when they can."""
    if size <= min(n_train, n_test):
        return None
    return f"{size} ranks are too many for {n_train} training and {n_test} test examples"


def too_large(batchsize: int, share: int) -> str | None:
    """Why a batch can't hold more than the rank's examples; None when it doesn't.

    Chainer's iterator would go round them several times for one batch, epochs flying by.
    """
    if batchsize <= share:
        return None
    return f"--batchsize {batchsize}: a rank has {share} training examples; ask for no more"
