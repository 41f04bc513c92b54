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
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import peers
import runner
from mpi4py import MPI
from peers import BUNDLED
from report import Ratio, are_right, draw, environment, headline, save, show
from runner import RESULT, Case, Row, measure, nothing

from chainermn_comm import create_communicator
from chainermn_train import PowerSGD, create_multi_node_optimizer

ALONE = "no exchange"
IN_BLOCKS = "no exchange, in blocks"  # our optimizer's steps, on one rank
BARRIER = "barrier"
RAW = "raw packing"
DUMMY = "dummy"
SYNCHRONOUS = "synchronous"
TRACE_VARIABLE = "CHAINERMN_TRACE"
TRACED = "traced"  # synchronous, with that variable
SHARDED = "sharded"
POWER_SGD = "PowerSGD"
FLOAT16 = "float16"
DDP = "DDP over gloo"
DDP_POWER_SGD = "DDP, PowerSGD"
RANK = 4  # of both
DDP_ZERO = "DDP, ZeRO"  # its ZeroRedundancyOptimizer
# Ours: the arguments of `create_multi_node_optimizer`.
OURS: dict[str, dict[str, Any]] = {
    DUMMY: {"overlap": False},
    SYNCHRONOUS: {"overlap": False},
    TRACED: {"overlap": False},
    "drift ignored": {"overlap": False, "on_drift": "ignore"},
    "double buffering": {"overlap": False, "double_buffering": True},
    "overlapped": {"overlap": True},
    SHARDED: {"sharded": True},
    POWER_SGD: {"compression": PowerSGD(RANK, start_step=0)},
    FLOAT16: {"compression": "float16"},
}
OF_DDP = (DDP, DDP_POWER_SGD, DDP_ZERO)
WAYS = [ALONE, IN_BLOCKS, BARRIER, RAW, BUNDLED, *OURS, *OF_DDP]
# They show what one machine's memory and Python take, which is little beside a link.
ONE_MACHINE_WAYS = (RAW, BUNDLED, DUMMY, TRACED)
# Chainer's optimizers by name, with their arguments.
RULES: dict[str, dict[str, float]] = {
    "SGD": {"lr": 0.01},
    "MomentumSGD": {"lr": 0.01},
    "Adam": {},
}
# Each rank steps along its own gradients.
OWN_WEIGHTS = (ALONE, IN_BLOCKS, BARRIER, RAW, DUMMY)

EFFICIENCY = Ratio("efficiency", ALONE, inverse=True)
COLUMNS = (
    EFFICIENCY,
    Ratio("/ floor", RAW, inverse=True),
    Ratio("/ bundled", BUNDLED, inverse=True),
    Ratio("ms / sync.", SYNCHRONOUS),
    Ratio("ms / DDP", DDP),
    Ratio("ms / DDP, PowerSGD", DDP_POWER_SGD),
    Ratio("ms / DDP, ZeRO", DDP_ZERO),
)
# Each turn lasts about so long, so that a clock and a barrier count little.
TURN_MS = 30.0
LEAST_STEPS = 4
WARM_UP_STEPS = 10
# A round is disturbed if its steps without exchange took so many times their median.
DISTURBED = 1.1


class Model(NamedTuple):
    """A perceptron, and what one rank computes of it in a step."""

    widths: tuple[int, ...]  # of its input, its layers and its output
    batch: int  # examples a rank

    def make(self) -> Any:
        """Return a classifier with the same weights on all ranks."""
        state = np.random.RandomState(0)
        layers: list[Any] = []
        for n_in, n_out in pairwise(self.widths):
            weights = state.normal(0, n_in**-0.5, (n_out, n_in)).astype("f4")
            layers += [L.Linear(n_in, n_out, initialW=weights), F.relu]
        return L.Classifier(chainer.Sequential(*layers[:-1]))

    def examples(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's batch and its labels."""
        state = np.random.RandomState(rank)
        x = state.uniform(0, 1, (self.batch, self.widths[0])).astype("f4")
        return x, state.randint(0, self.widths[-1], self.batch).astype("i4")


ONE_MACHINE_MODELS = {
    "digits": Model((64, 100, 100, 10), 100),
    "u = 200": Model((784, 200, 200, 10), 100),
    "u = 1000": Model((784, 1000, 1000, 10), 100),
    "25 million": Model((784, 4600, 4600, 10), 100),
}
EIGHT_LAYERS = (784, *[1000] * 7, 10)
# 7.2 MB take a link of 1 Gbit/s 60 ms. With 1600 examples computing takes three times
# that.
HOSTS_MODELS = {
    "3 layers, batch 100": Model((784, 1000, 1000, 10), 100),
    "3 layers, batch 1600": Model((784, 1000, 1000, 10), 1600),
    "3 layers, batch 400": Model((784, 1000, 1000, 10), 400),
    "8 layers, batch 400": Model(EIGHT_LAYERS, 400),
    "8 layers, batch 1600": Model(EIGHT_LAYERS, 1600),
}
MODELS = ONE_MACHINE_MODELS | HOSTS_MODELS


def arguments() -> argparse.Namespace:
    parser = runner.parser(__doc__, rounds=60, json=RESULT / "step.json")
    add = parser.add_argument
    add("--hosts", action="store_true", help="two hosts, made of namespaces")
    add("--rate", default="1gbit", help="what each host may send (1gbit)")
    add("--rule", default="SGD", choices=RULES, help="what steps (SGD)")
    add("--burst", default="16kb", help="what may be sent faster (16kb)")
    add("--plot", type=Path, default=RESULT / "step.png", metavar="FILE")
    add("--models", nargs="+", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    add("--ways", nargs="+", choices=WAYS, metavar="NAME", help=", ".join(WAYS))
    args = parser.parse_args()
    if args.models is None:
        args.models = [*ONE_MACHINE_MODELS]
        if args.hosts:
            args.models = [*HOSTS_MODELS]
    if args.ways is None:
        args.ways = WAYS
    if args.hosts:
        args.ways = [way for way in args.ways if way not in ONE_MACHINE_WAYS]
    return args


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure and report (collective); return whether all results were right."""
    found = environment(comm, args.rounds)
    if comm.rank == 0:
        headline(found)
    found["models"] = {}
    for name in args.models:
        rows, disturbed = measure_model(comm, MODELS[name], args)
        found["models"][name] = rows
        if comm.rank == 0:
            widths = "-".join(map(str, MODELS[name].widths))
            size = f"{widths}, batch {MODELS[name].batch}"
            show(f"{name}: {size}; {disturbed} rounds disturbed", rows, COLUMNS)
    if comm.rank == 0:
        save(found, args.json)
        where = "one machine"
        if args.hosts:
            where = "two hosts"
        title = f"Training steps of {comm.size} ranks on {where}"
        draw(title, found["models"], EFFICIENCY, args.plot)
    return all(map(are_right, found["models"].values()))


def measure_model(
    comm: MPI.Intracomm, model: Model, args: argparse.Namespace
) -> tuple[list[Row], int]:
    """Time the steps of all ways; return rows and the number of disturbed rounds."""
    ways = Ways(comm, model, args.rule)
    cases = ways.cases(args.ways)
    for case in cases:
        for _ in range(WARM_UP_STEPS):
            case.call()
        case.finish()
    (alone,) = measure(comm, cases[:1], 3, warm_up=0, in_a_row=1)
    steps = max(LEAST_STEPS, round(TURN_MS / alone["median_ms"]))
    rows = measure(comm, cases, args.rounds, warm_up=0, in_a_row=1, calls=steps)
    ways.close()
    ms = np.array(rows[0]["ms"])
    kept = ms < DISTURBED * np.median(ms)
    for row in rows:
        row["ms"] = np.array(row["ms"])[kept].tolist()
        row["median_ms"] = float(np.median(row["ms"]))
    return rows, int(args.rounds - kept.sum())


class Ways:
    """The ways to exchange gradients, each with a copy of a model."""

    def __init__(self, comm: MPI.Intracomm, model: Model, rule: str) -> None:
        self._comm = comm
        self._model = model
        self._rule = rule
        self._batch = model.examples(comm.rank)
        self._closing: list[Callable[[], object]] = []

    def cases(self, names: list[str]) -> list[Case]:
        """Make those of some names (collective); that without exchange is the first."""
        made = [self._optimized(ALONE, lambda optimizer: optimizer)]
        for name in names:
            if name == IN_BLOCKS:
                made.append(self._in_blocks())
            elif name == BARRIER:
                made.append(self._between(BARRIER, lambda params: self._comm.Barrier))
            elif name == RAW:
                made.append(self._between(RAW, self._packing))
            elif name == BUNDLED:
                made.append(self._bundled())
            elif name in OURS:
                made.append(self._ours(name))
            elif name in OF_DDP and importlib.util.find_spec("torch") is not None:
                made.append(self._ddp(name))
        return made

    def close(self) -> None:
        """Release what the ways use (collective)."""
        for close in self._closing:
            close()

    def _packing(self, params: list[Any]) -> Callable[[], None]:
        handoff = peers.Handoff(self._comm)
        self._closing.append(handoff.close)
        return lambda: handoff.swap(peers.cut([param.grad for param in params]))

    def _case(
        self,
        name: str,
        step: Callable[[], object],
        weights: Callable[[], list[np.ndarray]],
        finish: Callable[[], object] = nothing,
    ) -> Case:
        """Return a case that is right if all ranks have the same weights afterwards."""

        def is_right() -> bool:
            mine = weights()
            bits = self._comm.allgather([each.tobytes() for each in mine])
            is_finite = all(np.isfinite(each).all() for each in mine)
            return is_finite and bits.count(bits[0]) == len(bits)

        if name in OWN_WEIGHTS:
            is_right = runner.always
        # A step before its turn is not timed: afterwards what travels beside a step is
        # its own. What is under way at the end must not fall into another's turn.
        return Case(name, step, step, is_right, finish)

    def _optimizer(self) -> Any:
        return getattr(chainer.optimizers, self._rule)(**RULES[self._rule])

    def _optimized(self, name: str, wrap: Callable[[Any], Any]) -> Case:
        """Return the steps of an optimizer."""
        model = self._model.make()
        optimizer = wrap(self._optimizer()).setup(model)
        self._closing.append(getattr(optimizer, "finalize", nothing))
        return self._case(
            name,
            lambda: optimizer.update(model, *self._batch),
            lambda: weights_of(model),
            getattr(optimizer, "flush", nothing),
        )

    def _in_blocks(self) -> Case:
        communicator = create_communicator("naive", MPI.COMM_SELF)
        case = self._optimized(
            IN_BLOCKS,
            lambda optimizer: create_multi_node_optimizer(optimizer, communicator),
        )
        self._closing.append(communicator.finalize)
        return case

    def _between(
        self, name: str, make: Callable[[list[Any]], Callable[[], object]]
    ) -> Case:
        """Return steps that call something between backward and the update."""
        model = self._model.make()
        optimizer = self._optimizer().setup(model)
        exchange = make([param for _, param in sorted(model.namedparams())])

        def step() -> None:
            loss = model(*self._batch)
            model.cleargrads()
            loss.backward()
            exchange()
            optimizer.update()

        return self._case(name, step, lambda: weights_of(model))

    def _ours(self, name: str) -> Case:
        kind = "hierarchical"
        if name == DUMMY:
            kind = DUMMY
        folder = tempfile.TemporaryDirectory()
        if name == TRACED:
            os.environ[TRACE_VARIABLE] = folder.name
        communicator = create_communicator(kind, self._comm)
        os.environ.pop(TRACE_VARIABLE, None)

        def wrap(optimizer: Any) -> Any:
            return create_multi_node_optimizer(optimizer, communicator, **OURS[name])

        case = self._optimized(name, wrap)
        self._closing += [communicator.finalize, folder.cleanup]
        return case

    def _bundled(self) -> Case:
        communicator = peers.bundled(self._comm)
        import chainermn

        def wrap(optimizer: Any) -> Any:
            return chainermn.create_multi_node_optimizer(optimizer, communicator)

        return self._optimized(BUNDLED, wrap)

    def _ddp(self, name: str) -> Case:
        import torch  # type: ignore[import-not-found,unused-ignore]
        from torch.nn.parallel import DistributedDataParallel

        peers.start_gloo(self._comm)
        layers: list[Any] = []
        for n_in, n_out in pairwise(self._model.widths):
            layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
        bucket_mb = None
        if name == DDP_POWER_SGD:
            # All in one: over gloo the hook sends those of several in any order.
            bucket_mb = 1000
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=bucket_mb
        )
        if name == DDP_POWER_SGD:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            # It needs two steps without compression.
            state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        rule: Any = torch.optim.SGD
        settings = RULES[self._rule]
        if self._rule == "Adam":
            rule = torch.optim.Adam
        elif self._rule == "MomentumSGD":
            settings = {**settings, "momentum": 0.9}
        if name == DDP_ZERO:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), rule, **settings)
        else:
            optimizer = rule(model.parameters(), **settings)
        x = torch.from_numpy(self._batch[0])
        t = torch.from_numpy(self._batch[1]).long()

        def step() -> None:
            loss = torch.nn.functional.cross_entropy(model(x), t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def weights() -> list[np.ndarray]:
            return [each.detach().numpy() for each in model.parameters()]

        return self._case(name, step, weights)


def weights_of(model: Any) -> list[np.ndarray]:
    """Return a Chainer model's weights."""
    return [param.array for _, param in sorted(model.namedparams())]


def main() -> int:
    args = arguments()
    if args.hosts:
        jobs = [{"alpha": 1, "beta": 1}]
        return runner.main_on_hosts(args, run, jobs, ["json", "plot"])
    return runner.main(args, run)


if __name__ == "__main__":
    sys.exit(main())
