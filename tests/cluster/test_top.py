"""`chainermn top` and `stacks` over hosts: the first one's monitor asks the others."""

from __future__ import annotations

import json

from tests.support.jobs import commands
from tests.support.watchdog import looking


def test_the_first_host_shows_all_ranks_and_others_their_own(cluster, tmp_path):
    def look(_):
        return [
            shown("alpha", "top", "--json"),
            shown("alpha", "stacks"),
            shown("beta", "top", "--json"),
            shown("beta", "stacks"),
            shown("beta", "top"),
        ]

    def shown(host, *words):
        return commands.run(*cluster.on(host), *commands.MODULE, *words).stdout

    ranks = {"alpha": 2, "beta": 1}
    seen = looking.while_running(look, start=cluster.job, ranks=ranks)
    top, stacks, theirs, their_stacks, their_text = seen
    found = json.loads(top)
    assert [it["host"] for it in found["ranks"]] == ["alpha", "alpha", "beta"]
    assert found["unseen"] == []
    assert found["slowest"] == 1
    # Rank 1 sleeps before each update, and rank 0 computes for a moment too.
    assert set(found["ranks"][2]["waits_for"]) <= {0, 1}
    for it in found["ranks"]:
        assert it["steps_per_second"]
    assert [it["memory_bytes"] is None for it in found["ranks"]] == [False, False, True]
    assert "rank 2 on beta, process " in stacks
    found = json.loads(theirs)
    assert [it["rank"] for it in found["ranks"]] == [2]
    assert found["unseen"] == ["alpha"]
    assert "alpha\nnot seen from here\n" in their_stacks
    assert their_text.endswith(
        "only ranks of this host are shown; to see all, run it on alpha\n"
    )
