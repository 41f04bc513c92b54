"""A snapshot that several ranks share is read whole, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_train.checkpoint.snapshot_files import TAKEN_BY, read
from tests.support import jobs
from tests.support.scripts import ROOT


def test_no_byte_that_is_flipped_changes_in_silence_what_is_read(tmp_path):
    path = tmp_path / "snapshot"
    state = {TAKEN_BY: np.array([0, 1, 2, 3]), "w": np.linspace(0, 1, 20), "text": np.array("é")}
    with path.open("wb") as file:
        np.savez_compressed(file, **state)
    whole, refused = path.read_bytes(), 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 8]) + whole[position + 1 :])
        try:
            found = read(path)
        except ValueError:
            refused += 1
        else:
            assert found.keys() == state.keys(), position
            assert all(found[key].tobytes() == state[key].tobytes() for key in state), position
    assert refused > len(whole) / 2


@pytest.mark.full
def test_eight_ranks_go_on_from_two_and_one_from_eight():
    name = "tests/train/test_snapshot.py::test_fewer_and_more_ranks_go_on"
    words = ("-m", "pytest", "--world", "--full", "-p", "no:cacheprovider", name)
    environment = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0"}
    job = jobs.run(8, *words, cwd=ROOT, environment=environment, seconds=600)
    assert job.returncode == 0, job
    assert "1 passed" in job.out, job
