"""Puts what ranks share of a checkpoint into one file, for Chainer's own `load_npz`.

    python -m chainermn_train.checkpoint result/run.0.10 model.npz

It takes the file of any rank; those of all must be there. In the file that it makes, a
model has the path "updater/model:main/".
"""

from __future__ import annotations

import sys
from pathlib import Path

from .dealing import put_together
from .shards import DamagedError, begin_arrays, read_head, read_shard


def main() -> None:
    """Do what the command line says; exit with a message where that can't be done."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    try:
        head = read_head(source)
        save = source.name.rpartition(".")[2]
        paths = [
            source.with_name(f"{head.name}.{rank}.{save}") for rank in range(head.size)
        ]
        if source != paths[head.rank]:
            sys.exit(f"{source.name} is no checkpointer's file {paths[head.rank].name}")
        if len({read_head(path).id for path in paths}) > 1:
            sys.exit(f"the files of {head.name!r}, {save}, are of several saves")
        state = put_together(map(read_shard, paths))
        arrays = {name: array for name, array in state.items() if array is not None}
        with begin_arrays(target, arrays) as complete:
            complete()
    except (OSError, DamagedError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
