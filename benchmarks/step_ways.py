"""The ways to exchange gradients whose steps are timed, in turn."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import chainer
import numpy as np
import peers
from mpi4py import MPI
from step_models import Perceptron
from step_names import (
    ALONE,
    BARRIER,
    BUNDLED,
    DDP,
    DOUBLE,
    DUMMY,
    OVERLAPPED,
    RAW,
    SYNCHRONOUS,
    UNCOMPARED,
    ways_of,
)

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer

# Each turn lasts about so long, so that a clock and a barrier count little.
TURN_SECONDS, LEAST_STEPS = 0.03, 4
WARM_UP_STEPS = 10
# A round is disturbed if its steps without exchange took so many times their median.
DISTURBED = 1.1
# Models with more bytes are not packed whole into slots.
MOST_RAW_BYTES = 32 << 20

Step = Callable[[], None]


class Way:
    """One way: its model, its step, and what releases it."""

    def __init__(
        self, name: str, model: Any, step: Step, optimizer: Any = None
    ) -> None:
        self.name, self.model, self.step = name, model, step
        # Of ours: what is under way is the next step's, and must not fall into
        # another's turn.
        self.flush: Step = getattr(optimizer, "flush", lambda: None)
        self.close: Step = getattr(optimizer, "finalize", lambda: None)

    def weights(self) -> list[np.ndarray]:
        """Return copies of the weights."""
        if self.name == DDP:
            return [each.detach().numpy().copy() for each in self.model.parameters()]
        return [param.array.copy() for _, param in sorted(self.model.namedparams())]


class RawExchange:
    """Gradients packed whole, with a small header, into a slot of a window; two slots in turn."""

    HEADER_BYTES = 64

    def __init__(self, comm: MPI.Intracomm, params: list[Any]) -> None:
        self._comm, self._turn = comm, 0
        self._params = params
        size = self.HEADER_BYTES // 4 + sum(param.size for param in params)
        self._window = MPI.Win.Allocate_shared(2 * 4 * size, 4, comm=comm)
        memory = [self._window.Shared_query(rank)[0] for rank in range(comm.size)]
        self._slots = [np.asarray(each).view("f4").reshape(2, size) for each in memory]
        self._slots[comm.rank][...] = 0
        self._total = np.empty(size, "f4")
        self._window.Lock_all()

    def __call__(self) -> None:
        """Replace gradients by their means."""
        comm, grads = self._comm, [param.grad for param in self._params]
        self._turn ^= 1
        slots = [slots[self._turn] for slots in self._slots]
        own, start = slots[comm.rank], self.HEADER_BYTES // 4
        np.concatenate([grad.reshape(-1) for grad in grads], out=own[start:])
        self._window.Sync()
        comm.Barrier()
        self._window.Sync()
        total = np.add(slots[0], slots[1 % comm.size], out=self._total)
        for slot in slots[2:]:
            total += slot
        total *= np.float32(1 / comm.size)
        for grad in grads:
            grad[...] = total[start : start + grad.size].reshape(grad.shape)
            start += grad.size

    def close(self) -> None:
        self._slots = []
        self._window.Unlock_all()
        self._window.Free()


def make_ways(
    comm: MPI.Intracomm, perceptron: Perceptron, hosts: bool, chosen: list[str] | None
) -> list[Way]:
    """Make all ways, each with a model of its own (collective)."""
    batch = perceptron.examples(comm.rank)
    ways: list[Way] = []

    def wanted(name: str) -> bool:
        return name in ways_of(hosts) and (
            chosen is None or name in chosen or name == ALONE
        )

    def plain() -> tuple[Any, Any]:
        model = perceptron.make()
        return model, chainer.optimizers.SGD(0.01).setup(model)

    def with_optimizer(
        name: str, wrap: Callable[[Any], Any], communicator: Any = None
    ) -> None:
        model = perceptron.make(communicator)
        optimizer = wrap(chainer.optimizers.SGD(0.01)).setup(model)
        ways.append(
            Way(name, model, lambda: optimizer.update(model, *batch), optimizer)
        )

    def between(name: str, exchange: Step, model: Any, optimizer: Any) -> Way:
        def step() -> None:
            loss = model(*batch)
            model.cleargrads()
            loss.backward()
            exchange()
            optimizer.update()

        ways.append(Way(name, model, step))
        return ways[-1]

    with_optimizer(ALONE, lambda optimizer: optimizer)
    own = comm.Dup()
    if wanted(BARRIER):
        between(BARRIER, own.Barrier, *plain())
    model, optimizer = plain()
    nbytes = sum(param.array.nbytes for param in model.params())
    if wanted(RAW) and nbytes <= MOST_RAW_BYTES:
        raw = RawExchange(own, [param for _, param in sorted(model.namedparams())])
        between(RAW, raw, model, optimizer).close = raw.close
    if wanted(BUNDLED):
        bundled = peers.bundled(comm)
        import chainermn

        with_optimizer(
            BUNDLED, lambda it: chainermn.create_multi_node_optimizer(it, bundled)
        )
    kinds: dict[str, dict[str, Any]] = {
        DUMMY: {},
        SYNCHRONOUS: {},
        UNCOMPARED: {"on_drift": "ignore"},
        DOUBLE: {"double_buffering": True},
        OVERLAPPED: {"overlap": True},
    }
    for name, how in kinds.items():
        if wanted(name):
            ours = create_communicator(
                "dummy" if name == DUMMY else "hierarchical", comm
            )
            how = {"overlap": False, **how}
            with_optimizer(
                name,
                partial(create_multi_node_optimizer, communicator=ours, **how),
                ours,
            )
    if wanted(DDP) and not perceptron.normalized:
        # Few have PyTorch; who asks for it is told.
        with contextlib.suppress(*([] if chosen else [ImportError])):
            ways.append(_ddp(comm, perceptron, batch))
    return ways


def _ddp(
    comm: MPI.Intracomm, perceptron: Perceptron, batch: tuple[np.ndarray, np.ndarray]
) -> Way:
    import torch  # type: ignore[import-not-found,unused-ignore]
    from torch.nn.parallel import DistributedDataParallel

    peers.start_gloo(comm)
    layers: list[Any] = []
    for n_in, n_out in zip(perceptron.widths, perceptron.widths[1:], strict=False):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, t = torch.from_numpy(batch[0]), torch.from_numpy(batch[1]).long()

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Way(DDP, model, step)


def measure(
    comm: MPI.Intracomm,
    name: str,
    perceptron: Perceptron,
    args: argparse.Namespace,
    rounds: int,
) -> dict[str, Any]:
    """Time the steps of all ways for one model (collective)."""
    ways = make_ways(comm, perceptron, args.hosts, args.ways)
    for way in ways:
        for _ in range(WARM_UP_STEPS):
            way.step()
    right = [is_right(comm, way) for way in ways]
    seconds = max(comm.allgather(_time(comm, ways[0], 3)))
    calls = max(LEAST_STEPS, round(TURN_SECONDS / seconds))
    # Of a step; last, of one without exchange again.
    times = np.zeros((rounds, len(ways) + 1))
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = [(place + number) % len(ways) for place in range(len(ways))]
            for index in order:
                times[number, index] = _time(comm, ways[index], calls)
            times[number, -1] = _time(comm, ways[0], calls)
    finally:
        gc.enable()
    # A step is over when the slowest rank has it.
    times = np.max(comm.allgather(times), axis=0)
    alone = times[:, [0, -1]]
    kept = (alone < DISTURBED * np.median(alone)).all(axis=1)
    kept[np.argmin(alone.max(axis=1))] = True  # something is to be told in any case
    for way in ways:
        way.close()
    return {
        "model": name,
        "widths": perceptron.widths,
        "batch": perceptron.batch,
        "rounds": rounds,
        "disturbed": int(rounds - kept.sum()),
        "ways": [
            {
                "name": way.name,
                "ms": (1e3 * times[kept, index]).tolist(),
                "right": right[index],
            }
            for index, way in enumerate(ways)
        ],
    }


def is_right(comm: MPI.Intracomm, way: Way) -> bool:
    """Whether all ranks have the same weights, if their gradients are exchanged (collective)."""
    if way.name in (ALONE, BARRIER, DUMMY):
        return True
    mine = way.weights()
    ranks = comm.allgather([each.tobytes() for each in mine])
    return all(rank == ranks[0] for rank in ranks) and all(
        np.isfinite(e).all() for e in mine
    )


def _time(comm: MPI.Intracomm, way: Way, steps: int) -> float:
    """Return the seconds that each of so many steps in a row took on this rank (collective)."""
    comm.Barrier()
    # Not timed: afterwards what travels beside a step is the step's before it.
    way.step()
    start = time.perf_counter()
    for _ in range(steps):
        way.step()
    seconds = time.perf_counter() - start
    way.flush()
    return seconds / steps
