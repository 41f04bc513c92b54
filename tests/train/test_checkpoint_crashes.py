"""Whatever a crash leaves of a save, the run goes on from the newest complete checkpoint."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support.training.checkpoints import (
    files,
    files_of,
    link,
    make_checkpointer,
    save_and_flush,
)
from tests.train.crashes import crashes

# On two ranks: each of some fifty crashes is an own resume.
pytestmark = [
    pytest.mark.world,
    pytest.mark.ranks(2),
    pytest.mark.usefixtures("unsynced"),
]


def newest_complete(state, size):
    """The last iteration of which all ranks' files are there."""
    files = [re.fullmatch(r"run\.\d+\.((\d+)(-\d)?)", name) for name, _ in state]
    saves = Counter(found.groups()[:2] for found in files if found)
    complete = [int(number) for (_, number), ranks in saves.items() if ranks == size]
    return max(complete, default=None)


@pytest.mark.parametrize(
    ("background", "values", "kept"),
    [
        (False, [0], 1),
        (False, [0], 2),
        (False, [0, 0.5], 1),
        (True, [0], 1),
        pytest.param(True, [0, 0.5], 1, marks=pytest.mark.full),
    ],
)
def test_goes_on_after_a_crash_at_any_change_of_the_files(
    naive, folder, background, values, kept
):
    options = {"cp_interval": kept, "gc_interval": 1, "background": background}
    with crashes(folder / "run") as found:
        checkpointer = make_checkpointer(naive, folder / "run", **options)
        for iteration in (3, 6):
            for value in values:
                checkpointer.save(link(iteration + value, naive.rank), iteration)
        checkpointer.finalize()
    states = sorted(set().union(*naive.allgather_obj(found)))
    begins = set()
    for number, state in enumerate(states):
        place = folder / str(number)
        if naive.rank == 0:
            place.mkdir()
            for name, content in state:
                (place / name).write_bytes(content)
        naive.allgather_obj(None)
        target = link(0, -1)
        resumed = make_checkpointer(naive, place, cp_interval=1, gc_interval=1)
        begin = resumed.maybe_load(target)
        begins.add(begin)
        assert begin == newest_complete(state, naive.size)
        allowed = [(begin + value, naive.rank) for value in values if begin]
        loaded = naive.allgather_obj(tuple(target.values))
        if begin:
            possible = allowed
        else:
            possible = [(0, -1)]
        assert loaded[naive.rank] in possible
        assert len({value for value, _ in loaded}) == 1
        for iteration in 9, 10:
            save_and_flush(resumed, iteration)
        assert files(naive, place) == files_of(naive, 10), state
        resumed.finalize()
        assert files(naive, place) == set()
    assert begins == {None, 3, 6}
