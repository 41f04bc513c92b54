"""The table of cases, in the order in which they run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

Case = Callable[..., Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Put it into the table, under the names of its module and its own."""
    CASES[name_of(function)] = function
    return function


def each(*values, **named) -> Callable[[Case], Case]:
    """Put it into the table once for each value, its third argument."""

    def add(function: Case) -> Case:
        for name, value in {**{str(value): value for value in values}, **named}.items():
            CASES[f"{name_of(function)}[{name}]"] = functools.partial(
                given, function, value
            )
        return function

    return add


def together():
    """Let all ranks work in the folder of rank 0."""
    os.chdir(MPI.COMM_WORLD.bcast(os.getcwd()))


def given(function: Case, value, chainermn, comm):
    return function(chainermn, comm, value)


def name_of(function: Case) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def outcome(call: Callable[[], Any]):
    """What it returns, or the error that it raises, for cases of which this is only a part."""
    try:
        return call()
    except Exception as error:
        return error


def of_rank_0(comm, value):
    """What rank 0 gives to a function that takes nothing of the other ranks."""
    if comm.rank == 0:
        return value
    return None
