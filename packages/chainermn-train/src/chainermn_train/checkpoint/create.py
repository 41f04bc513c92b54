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

    Making the extension is no collective call; saving and ``maybe_load`` are (all ranks
    must call them). State that is the same on all ranks (the model, the optimizer,
    counters) is saved once: each rank writes a part of this state into its file
    ``<name>.<rank>.<iteration>``. The file also has the state that is the rank's own,
    such as how far the rank is in its examples, and the random generators of NumPy and
    Python. A checkpoint is complete when all files are there and undamaged. A job may be
    killed at any time, because an incomplete checkpoint is never loaded. ``maybe_load``
    loads a checkpoint on any number of ranks. Ranks may share one folder, or each have a
    folder on their own node; then a resumed job must run on the same nodes.

        checkpointer = create_multi_node_checkpointer("run", comm)
        trainer.extend(checkpointer, trigger=(25, "iteration"))
        checkpointer.maybe_load(trainer, optimizer)  # after all other extensions are there
        trainer.run()

    Without a ``trigger`` the extension saves at every iteration. The trainer knows the
    extension by the name of the run.

    When training has finished without an error on this rank, all checkpoints are
    removed.

    Args:
        name: the name of the run, the same on all ranks. File names begin with it.
        comm: the ranks that train together.
        cp_interval: how many checkpoints are kept at least.
        gc_interval: older checkpoints are removed as soon as there are this many.
        path: the folder, which is made if need be. None for the folder ``out`` of the
            first target that is saved or loaded, as a trainer has it; for ``result`` if
            the target has none.
        background: hold training only while ranks compare checksums of the state and
            copy their parts, which takes as much memory; a thread writes the copies.
            Errors in writing are raised at the next save or
            :meth:`~MultiNodeCheckpointer.flush`.

    Warns:
        RuntimeWarning: on rank 0, when a trainer is first saved with a
            ``MultiprocessIterator`` that shuffles. This iterator draws orders ahead of time, and no
            checkpoint knows them: give it a :class:`ResumableOrderSampler`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the name can't be part of a file's name, or an interval is less than
            1.
    """
    comm = require_communicator(comm, "create_multi_node_checkpointer")
    if not isinstance(name, str):
        raise TypeError(
            f"the name of a checkpointer is a str, not {type(name).__name__}"
        )
    if not name or os.sep in name or not name.isprintable():
        raise ValueError(
            f"the name of a checkpointer is part of its files' names, so {name!r} won't do: "
            "it must not be empty, nor contain a slash or a control character"
        )
    if path is not None:
        path = os.fspath(path)
    cp_interval = require_integer("cp_interval", cp_interval, 1)
    gc_interval = require_integer("gc_interval", gc_interval, 1)
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path, background)


create_multi_node_checkpoint = create_multi_node_checkpointer  # the manual's older name
