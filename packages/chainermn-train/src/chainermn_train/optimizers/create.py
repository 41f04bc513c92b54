"""The function that makes a multi-node optimizer."""

from __future__ import annotations

from typing import Any

from chainer.backends.cuda import available as has_gpus

from chainermn_comm import CommunicatorBase

from ..collective_errors import require_communicator_or_none, require_integer
from .delayed_exchange import DelayedExchange
from .gradient_exchange import GradientExchange
from .multi_node_optimizer import MultiNodeOptimizer
from .overlapped_exchange import OverlappedExchange

_ON_DRIFT = ("raise", "synchronize", "ignore")


def create_multi_node_optimizer(
    actual_optimizer: Any,
    communicator: CommunicatorBase | None,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    accumulate_steps: int = 1,
    overlap: bool | None = None,
    on_drift: str = "raise",
) -> MultiNodeOptimizer:
    """Make a Chainer optimizer work on all ranks at once.

    Making it is no collective call; its ``update`` is (all ranks must call it). All
    ranks make and copy optimizers in the same order, by which they are known. Ranks
    may start from different weights and states: the first update gives rank 0's to all.
    It compares class and hyperparameters, which must be equal on all ranks; change them
    on every rank. Hooks that draw random numbers, such as
    ``chainer.optimizer_hooks.GradientNoise``, let ranks drift apart, unless all draw
    the same: seed NumPy's generator (CuPy's on GPUs) alike on all ranks, and let
    nothing else, such as shuffling or dropout, draw from it on some of them only.

    Args:
        actual_optimizer: a Chainer optimizer, set up or not; or anything with its
            ``setup``, ``update`` and ``target``.
        communicator: the ranks that train together. With None the optimizer can be set
            up, saved and loaded, and an update raises RuntimeError.
        double_buffering: exchange gradients in the background while the next update's
            are computed. Each update then steps along the gradients of the update
            before it; the first one doesn't step. It takes memory for a second set of
            gradients, and changes what is learnt a little. For GPUs and CPUs, with any
            communicator. When training has ended, all ranks call
            :meth:`~MultiNodeOptimizer.flush`, which steps along the last gradients.
        zero_fill: count a gradient that a rank doesn't have (None) as zeros. Without it
            ranks must agree on which gradients are missing.
        accumulate_steps: how many updates make one step: their gradients are added up
            on each rank, and the last of these updates exchanges and uses the mean of
            all. Every update counts the same, whatever its number of examples. When
            training has ended, all ranks call :meth:`~MultiNodeOptimizer.flush`, which
            steps along the gradients of fewer updates.
        overlap: send gradients while backward computes the others. Parameters become
            those of the synchronous way. None decides: on where ranks sit on several
            machines or parameters on GPUs, off inside one machine's CPUs, where no core
            is free. It takes memory for a second set of gradients. Where it can't be
            done (no loss function, ``accumulate_steps``, another's communicator, an
            ``allreduce_grad_dtype`` narrower than a parameter, 16-bit parameters where
            only some ranks share a machine) gradients are sent after backward.
        on_drift: what happens where ranks' parameters or optimizer states are found to
            differ. Each update that exchanges compares 2 KiB of them, or a thousandth
            if that is more, so that some 1,000 updates compare all: ``"raise"``
            RankMismatchError, give rank 0's state to all (``"synchronize"``, with a
            warning), or ``"ignore"`` it and compare nothing.

    Returns:
        An optimizer that is used like ``actual_optimizer``; see
        :class:`MultiNodeOptimizer`.

    Raises:
        TypeError: an argument is not an optimizer, not a communicator or not an
            integer.
        ValueError: ``accumulate_steps`` is less than 1, both ``overlap`` and
            ``double_buffering`` are on, or ``on_drift`` is none of these.
    """
    comm = require_communicator_or_none(communicator, "create_multi_node_optimizer")
    if isinstance(actual_optimizer, MultiNodeOptimizer):
        raise TypeError(
            "the optimizer is already a multi-node optimizer; pass it on as it is"
        )
    if isinstance(actual_optimizer, type) or not hasattr(actual_optimizer, "setup"):
        raise TypeError(
            "create_multi_node_optimizer needs a Chainer optimizer, such as "
            f"chainer.optimizers.Adam(), not {type(actual_optimizer).__name__}"
        )
    steps = require_integer("accumulate_steps", accumulate_steps, 1)
    if overlap and double_buffering:
        raise ValueError(
            "choose overlap or double_buffering: gradients can't travel twice"
        )
    if on_drift not in _ON_DRIFT:
        raise ValueError(
            f"on_drift must be one of {', '.join(_ON_DRIFT)}, not {on_drift!r}"
        )
    zero_fill = bool(zero_fill)
    settings = {
        "double_buffering": bool(double_buffering),
        "accumulate_steps": steps,
        "zero_fill": zero_fill,
        "overlap": overlap,
        "on_drift": on_drift,
    }
    if getattr(communicator, "communicator_name", None) == "dummy":
        settings["on_drift"] = "ignore"  # its ranks do drift apart
    only_on_gpus = overlap is None and comm.inter_size == 1
    if double_buffering:
        exchange: GradientExchange = DelayedExchange(comm, zero_fill)
    elif overlap is False or steps > 1 or (only_on_gpus and not has_gpus):
        exchange = GradientExchange(comm, zero_fill)
    else:
        exchange = OverlappedExchange(comm, zero_fill, only_on_gpus)
    return MultiNodeOptimizer(actual_optimizer, comm, settings, exchange)
