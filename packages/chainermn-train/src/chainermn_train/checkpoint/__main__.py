"""Puts what ranks share of a checkpoint into one file, for Chainer's own `load_npz`.

    python -m chainermn_train.checkpoint result/run.0.10 model.npz

It takes the file of any rank; those of all must be there. In the file that it makes, a
model has the path "updater/model:main/".
"""

from __future__ import annotations

import sys
from pathlib import Path

from .atomic_file import new_file
from .checked_file import DamagedError, read_rank_file, write_npz
from .same_on_all import merge


def main() -> None:
    """Do what the command line says; exit with a message where that can't be done."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    try:
        head = read_rank_file(source).head
        save = source.name.rpartition(".")[2]
        files = [
            read_rank_file(source.with_name(f"{head.name}.{rank}.{save}"))
            for rank in range(head.size)
        ]
        if len({file.head.id for file in files}) > 1:
            sys.exit(f"the files of {head.name!r}, {save}, are of several saves")
        with new_file(target) as file:
            write_npz(file, merge(files))
    except (OSError, DamagedError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
