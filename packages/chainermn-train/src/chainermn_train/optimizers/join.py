"""The function that lets ranks make different numbers of updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .join_block import JoinBlock, current_block
from .multi_node_optimizer import MultiNodeOptimizer


@contextmanager
def join(optimizer: MultiNodeOptimizer, *others: MultiNodeOptimizer) -> Iterator[None]:
    """Let ranks make different numbers of updates inside a block (leaving it is collective).

        with chainermn.join(optimizer):
            for batch in batches:
                optimizer.update(model, *batch)

    A rank that leaves the block takes part in the other ranks' updates without examples,
    until all ranks have left. Means are over the ranks that have examples, and all
    ranks have the same parameters. Inside the block only updates are possible: if a rank
    makes another collective call, such as a flush, an evaluation or a save, all ranks
    raise RankMismatchError.

    A loss must not communicate with other ranks of the optimizers, as a
    ``MultiNodeBatchNormalization`` does, because a rank that has left computes no loss.
    If a loss communicates by the optimizers' communicator, all ranks raise
    RankMismatchError. By another communicator, ranks would wait for each other.

    With several optimizers, such as those of a GAN, all ranks that still have examples
    must update the same optimizer next. The order and the numbers of updates are free.

    A rank may catch an error of its own update inside the block and go on. If an
    exception leaves the block, the other ranks raise PeerError in their next update, or
    at the end of the block if they wait there, and gradients that were added up
    (``accumulate_steps``) are dropped on all ranks. Other ranks are not told of a
    KeyboardInterrupt or SystemExit, which end the job.

    Args:
        optimizer: an optimizer made by :func:`create_multi_node_optimizer`.
        others: further optimizers on the same communicator, in the same order on all
            ranks.

    Raises:
        TypeError: an argument is another kind of optimizer; raised on this rank alone.
        ValueError: optimizers have different communicators, or one is passed twice;
            raised on this rank alone.
        RuntimeError: this rank is already inside a block of ``join``.
        RankMismatchError, PeerError: as :meth:`MultiNodeOptimizer.update` raises them.
    """
    optimizers = (optimizer, *others)
    for each in optimizers:
        if not isinstance(each, MultiNodeOptimizer):
            raise TypeError(
                f"join needs multi-node optimizers, not {type(each).__name__}"
            )
    communicator = optimizer.communicator
    if any(each.communicator is not communicator for each in others):
        raise ValueError(
            "join needs optimizers of one communicator: a rank that has left could not "
            "take part in updates on two"
        )
    if len(set(optimizers)) < len(optimizers):
        raise ValueError("join was given one optimizer twice")
    if current_block.get() is not None:
        raise RuntimeError(
            "this rank is in a block of join() already: leave the inner one out, or write one "
            "block for all optimizers, `with join(a, b):`, else ranks wait for each other"
        )
    block = JoinBlock(communicator, [each._updates for each in optimizers])
    current_block.set(block)
    try:
        yield
        block.take_part()
    except Exception as error:
        block.leave_by(error)
        raise
    finally:
        current_block.set(None)
