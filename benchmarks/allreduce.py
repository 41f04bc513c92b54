"""Times `allreduce_grad` of every communicator beside its peers, all in one run.

    python benchmarks/allreduce.py              starts two ranks by itself, and then four
    mpiexec -n 3 python benchmarks/allreduce.py

The gradients are those of some models, and single arrays. All cases take turns, round
after round, since a shared machine changes within seconds: a figure is to be compared
with its neighbours of the same run, and ratios are taken round by round before their
median. Exits 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import peers
import runner
from mpi4py import MPI
from peers import BUNDLED, DIGITS, GLOO, HANDOFF, HANDSHAKE, MODELS, RESNET, TINY
from report import Limit, Ratio, are_right, environment, headline, save, show
from runner import Case, measure

from chainermn_comm import create_communicator
from chainermn_comm.config import NAMES

IDLE = "dummy"  # does all that the others do before gradients move
MEASURED = [name for name in NAMES if name not in ("pure_nccl", IDLE)]
MEASURED.append(peers.REPRODUCIBLE)
COLUMNS = (Ratio("x handoff", HANDOFF), Ratio("x bundled", BUNDLED))
# How fast communicators must be on a model, by the number of ranks on one machine.
IN_A_NODE = ("hierarchical", "single_node")  # both move gradients by the same means
LIMITS: dict[tuple[str, int], list[Limit]] = {
    (RESNET, 2): [
        *(Limit(name, HANDOFF, 1.25) for name in IN_A_NODE),
        *(Limit(name, BUNDLED, 1.4, faster=True) for name in IN_A_NODE),
        *(Limit(name, GLOO, 4.5, faster=True) for name in IN_A_NODE),
        Limit(HANDSHAKE, "hierarchical", 0.03),
    ],
    (RESNET, 4): [Limit(name, BUNDLED, 1.3, faster=True) for name in IN_A_NODE],
    (DIGITS, 2): [
        *(Limit(name, BUNDLED, 1.3, faster=True) for name in IN_A_NODE),
        Limit(HANDSHAKE, "hierarchical", 0.1),
    ],
    (TINY, 2): [Limit(name, BUNDLED, 3, faster=True) for name in IN_A_NODE],
}
NAIVE = Limit("naive", BUNDLED, 1)  # of every model, on two ranks


def arguments() -> argparse.Namespace:
    parser = runner.parser(__doc__, rounds=30, ranks=(2, 4))
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=[*MODELS],
        metavar="NAME",
        help=f"of {', '.join(map(repr, MODELS))} (all)",
    )
    return parser.parse_args()


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure what is wanted (collective); return whether all results were right."""
    found: dict[str, Any] = environment(comm, args.rounds)
    if comm.rank == 0:
        headline(found)
    communicators = {
        BUNDLED: peers.bundled(comm),
        IDLE: create_communicator(IDLE, comm),
    }
    for name in MEASURED:
        communicators[name] = peers.ours(name, comm)
    handoff = peers.Handoff(comm)
    found["models"] = {}
    for model in args.models:
        gradients = peers.Gradients(MODELS[model], comm)
        cases = [*peers.copies(gradients), handoff.case(gradients)]
        cases += [peers.raw_mpi(gradients), *peers.gloo(gradients)]
        cases.append(peers.mean(BUNDLED, communicators[BUNDLED], gradients, "bundled"))
        for name in MEASURED:
            cases.append(peers.mean(name, communicators[name], gradients))
        idle = partial(communicators[IDLE].allreduce_grad, gradients.model)
        cases.append(Case(IDLE, idle, gradients.restore))
        cases.append(peers.handshake_alone(gradients))
        rows = measure(comm, cases, args.rounds)
        found["models"][model] = rows
        if comm.rank == 0:
            limits = LIMITS.get((model, comm.size), [])
            if comm.size == 2:
                limits = [NAIVE, *limits]
            megabytes = gradients.source.nbytes / 1e6
            show(f"{model}, {megabytes:.3g} MB", rows, COLUMNS, limits)
    if comm.rank == 0:
        save(found, args.json)
    handoff.close()
    for communicator in communicators.values():
        communicator.finalize()
    return all(map(are_right, found["models"].values()))


if __name__ == "__main__":
    sys.exit(runner.main(arguments(), run))
