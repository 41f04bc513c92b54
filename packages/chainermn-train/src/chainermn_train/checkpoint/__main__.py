"""Puts the arrays that ranks share in a checkpoint into one file for Chainer's `load_npz`.

    python -m chainermn_train.checkpoint result/run.0.10 model.npz

The first argument is the file of any rank; the files of all other ranks must be in the
same folder. In the second file, which the command makes, a trainer's model has the path
"updater/model:main/".
"""

from __future__ import annotations

import sys
from pathlib import Path

from .checked_file import DamagedError, merge, read_rank_file, write_file


def main() -> None:
    """Do what the command line says; exit with a message if a file can't be used."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    try:
        first = read_rank_file(source)
        files = [
            read_rank_file(source.with_name(f"{first.run}.{rank}.{first.save}"))
            for rank in range(first.size)
        ]
        write_file(target, merge(files))
    except (OSError, DamagedError) as error:
        sys.exit(f"{source}: {error}")


if __name__ == "__main__":
    main()
