"""Checkpoints and snapshots of all ranks, which a job goes on from."""

from .checkpointer import MultiNodeCheckpointer
from .create import create_multi_node_checkpoint, create_multi_node_checkpointer
from .snapshot import MultiNodeSnapshot, multi_node_snapshot

__all__ = [
    "MultiNodeCheckpointer",
    "MultiNodeSnapshot",
    "create_multi_node_checkpoint",
    "create_multi_node_checkpointer",
    "multi_node_snapshot",
]
