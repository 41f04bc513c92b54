"""A checkpoint's file is read as it was written, or refused."""

from __future__ import annotations

import numpy as np

from chainermn_train.checkpoint.checked_file import (
    DamagedError,
    RankFile,
    read_rank_file,
    write_file,
)


def test_no_byte_that_is_flipped_changes_in_silence_what_is_read(tmp_path):
    path = tmp_path / "run.0.1"
    shared = {"w": np.linspace(0, 1, 20), "text": np.array("é")}
    own = {"v": np.arange(20), "own": np.array(3)}
    write_file(path, RankFile("run", "1", "id", 0, 2, shared, own).arrays())
    whole = path.read_bytes()
    refused = 0
    expected = f"{read_rank_file(path)}"
    for position in range(len(whole)):
        flipped = bytes([whole[position] ^ 8])
        path.write_bytes(whole[:position] + flipped + whole[position + 1 :])
        try:
            assert f"{read_rank_file(path)}" == expected, position
        except DamagedError:
            refused += 1
    assert refused > len(whole) / 3
