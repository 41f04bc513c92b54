"""An extension that reports how fast all ranks train, and what takes the time."""

from __future__ import annotations

from functools import partial
from typing import Any

import chainer
from chainer import training
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase

from ..collective_errors import (
    allgather_checked,
    raise_together,
    require_communicator,
)
from ..profiling import StepClock, StepTimes, TimedUpdater

_LINE = (
    "epoch {epoch}, iteration {iteration}: {examples_per_second:,.1f} examples/s on {ranks} "
    "ranks; a step takes {milliseconds:,.1f} ms: {computing:.0%} computing, "
    "{waiting:.0%} waiting, {wire:.0%} on the wire; slowest: rank {slowest_rank}, "
    "which computes {ratio:.2f} times the mean"
)


class ThroughputReport(training.Extension):
    """Reports how fast all ranks train, what takes the time, and which rank is the slowest.

    Each time the extension is triggered, by default once per epoch, rank 0 prints a
    line::

        epoch 1, iteration 300: 5,123.4 examples/s on 4 ranks; a step takes 78.1 ms: 71%
        computing, 20% waiting, 9% on the wire; slowest: rank 2, which computes 1.31 times
        the mean

    All ranks report the same observations, for ``LogReport``:
    ``throughput/examples_per_second`` (of all ranks), ``throughput/seconds_per_step``
    (the mean over ranks), its shares ``throughput/computing``, ``throughput/waiting``
    and ``throughput/wire``, which add up to 1, and ``throughput/slowest_rank``.

    A step is a call of the updater's ``update``: evaluation, snapshots and other
    extensions don't count. *On the wire* is the time in the exchange of gradients, and
    in the first step of parameters. Just before the exchange, ranks agree on a few
    integers. The time there, except for some microseconds, is *waiting* for slower
    ranks. All other time is *computing*, also reading data. The slowest rank is the rank
    that computes longest. With double buffering, only the time in which a step waits
    for its exchange is *on the wire*.

    A step communicates nothing more than without the report, and on CPUs timing costs
    some microseconds. On GPUs the shares are measured in one of 16 steps, which waits
    for its kernels.

    While the trainer runs, ``trainer.updater`` is a proxy of the original updater, so a
    trainer can have only one report. Snapshots hold nothing of the report: the first
    report of a resumed training covers the time since the resume.

    Calling the extension is collective, so its trigger must fire on all ranks at the
    same time.

    Args:
        comm: the ranks.

    Raises:
        TypeError: ``comm`` is no communicator.
    """

    trigger = (1, "epoch")
    default_name = "throughput"
    priority = training.PRIORITY_WRITER

    def __init__(self, comm: CommunicatorBase) -> None:
        self.comm = require_communicator(comm, "ThroughputReport")

    def initialize(self, trainer: Any) -> None:
        """Start timing (collective).

        Raises:
            TypeError: the trainer's updater has no multi-node optimizer on this rank,
                or its main iterator no data set (PeerError on the other ranks).
            ValueError: the trainer has another ThroughputReport (PeerError on the other
                ranks).
        """
        updater = trainer.updater
        with raise_together(self.comm.handshake, "ThroughputReport"):
            optimizers = updater.get_all_optimizers().values()
            if not any(hasattr(each, "communicator") for each in optimizers):
                raise TypeError(
                    "ThroughputReport needs an updater with a multi-node optimizer: make it with "
                    "create_multi_node_optimizer"
                )
            self._examples = _examples(updater)  # the number at the last report
            on_gpu = any(each.target.xp is cuda.cupy for each in optimizers)
            self._clock = StepClock(_wait_for_kernels if on_gpu else None)
            trainer.updater = TimedUpdater(updater, self._clock)
        self._stop = partial(setattr, trainer, "updater", updater)

    def finalize(self) -> None:
        """Stop timing, and leave the trainer as it was."""
        self._stop()

    def __call__(self, trainer: Any) -> None:
        """Report on the steps since the last call (collective).

        Raises:
            BaseException: the examples can't be counted on this rank (PeerError on the
                other ranks).
        """

        def since_last_call() -> tuple[float, StepTimes]:
            before = self._examples
            self._examples = _examples(trainer.updater)
            times = self._clock.times
            self._clock.times = StepTimes()
            return self._examples - before, times

        views = allgather_checked(self.comm, "ThroughputReport", since_last_call)
        examples, ranks = zip(*views, strict=True)
        if not all(rank.sampled for rank in ranks):
            return

        def total(name: str) -> Any:
            return sum(getattr(rank, name) for rank in ranks)

        waiting = total("waiting") / total("sampled")
        wire = total("communication") / total("sampled")
        computing = [rank.computing for rank in ranks]
        longest = max(computing)
        summary = {
            "examples_per_second": sum(examples) / max(rank.seconds for rank in ranks),
            "seconds_per_step": total("seconds") / total("steps"),
            "computing": 1 - waiting - wire,
            "waiting": waiting,
            "wire": wire,
            "slowest_rank": computing.index(longest),
        }
        prefix = self.name or self.default_name
        chainer.report({f"{prefix}/{key}": value for key, value in summary.items()})
        if self.comm.rank == 0:
            updater = trainer.updater
            line = _LINE.format(
                epoch=updater.epoch,
                iteration=updater.iteration,
                ranks=len(ranks),
                milliseconds=1000 * summary["seconds_per_step"],
                ratio=longest * len(ranks) / sum(computing),
                **summary,
            )
            print(line, flush=True)


def _wait_for_kernels() -> None:
    cuda.cupy.cuda.get_current_stream().synchronize()


def _examples(updater: Any) -> Any:
    """Return how many examples this rank has trained on, all epochs together."""
    iterator = updater.get_iterator("main")
    dataset = getattr(iterator, "dataset", None)
    if dataset is None:
        raise TypeError(
            "ThroughputReport can't count examples: the main iterator has no data set"
        )
    # An order may have fewer examples than the data set. For example, a
    # DistributedOrderSampler's order has a rank's part.
    return updater.epoch_detail * getattr(iterator, "_epoch_size", len(dataset))
