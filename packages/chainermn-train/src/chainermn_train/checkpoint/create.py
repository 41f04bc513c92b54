"""The function that makes a multi-node checkpointer."""

from __future__ import annotations

import os

from chainermn_comm import CommunicatorBase

from ..collective_errors import require_communicator, require_integer
from .checkpointer import MultiNodeCheckpointer


def create_multi_node_checkpointer(
    name: str,
    comm: CommunicatorBase,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | os.PathLike[str] | None = None,
    *,
    background: bool = False,
) -> MultiNodeCheckpointer:
    """Make an extension that saves the state of all ranks, for the job to go on from.

    Making it is no collective call; saving and ``maybe_load`` are (all ranks must call them).
    Every rank writes a file ``<name>.<rank>.<iteration>``: what Chainer serializes, and the
    state of NumPy's and Python's random generators. Once all are on the disk, rank 0 writes
    ``<name>.commit.<iteration>`` with their checksums; a generation without it is never
    loaded. So a job may be killed at any time. Ranks may share the folder or each have their
    own, on their node, to which they must come back.

        checkpointer = create_multi_node_checkpointer("run", comm)
        trainer.extend(checkpointer, trigger=(25, "iteration"))
        checkpointer.maybe_load(trainer, optimizer)  # after all other extensions are there
        trainer.run()

    Without a ``trigger`` it saves at every iteration. In the trainer it is an extension of the
    run's name.

    A ``MultiprocessIterator`` that shuffles draws orders ahead of time, which no checkpoint knows
    of: give it a :class:`ResumableOrderSampler`, or a resumed run may see other batches.

    When training has finished without an error on this rank, all checkpoints are removed.

    Args:
        name: of the run: part of the files' names; the same on all ranks.
        comm: the ranks that train together.
        cp_interval: how many generations are kept at least.
        gc_interval: older ones are removed as soon as there are as many of them.
        path: the folder; made if need be. None for the trainer's ``out``; for another target,
            its ``out`` if that is a path, or else ``result``.
        background: hold training only while the state is copied (which takes as much memory
            as the state), and write the copy meanwhile. A generation is committed at the next
            save or :meth:`~MultiNodeCheckpointer.flush`, where errors in writing are raised
            too; a job that is killed goes on from the generation before the last one written.

    Warns:
        RuntimeWarning: once, on rank 0, when a trainer with such an iterator is saved or loaded.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the name can't be part of a file's name, or an interval is less than 1.
    """
    comm = require_communicator(comm, "create_multi_node_checkpointer")
    if not isinstance(name, str):
        raise TypeError(f"the name of a checkpointer is a str, not {type(name).__name__}")
    if not name or os.sep in name or not name.isprintable():
        raise ValueError(
            f"the name of a checkpointer is part of its files' names, so {name!r} won't do: "
            "it must not be empty, nor contain a slash or a control character"
        )
    if path is not None:
        path = os.fspath(path)
    cp_interval = require_integer("cp_interval", cp_interval, 1)
    gc_interval = require_integer("gc_interval", gc_interval, 1)
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path, bool(background))


create_multi_node_checkpoint = create_multi_node_checkpointer  # the manual's older name
