"""`chainermn top` and `stacks` over hosts: the first one's monitor asks the others."""

from __future__ import annotations

import json
import sys

from tests.support.jobs import commands
from tests.support.watchdog import looking


def test_the_first_host_shows_all_ranks_and_others_their_own(cluster, tmp_path):
    def look(_):
        chainermn = (sys.executable, "-m", "chainermn_tools")
        return [
            commands.run(*cluster.on(host), *chainermn, *words).stdout
            for host in ("alpha", "beta")
            for words in (("top", "--json"), ("stacks",), ("top",))
        ]

    ranks = {"alpha": 2, "beta": 1}
    seen = looking.while_running(look, start=cluster.job, ranks=ranks)
    top, stacks, text, theirs, their_stacks, their_text = seen
    found = json.loads(top)
    assert [it["host"] for it in found["ranks"]] == ["alpha", "alpha", "beta"]
    assert found["unseen"] == []
    assert found["slowest"] == 1
    # Rank 1 sleeps before each update, and rank 0 computes for a moment too.
    assert set(found["ranks"][2]["waits_for"]) <= {0, 1}
    assert all(it["steps_per_second"] for it in found["ranks"])
    assert [it["memory_bytes"] is None for it in found["ranks"]] == [False, False, True]
    assert "rank 2 on beta, process " in stacks
    assert "only ranks of this host" not in text
    found = json.loads(theirs)
    assert [it["rank"] for it in found["ranks"]] == [2]
    assert found["unseen"] == ["alpha"]
    assert "alpha\nnot seen from here\n" in their_stacks
    assert their_text.endswith(
        "only ranks of this host are shown; to see all, run it on alpha\n"
    )
