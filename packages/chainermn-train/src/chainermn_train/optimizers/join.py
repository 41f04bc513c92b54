"""The function that lets ranks make different numbers of updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .join_block import JoinBlock, current_block
from .multi_node_optimizer import MultiNodeOptimizer


@contextmanager
def join(optimizer: MultiNodeOptimizer, *others: MultiNodeOptimizer) -> Iterator[None]:
    """Let this rank make fewer updates within than other ranks (leaving is collective).

        with chainermn.join(optimizer):
            for batch in batches:
                optimizer.update(model, *batch)

    A rank that leaves the block takes part in the other ranks' updates without examples
    until they have left, too: means are over the ranks that had examples, and all ranks
    have the same parameters. Until then only updates are possible: if a rank does
    something else (a flush, an evaluation, a save), all ranks raise RankMismatchError.

    No loss may communicate with the other ranks of the optimizers, as a
    ``MultiNodeBatchNormalization`` does: a rank that has left computes no loss. If one
    does, by the communicator of the optimizers, all ranks raise RankMismatchError; by
    another communicator, ranks wait for each other.

    With several optimizers, such as those of a GAN, all ranks that still have examples
    update the same optimizer next; the order and the numbers of updates are free.

    A rank may catch an error of its own update inside the block and go on; ranks that
    have left go on, too. If an exception leaves the block, the other ranks raise
    PeerError in their next update or where they wait at the end of the block, and
    gradients that were added up (``accumulate_steps``) are dropped on all ranks. No
    other rank is told of a KeyboardInterrupt or SystemExit, which end the job.

    Args:
        optimizer: made by :func:`create_multi_node_optimizer`.
        others: further ones, on the same communicator, in the same order on all ranks.

    Raises:
        TypeError: one is another kind of optimizer (on this rank only).
        ValueError: they have different communicators, or one is given twice (on this
            rank only).
        RuntimeError: this rank is in a block of ``join`` already.
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
