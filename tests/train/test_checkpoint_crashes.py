"""Whatever a crash leaves of a save, the run goes on from the newest checkpoint with a manifest."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import files, generation, link, make_checkpointer, on_rank_0
from tests.support.crashes import State, crashes

# On two ranks: each of some fifty crashes is an own resume.
pytestmark = [pytest.mark.world, pytest.mark.ranks(2), pytest.mark.usefixtures("unsynced")]


def manifests(state: State) -> list[int]:
    found = [name.split(".") for name, _ in state]
    return sorted(int(words[2]) for words in found if words[1] == "commit" and len(words) == 3)


def generations(state: State) -> set[str]:
    """Those of which a rank's file is there."""
    found = [name.split(".") for name, _ in state]
    return {words[2] for words in found if words[1] != "commit"}


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
def test_goes_on_after_a_crash_at_any_change_of_the_files(naive, folder, background, values, kept):
    options = {"cp_interval": 1, "gc_interval": 1, "background": background}
    with crashes(folder / "run") as found:
        checkpointer = make_checkpointer(naive, folder / "run", **options | {"cp_interval": kept})
        for iteration in (3, 6):
            for value in values:
                checkpointer.save(link(iteration + value, naive.rank), iteration)
        checkpointer.finalize()
    states = sorted(set().union(*naive.allgather_obj(found)))
    begins = set()
    for number, state in enumerate(states):
        assert manifests(state) or len(generations(state)) < 2, "in the end, the newest goes last"
        place = folder / str(number)
        on_rank_0(naive, place.mkdir)
        for name, contents in state if naive.rank == 0 else ():
            (place / name).write_bytes(contents)
        naive.allgather_obj(None)
        target, resumed = link(0, -1), make_checkpointer(naive, place, **options)
        begin = resumed.maybe_load(target)
        assert begin == max(manifests(state), default=None)
        loaded = naive.allgather_obj(target.values.tolist())
        if begin is None:
            assert loaded == [[0, -1]] * naive.size
        else:
            allowed = [[[begin + v, rank] for rank in range(naive.size)] for v in values]
            assert loaded in allowed
        resumed.save(target, 9)
        resumed.flush()
        resumed.save(target, 10)  # in the background it removes the one before the last
        resumed.flush()
        stay = (9, 10) if background else (10,)
        assert files(naive, place) == generation(naive, *stay), state
        resumed.finalize()
        assert files(naive, place) == set()
        begins.add(begin)
    assert begins == {None, 3, 6}
