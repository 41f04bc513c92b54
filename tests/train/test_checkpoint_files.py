"""The manifest that makes a checkpoint one is whole, or is none."""

from __future__ import annotations

import pytest

from chainermn_train.checkpoint.files import CheckpointPaths, FileDigest, Manifest


def test_every_byte_of_a_record_counts():
    manifest = Manifest("run", 1, [FileDigest(1, "a" * 64), FileDigest(2, "b" * 64)])
    whole = manifest.encode()
    assert Manifest.decode(whole) == manifest
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            with pytest.raises(ValueError, match=r"manifest|checksum"):
                Manifest.decode(bytes(damaged))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_staged_file_stays_where_the_manifest_is_of_fewer_ranks(rank, tmp_path):
    paths = CheckpointPaths(tmp_path, "run")
    staged = paths.staging(rank, 1)
    staged.write_bytes(b"of a job with more ranks")
    paths.recover_publish(rank, Manifest("run", 1, [FileDigest(1, "a" * 64)]))
    assert list(tmp_path.iterdir()) == [staged]
