"""Whatever a crash leaves of a save, the run goes on from the newest complete checkpoint."""

from __future__ import annotations

import pytest

from tests.support.training.checkpoints import (
    files,
    generation,
    link,
    make_checkpointer,
    on_rank_0,
)
from tests.train.crashes import State, crashes

# On two ranks: each of some fifty crashes is an own resume.
pytestmark = [
    pytest.mark.world,
    pytest.mark.ranks(2),
    pytest.mark.usefixtures("unsynced"),
]


def complete(state: State, size: int) -> list[int]:
    """The iterations of which all ranks' files are there."""
    ranks: dict[str, set[str]] = {}
    for name, _ in state:
        if not name.endswith((".tmp", ".lock")):
            _, rank, save = name.split(".")
            ranks.setdefault(save, set()).add(rank)
    found = (save for save, those in ranks.items() if len(those) == size)
    return sorted(int(save.split("-")[0]) for save in found)


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
    options = {"cp_interval": 1, "gc_interval": 1, "background": background}
    with crashes(folder / "run") as found:
        checkpointer = make_checkpointer(
            naive, folder / "run", **options | {"cp_interval": kept}
        )
        for iteration in (3, 6):
            for value in values:
                checkpointer.save(link(iteration + value, naive.rank), iteration)
        checkpointer.finalize()
    states = sorted(set().union(*naive.allgather_obj(found)))
    begins = set()
    for number, state in enumerate(states):
        place = folder / str(number)
        on_rank_0(naive, place.mkdir)
        for name, contents in state if naive.rank == 0 else ():
            (place / name).write_bytes(contents)
        naive.allgather_obj(None)
        target, resumed = link(0, -1), make_checkpointer(naive, place, **options)
        begin = resumed.maybe_load(target)
        assert begin == max(complete(state, naive.size), default=None)
        loaded = naive.allgather_obj(target.values.tolist())
        if begin is None:
            assert loaded == [[0, -1]] * naive.size
        else:
            allowed = [
                [[begin + v, rank] for rank in range(naive.size)] for v in values
            ]
            assert loaded in allowed
        resumed.save(target, 9)
        resumed.flush()
        resumed.save(target, 10)
        resumed.flush()
        assert files(naive, place) == generation(naive, 10), state
        resumed.finalize()
        assert files(naive, place) == set()
        begins.add(begin)
    assert begins == {None, 3, 6}
