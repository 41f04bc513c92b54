"""The record that makes a checkpoint one is whole, or is none."""

from __future__ import annotations

import pytest

from chainermn_train.checkpoint.files import FileDigest, Manifest


def test_every_byte_of_a_record_counts():
    record = Manifest("run", 1, [FileDigest(1, "a" * 64), FileDigest(2, "b" * 64)])
    whole = record.encode()
    assert Manifest.decode(whole) == record
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            with pytest.raises(ValueError, match=r"manifest|checksum"):
                Manifest.decode(bytes(damaged))
