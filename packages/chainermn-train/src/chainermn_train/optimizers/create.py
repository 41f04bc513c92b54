"""The function that makes a multi-node optimizer."""

from __future__ import annotations

from typing import Any

from chainer.backends.cuda import available as has_gpus

from chainermn_comm import CommunicatorBase

from ..collective_errors import require_communicator, require_integer
from .exchanges import (
    CompressedExchange,
    DelayedExchange,
    GradientExchange,
    NarrowedCommunicator,
    OverlappedExchange,
    PowerSGD,
    ShardedExchange,
)
from .multi_node_optimizer import MultiNodeOptimizer

_ON_DRIFT = ("raise", "synchronize", "ignore")


def create_multi_node_optimizer(
    actual_optimizer: Any,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    accumulate_steps: int = 1,
    overlap: bool | None = None,
    on_drift: str = "raise",
    sharded: bool = False,
    compression: PowerSGD | str | None = None,
) -> MultiNodeOptimizer:
    """Make a Chainer optimizer that steps along the mean of all ranks' gradients (not collective).

    Its ``update`` is collective. All ranks make and copy optimizers in the same order,
    since a number identifies each optimizer. Ranks may start from different weights and
    states: the first update gives rank 0's to all. It also compares the optimizer's
    class and hyperparameters, which must be equal on all ranks; change a hyperparameter
    on every rank.

    A hook that draws random numbers, such as ``chainer.optimizer_hooks.GradientNoise``,
    lets ranks drift apart unless all draw the same numbers: seed NumPy's generator
    (CuPy's on GPUs) alike on all ranks, and let nothing else, such as shuffling or
    dropout, draw from it on some ranks only.

    Args:
        actual_optimizer: a Chainer optimizer, set up or not, or an object with the same
            ``setup``, ``update`` and ``target``.
        communicator: the ranks that train together.
        double_buffering: whether gradients travel in the background while the next
            update computes its own. Each update then steps along the gradients of the
            update before; the first update doesn't step. This changes the training a
            little, and takes memory for a second set of gradients. When training has
            ended, all ranks call :meth:`~MultiNodeOptimizer.flush`, which steps along
            the last gradients.
        zero_fill: whether a gradient that a rank lacks (None) counts as zeros. If
            False, the same gradients must be missing on all ranks.
        accumulate_steps: the number of updates that make one step. Their gradients are
            added up on each rank, and the last of these updates steps along the mean of
            all. Each update has the same weight, whatever its number of examples. When
            training has ended, all ranks call :meth:`~MultiNodeOptimizer.flush`, which
            steps along the gradients of an incomplete group.
        overlap: whether gradients travel while backward computes more gradients.
            Parameters are the same as without overlap. By default (None) overlap is on
            if ranks are on several machines or parameters are on GPUs, and off on the
            CPUs of one machine, where no core is free. It takes memory for a second set
            of gradients. In some cases gradients travel after backward nevertheless:
            with ``accumulate_steps``, without a loss function, on a communicator of
            another library, if ``allreduce_grad_dtype`` is narrower than a parameter,
            and for 16-bit parameters if only some ranks share a machine.
        on_drift: what happens if parameters or optimizer states are found to differ
            between ranks. ``"raise"`` raises RankMismatchError; ``"synchronize"`` gives
            rank 0's state to all, with a warning; ``"ignore"`` compares nothing. Each
            update that exchanges gradients compares 2 KiB of the state, or a thousandth
            if that is more, so about 1,000 updates compare everything.
        sharded: whether each rank keeps the optimizer's state of a part of each
            parameter, and steps that part alone (ZeRO, stage 1), on CPUs. Parameters get
            the same bits; with ``GradientClipping`` they may round otherwise, and so may
            16-bit parameters over several machines. Gradients travel in the dtypes of
            the parameters, whatever the communicator's ``allreduce_grad_dtype`` is.
            Parameters lie in memory that the ranks of a machine share, once for the
            machine, and a rank that writes to them writes to its own copy. Gradients go
            through such memory, too, which takes as much again. Update rules must
            compute each element by itself, as all of Chainer's do. Hooks must be
            ``WeightDecay``, ``Lasso``, ``GradientHardClipping``, ``GradientClipping``
            or ``MultiNodeGradientClipping``, called before the step. After an update
            each parameter has this rank's own gradient, not the mean, and update rules
            have no ``state``. No parameter may have two sharded optimizers. Checkpoints
            of :func:`create_multi_node_checkpointer` and :func:`multi_node_snapshot`
            hold the whole state, for any number of ranks, sharded or not. Over several
            machines new values travel while ``update(lossfun, ...)`` computes the next
            loss, unless ``overlap`` is False: reading a parameter, or its ``shape``,
            waits until its values are there.
        compression: makes gradients smaller for a slow network: a :class:`PowerSGD`, or
            ``"float16"`` or ``"bfloat16"``, in which this optimizer's gradients travel
            on a communicator without an ``allreduce_grad_dtype``.

    Returns:
        An optimizer that is used like ``actual_optimizer``, see
        :class:`MultiNodeOptimizer`.

    Raises:
        TypeError: an argument is no optimizer, no communicator or no integer.
        ValueError: ``accumulate_steps`` is less than 1; two of ``overlap``,
            ``double_buffering`` and PowerSGD are on; ``on_drift`` or ``compression`` is
            none of these; gradients would travel in two dtypes; or ``sharded`` is on
            with ``double_buffering``, with ``compression``, or with the communicator
            ``dummy``.
    """
    comm = require_communicator(communicator, "create_multi_node_optimizer")
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
    is_dummy = getattr(communicator, "communicator_name", None) == "dummy"
    if sharded and (double_buffering or compression is not None or is_dummy):
        raise ValueError(
            "sharded=True needs the means of an update's own gradients: choose another "
            "communicator than dummy, no double_buffering and no compression"
        )
    zero_fill = bool(zero_fill)
    settings = {
        "double_buffering": bool(double_buffering),
        "accumulate_steps": steps,
        "zero_fill": zero_fill,
        "overlap": overlap,
        "on_drift": on_drift,
        "sharded": bool(sharded),
        "compression": compression,
    }
    if is_dummy:
        settings["on_drift"] = "ignore"  # its ranks do drift apart
    only_on_gpus = overlap is None and comm.inter_size == 1
    sending: Any = comm
    if compression is not None and not isinstance(compression, PowerSGD):
        sending = NarrowedCommunicator(comm, compression)
    if sharded:
        exchange: GradientExchange = ShardedExchange(
            comm, zero_fill, overlap is not False
        )
    elif isinstance(compression, PowerSGD):
        if overlap or double_buffering:
            raise ValueError(
                "PowerSGD needs whole gradients before it sends any: use it without overlap "
                "and double_buffering"
            )
        exchange = CompressedExchange(comm, zero_fill, compression)
    elif double_buffering:
        exchange = DelayedExchange(sending, zero_fill)
    elif overlap is False or steps > 1 or (only_on_gpus and not has_gpus):
        exchange = GradientExchange(sending, zero_fill)
    else:
        exchange = OverlappedExchange(sending, zero_fill, only_on_gpus)
    return MultiNodeOptimizer(actual_optimizer, comm, settings, exchange)
