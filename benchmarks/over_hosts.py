"""Measures the mean of gradients over two hosts on this rank, beside what the link allows."""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

import hosts_report
import numpy as np
import peers
from gradients import Gradients, source_of
from hosts_report import STREAMS, alone, as_float16
from measure import WARM_UP_CALLS, measure
from mpi4py import MPI
from peers import LINK, Case
from report import of_sizes
from shapes import MODELS, SIZES, elements

from chainermn_comm import create_communicator
from chainermn_comm.messaging import Handshake, ProcessGroup
from chainermn_comm.sums import Operand
from chainermn_comm.sums.shared_memory import Stage
from chainermn_comm.sums.two_level import TwoLevelAllreduce
from chainermn_comm.topology import Topology

# float16 rounds 2^13 times as coarsely as float32.
COARSER = 2.0**13
# Arrays from so many bytes on have their turn so many times less often, and are warmed
# up once: a call for the largest takes seconds, and the link's part of it doesn't vary.
LESS_OFTEN = {4 << 20: 3, 256 << 20: 9}
PIECE, PIECES = 1 << 18, 4  # float32s in a message, and messages under way each way


def run(args: argparse.Namespace) -> bool:
    """Measure, and have rank 0 report (collective over MPI.COMM_WORLD).

    Returns:
        Whether all results were right.
    """
    comm = MPI.COMM_WORLD.Dup()
    gradients = Gradients(MODELS[args.model], comm)
    communicators: list[tuple[str, str, Any]] = [
        (peers.BUNDLED, "bundled", peers.bundled(comm)),
        *[
            (name, "ours", peers.ours(name, comm))
            for name in ("naive", "flat", *STREAMS, peers.REPRODUCIBLE)
        ],
        *[
            (as_float16(name), "ours", create_communicator(name, comm, "float16"))
            for name in STREAMS
        ],
    ]
    streams = {name: wire_alone(comm, name) for name in STREAMS}
    cases = [link(gradients), peers.raw_mpi(gradients), *peers.gloo(gradients)]
    for name, kind, communicator in communicators:
        like = gradients
        if name.endswith("float16"):
            like = copy.copy(gradients)
            like.bound = gradients.bound * COARSER
        cases.append(peers.communicator(name, kind, communicator, like))
    cases += [moved(name, stream, gradients) for name, stream in streams.items()]
    rows = measure(cases, comm, args.repeat, realtime=False)
    hosts = comm.allgather(MPI.Get_processor_name())
    floats = elements(MODELS[args.model])
    results = hosts_report.document(
        hosts, args.rate, args.model, floats, args.repeat, rows
    )
    if comm.rank == 0:
        hosts_report.publish(results, args.json, args.plot)
    sizes = [size(nbytes, comm, communicators, args.repeat) for nbytes in SIZES]
    if comm.rank == 0:
        hosts_report.publish_sizes(results | of_sizes(sizes), args.json, args.plot)
    for stream in streams.values():
        stream.close()
    for _, _, communicator in communicators:
        communicator.finalize()
    return all(
        row["right"]
        for part in (rows, *(one["cases"] for one in sizes))
        for row in part
    )


def size(
    nbytes: int,
    comm: MPI.Intracomm,
    communicators: list[tuple[str, str, Any]],
    rounds: int,
) -> dict[str, Any]:
    """Measure all that move a gradient of so many bytes in its own dtype (collective)."""
    gradients = Gradients({"array": (nbytes // 4,)}, comm)
    cases = [link(gradients), peers.raw_mpi(gradients), *peers.gloo(gradients)]
    cases += [
        peers.communicator(name, kind, communicator, gradients)
        for name, kind, communicator in communicators
        if not name.endswith("float16")
    ]
    less = max(
        [times for least, times in LESS_OFTEN.items() if nbytes >= least], default=1
    )
    warm_up = WARM_UP_CALLS if less == 1 else 1
    rows = measure(cases, comm, -(-rounds // less), realtime=False, warm_up=warm_up)
    return {"bytes": nbytes, "cases": rows}


def link(gradients: Gradients) -> Case:
    """The first ranks of two hosts swap a model's bytes: what any mean has to move."""
    comm = gradients.comm
    leaders = [Topology.discover(comm).nodes.index(node) for node in range(2)]
    flat, source = gradients.flat, gradients.source
    mine = comm.rank in leaders
    peer = leaders[1 - leaders.index(comm.rank)] if mine else MPI.PROC_NULL
    expected = source_of(gradients.shapes, peer) if mine else source

    def right() -> bool:
        return bool(
            comm.allreduce(not mine or np.array_equal(flat, expected), MPI.LAND)
        )

    def swap() -> None:
        # In pieces, several under way: of one message, MPICH may send the two ways in
        # turn.
        requests: list[MPI.Request] = []
        for start in range(0, flat.size if mine else 0, PIECE):
            if len(requests) >= 2 * PIECES:
                MPI.Request.Waitall(requests[:2])
                del requests[:2]
            piece = slice(start, start + PIECE)
            requests += [comm.Irecv(flat[piece], peer), comm.Isend(source[piece], peer)]
        MPI.Request.Waitall(requests)

    return Case(LINK, "copy", lambda: flat.fill(0), swap, right)


class WireAlone(TwoLevelAllreduce):
    """The messages of a stream between nodes, and their sums: ranks of a node copy nothing."""

    def _stages(self, nbytes: int) -> list[Stage]:
        begin, *_, last = super()._stages(nbytes)
        return [begin, last._replace(work=self._pack)]

    def _pack(self, *_: Any) -> None:
        pass


def wire_alone(comm: MPI.Intracomm, name: str) -> WireAlone:
    """The messages of a communicator's stream (collective)."""
    topology = Topology.discover(comm)
    leaders = (
        min(map(topology.nodes.count, topology.nodes))
        if name == "two_dimensional"
        else 1
    )
    group = ProcessGroup(comm, Handshake(comm), 0, topology, lambda: None)
    return WireAlone(group, leaders)


def moved(name: str, stream: WireAlone, gradients: Gradients) -> Case:
    """The messages that this communicator would send for these gradients."""
    grads = gradients.grads
    move = partial(
        stream.allreduce, Operand(grads, grads, [grad.dtype for grad in grads])
    )
    # What it receives is of no use; that it took all the messages is in its schedule.
    return Case(alone(name), "copy", gradients.restore, move, lambda: True)
