"""A communicator of its own for the thread that exchanges gradients beside the training."""

from __future__ import annotations

import contextlib

from chainermn_comm import CommunicatorBase

from .gpus import are_on_gpus
from .parameter_set import ParameterSet

# What is under way is four times as much: a link of 1 Gbit/s stays busy between two looks of a
# thread that seldom has the interpreter, and small messages of others wait 4 ms behind it at most.
# See docs/decisions/double_buffering.md.
PIECE_BYTES = 125 << 10


def make_channel(communicator: CommunicatorBase, params: ParameterSet) -> CommunicatorBase:
    """Return a communicator of the same ranks, for gradients in pieces (collective).

    From GPU to GPU they travel in the pieces that these want.
    """
    channel = communicator.split(0, communicator.rank)
    if are_on_gpus(params):
        return channel
    with contextlib.suppress(KeyError, ValueError):  # a class of the user's may lack this setting
        if channel.get_config("chunk_bytes") is None:
            channel.set_config("chunk_bytes", PIECE_BYTES)
    return channel
