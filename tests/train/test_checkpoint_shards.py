"""A shard is read as it was written, or refused."""

from __future__ import annotations

import numpy as np

from chainermn_train.checkpoint.shards import (
    DamagedError,
    Head,
    Piece,
    Shard,
    begin_arrays,
    encode,
    read_head,
    read_shard,
)


def test_no_byte_that_is_flipped_changes_in_silence_what_is_read(tmp_path):
    path, head = tmp_path / "run.0.1", Head("run", 1, "id", 0, 2)
    values = {"w": np.linspace(0, 1, 20), "none": None, "text": np.array("é")}
    piece = Piece((40,), 20, np.arange(20))
    arrays = encode(head, Shard(values, {"v": piece}, {"own": np.array(3)}))
    with begin_arrays(path, arrays) as complete:
        complete()
    whole, refused = path.read_bytes(), 0
    expected = [f"{each}" for each in (read_head(path), read_shard(path))]
    for position in range(len(whole)):
        path.write_bytes(
            whole[:position] + bytes([whole[position] ^ 8]) + whole[position + 1 :]
        )
        try:
            found = [f"{each}" for each in (read_head(path), read_shard(path))]
        except DamagedError:
            refused += 1
        else:
            assert found == expected, position
    assert refused > len(whole) / 3
