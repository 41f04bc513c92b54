"""Checkpoints and snapshots of all ranks, from which a job goes on."""

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
